"""Commands that judge finished runs: transfer and report; and the end of `study`, which judges, recommends and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.results import json_safe
from scaling.errors import ConfigError, Fault, StudyError, program
from sweeps.cli_common import NOT_OK, OK, answer

if TYPE_CHECKING:
    from analysis.axes import AxisFit
    from analysis.table import RunTable
    from analysis.transfer import TransferFit
    from sweeps.study_dir import Study

Table = Annotated[
    Path, typer.Argument(help="A study directory or its YAML file, or a CSV/Parquet table of runs.", show_default=False)
]
Columns = Annotated[list[str] | None, typer.Option("--column", help="Name of a column: --column lr=base_lr.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Target = Annotated[
    Path | None, typer.Option(help="The large run, as in configs/targets/; default: the study's.", show_default=False)
]


def register(app: typer.Typer) -> None:
    app.command("transfer")(transfer_command)
    app.command("report")(report_command)


def transfer_command(
    table: Table,
    columns: Columns = None,
    parametrization: Annotated[str | None, typer.Option(help="Judge only this one.", show_default=False)] = None,
    slope_tolerance: Annotated[
        float | None, typer.Option(min=0, help="Octaves a doubling; default the study's, or 0.25.")
    ] = None,
    regret_tolerance: Annotated[float | None, typer.Option(min=0, help="Relative loss; default the study's, or 0.01.")] = None,
    axis: Annotated[
        str | None, typer.Option(help="Judge only this one: width, or another that was varied.", show_default=False)
    ] = None,
    json: Json = False,
) -> int:
    """Whether the best learning rate stays as the width grows: slope, regret, verdict, each with an interval; and every other axis."""
    study = study_of(table)
    runs, fits = judge(table, study, columns or (), slope_tolerance, regret_tolerance)
    axes = axes_of(runs, study, slope_tolerance, regret_tolerance)
    if axis is not None and axis != "width" and axis not in axes:
        raise ConfigError(Fault("--axis", f"{axis!r} was not varied", f"choose from: {', '.join(['width', *axes])}"))
    if parametrization is not None and parametrization not in fits:
        raise ConfigError(
            Fault("--parametrization", f"{parametrization!r} is not in the table", f"choose from: {', '.join(fits)}")
        )
    chosen = {parametrization: fits[parametrization]} if parametrization else fits
    others = {
        name: {kind: fit for kind, fit in found.items() if kind in chosen} for name, found in axes.items() if axis in (None, name)
    }
    if axis is not None and axis != "width":
        chosen = {kind: fit.transfer for kind, fit in others[axis].items()}
        others = {}
    document: dict[str, Any] = {"parametrizations": {kind: fit.to_dict() for kind, fit in chosen.items()}}
    if axis in axes:
        document["parametrizations"] = {kind: axes[axis][kind].to_dict() for kind in chosen}
    document |= {"axes": _documents(others), "notes": list(runs.notes)}
    parts = [*map(str, chosen.values()), *(str(fit) for found in others.values() for fit in found.values())]
    notes = [f"table: {note}" for note in runs.notes]
    answer(document, lambda: "\n\n".join([*parts, "\n".join(notes)]), json)
    return exit_code(chosen)


def report_command(
    table: Annotated[Path, typer.Argument(help="A study directory or its YAML file.", show_default=False)],
    target: Target = None,
    json: Json = False,
) -> int:
    """Write report.html in the study directory: verdict, tables, plots, recommendation."""
    return conclude(_require_study(table), {}, json, target)


def conclude(study: Study, document: dict[str, Any], as_json: bool, target: Path | None = None) -> int:
    """Judge, recommend and write the report of a study; print the verdict first."""
    from analysis.report import compare_losses, write_report
    from scaling.records import write_atomic
    from sweeps.recommending import read_target, recommendation_of, target_file, template_of, write_recommended

    table, fits = judge(study.directory, study, ())
    file = target_file(study, target)
    axes = axes_of(table, study)
    recommendation = recommendation_of(template_of(study, fits), fits, *read_target(file), axes) if file else None
    report = study.directory / "report.html"
    write_report(report, f"Study {study.config.name}", table, fits, recommendation, _facts(study), axes)
    runs = study.directory / "runs.csv"
    write_atomic(runs, table.frame.convert_dtypes().to_csv(index=False))
    comparison = compare_losses(fits)
    document |= {
        "study": str(study.directory),
        "report": str(report),
        "runs": str(runs),
        "parametrizations": {kind: fit.to_dict() for kind, fit in fits.items()},
        "axes": _documents(axes),
        "notes": list(table.notes),
        "best_losses": {"width": comparison.width, **comparison.losses} if comparison else None,
        "recommendation": recommendation.to_dict() if recommendation else None,
    }
    write_atomic(study.directory / "transfer.json", _dumps({key: document[key] for key in ("parametrizations", "axes")}))
    lines = []
    for fit in fits.values():
        undecided = fit.reasons if fit.verdict == "inconclusive" else ()
        lines += [fit.sentence(), *(f"    {reason}" for reason in undecided)]
    lines += [fit.transfer.sentence() for found in axes.values() for fit in found.values()]
    lines += [f"note: {note}" for note in table.notes[1:]]
    lines += [comparison.sentence()] if comparison else []
    if recommendation is not None:
        config = study.directory / "recommended.yaml"
        write_recommended(config, recommendation, study.directory)
        write_atomic(study.directory / "recommendation.json", _dumps(recommendation.to_dict()))
        lines += ["", str(recommendation).split("\n", 1)[0], *(f"  ! {warning}" for warning in recommendation.warnings)]
        lines += ["", f"the large run's config:  {config}", f"why, step by step:       {program()} recommend {study.directory}"]
    lines += [f"the runs as a table:     {runs}", f"the report with plots:   {report}"]
    answer(document, "\n".join(lines), as_json)
    return exit_code(fits)


def _dumps(document: Mapping[str, Any]) -> str:
    import json

    return json.dumps(json_safe(dict(document)), indent=1, allow_nan=False) + "\n"


def exit_code(fits: Mapping[str, TransferFit]) -> int:
    from analysis.report import preferred

    return OK if preferred(fits).verdict == "transfers" else NOT_OK


def study_of(path: Path) -> Study | None:
    """The study at `path`, or None when it is a table."""
    from sweeps.study_dir import STUDY_FILE, find_study

    is_study = (path.is_dir() and (path / STUDY_FILE).exists()) or path.suffix in (".yaml", ".yml")
    return find_study(path) if is_study else None


def _require_study(path: Path) -> Study:
    study = study_of(path)
    if study is None:
        raise StudyError(Fault(str(path), "is no study", "give a study directory or its YAML file; `transfer` also takes tables"))
    return study


def judge(
    path: Path,
    study: Study | None,
    columns: Sequence[str],
    slope_tolerance: float | None = None,
    regret_tolerance: float | None = None,
    at: Mapping[str, float] | None = None,
) -> tuple[RunTable, dict[str, TransferFit]]:
    """The runs of a study or a table, and every parametrization's fit over widths. at: levels of all else, of a table with several."""
    from analysis.table import load_table
    from analysis.transfer import transfer
    from sweeps.study import TransferTolerances

    mapping = {}
    for column in columns:
        name, separator, actual = column.partition("=")
        if not separator:
            raise ConfigError(Fault(f"--column {column}", "is not of the form NAME=COLUMN", "for example --column lr=base_lr"))
        mapping[name] = actual
    table = load_table(
        study.directory if study else path,
        mapping,
        study.config.owns if study else None,
        study.config.own_values() if study else None,
    )
    defaults = study.config.tolerances if study else TransferTolerances()
    slope = defaults.slope if slope_tolerance is None else slope_tolerance
    regret = defaults.regret if regret_tolerance is None else regret_tolerance
    at = study.config.own_sizes() if study else at
    return table, transfer(table, slope_tolerance=slope, regret_tolerance=regret, at=at)


def axes_of(
    table: RunTable,
    study: Study | None,
    slope_tolerance: float | None = None,
    regret_tolerance: float | None = None,
    at: Mapping[str, float] | None = None,
) -> dict[str, dict[str, AxisFit]]:
    """Every axis beside width, by name, and by parametrization."""
    from analysis.axes import fit_axes
    from sweeps.study import TransferTolerances

    defaults = study.config.tolerances if study else TransferTolerances()
    return fit_axes(
        table,
        study.config.own_sizes() if study else at,
        slope_tolerance=defaults.slope if slope_tolerance is None else slope_tolerance,
        regret_tolerance=defaults.regret if regret_tolerance is None else regret_tolerance,
    )


def _documents(axes: Mapping[str, Mapping[str, AxisFit]]) -> dict[str, dict[str, Any]]:
    return {name: {kind: fit.to_dict() for kind, fit in found.items()} for name, found in axes.items()}


def _facts(study: Study) -> list[tuple[str, str]]:
    """What a reader must know to judge the numbers."""
    from collections import Counter

    from scaling.records import read_records

    config, records = study.config, list(read_records(study.directory))
    counts = Counter(record.status for record in records)
    pruned = f", {counts['pruned']} pruned" if counts["pruned"] else ""
    model, training, schedule = config.model, config.training, config.schedule
    versions = sorted({f"torch {record.versions['torch']}, Python {record.versions['python']}" for record in records})
    return [
        ("description", config.description or "none"),
        ("runs", f"{len(records)} finished, {counts['diverged']} of them diverged{pruned}"),
        ("data", f"{config.data.source}, {config.data.tokenizer}, SHA-256 {config.data.sha256}"),
        ("model", f"depth {model.depth}, context {model.context}, {model.activation}, vocabulary {model.vocab_size}"),
        ("training", f"{training.steps} steps of {training.batch_size} sequences, {training.precision}"),
        ("schedule", f"{schedule.kind}, warm-up {schedule.warmup_fraction:g}, decay {schedule.decay_fraction:g}"),
        ("base width", str(config.base.width)),
        *((f"init, {kind}", _init_text(settings.init.model_dump())) for kind, settings in config.parametrizations.items()),
        (
            "compute",
            f"{sum(record.flops for record in records):.3g} FLOPs, {sum(record.process_s for record in records):,.0f} core seconds",
        ),
        ("software", "; ".join(versions)),
    ]


def _init_text(init: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in init.items())
