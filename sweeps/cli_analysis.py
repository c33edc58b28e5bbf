"""Commands that judge finished runs: transfer, recommend, report; and the end of `study`, which does all three."""

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
    from analysis.recommend import Recommendation
    from analysis.table import RunTable
    from analysis.transfer import TransferFit
    from scaling.config import RunConfig
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
    app.command("recommend")(recommend_command)
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
    study = _study_of(table)
    runs, fits = _judge(table, study, columns or (), slope_tolerance, regret_tolerance)
    axes = _axes(runs, study, slope_tolerance, regret_tolerance)
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
    return _exit_code(chosen)


def recommend_command(
    table: Table,
    target: Target = None,
    run: Annotated[
        Path | None, typer.Option(help="For a table of runs: the config of one of them, as for `train`.", show_default=False)
    ] = None,
    columns: Columns = None,
    out: Annotated[Path | None, typer.Option(help="Write the large run's config here.", show_default=False)] = None,
    json: Json = False,
) -> int:
    """The config of the large run: every hyperparameter with its derivation, interval and how far it extrapolates."""
    study = _study_of(table)
    runs, fits = _judge(table, study, columns or ())
    file = _target_file(study, target)
    if file is None:
        raise ConfigError(Fault("--target", "no target is named", "give one: --target configs/targets/large.yaml"))
    template = _template(study, fits) if study else _template_of_table(table, run, fits)
    recommendation = _recommend(template, fits, file, _axes(runs, study))
    if out is not None:
        write_config_file(out, recommendation)
    document = recommendation.to_dict() | {"notes": list(runs.notes)}
    answer(document, lambda: "\n".join([str(recommendation), *(f"table: {note}" for note in runs.notes)]), json)
    return _exit_code(fits)


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

    table, fits = _judge(study.directory, study, ())
    file = _target_file(study, target)
    axes = _axes(table, study)
    recommendation = _recommend(_template(study, fits), fits, file, axes) if file else None
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
        write_config_file(config, recommendation)
        write_atomic(study.directory / "recommendation.json", _dumps(recommendation.to_dict()))
        lines += ["", str(recommendation).split("\n", 1)[0], *(f"  ! {warning}" for warning in recommendation.warnings)]
        lines += ["", f"the large run's config:  {config}", f"why, step by step:       {program()} recommend {study.directory}"]
    lines += [f"the runs as a table:     {runs}", f"the report with plots:   {report}"]
    answer(document, "\n".join(lines), as_json)
    return _exit_code(fits)


def write_config_file(path: Path, recommendation: Recommendation) -> None:
    """The large run as a RunConfig: `mutransfer explain` and `train` take it as it is."""
    import yaml

    from scaling.records import write_atomic

    head = (
        "# The large run, as recommended. The optimizer's values are those at the base shape; `mutransfer explain` on this file\n"
    )
    head += "# prints what they become for each tensor. Derivation: recommendation.json, or `mutransfer recommend`.\n"
    write_atomic(path, head + yaml.safe_dump(recommendation.run.model_dump(mode="json"), sort_keys=False))


def _dumps(document: Mapping[str, Any]) -> str:
    import json

    return json.dumps(json_safe(dict(document)), indent=1, allow_nan=False) + "\n"


def _exit_code(fits: Mapping[str, TransferFit]) -> int:
    from analysis.report import preferred

    return OK if preferred(fits).verdict == "transfers" else NOT_OK


def _study_of(path: Path) -> Study | None:
    """The study at `path`, or None when it is a table."""
    from sweeps.study_dir import STUDY_FILE, find_study

    is_study = (path.is_dir() and (path / STUDY_FILE).exists()) or path.suffix in (".yaml", ".yml")
    return find_study(path) if is_study else None


def _require_study(path: Path) -> Study:
    study = _study_of(path)
    if study is None:
        raise StudyError(Fault(str(path), "is no study", "give a study directory or its YAML file; `transfer` also takes tables"))
    return study


def _judge(
    path: Path,
    study: Study | None,
    columns: Sequence[str],
    slope_tolerance: float | None = None,
    regret_tolerance: float | None = None,
) -> tuple[RunTable, dict[str, TransferFit]]:
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
    at = study.config.own_sizes() if study else None
    return table, transfer(table, slope_tolerance=slope, regret_tolerance=regret, at=at)


def _axes(
    table: RunTable, study: Study | None, slope_tolerance: float | None = None, regret_tolerance: float | None = None
) -> dict[str, dict[str, AxisFit]]:
    """Every axis beside width, by name, and by parametrization."""
    from analysis.axes import fit_axes
    from sweeps.study import TransferTolerances

    defaults = study.config.tolerances if study else TransferTolerances()
    return fit_axes(
        table,
        study.config.own_sizes() if study else None,
        slope_tolerance=defaults.slope if slope_tolerance is None else slope_tolerance,
        regret_tolerance=defaults.regret if regret_tolerance is None else regret_tolerance,
    )


def _documents(axes: Mapping[str, Mapping[str, AxisFit]]) -> dict[str, dict[str, Any]]:
    return {name: {kind: fit.to_dict() for kind, fit in found.items()} for name, found in axes.items()}


def _target_file(study: Study | None, given: Path | None) -> Path | None:
    named = study.config.target if study else None
    return given or (Path(named) if named else None)


def _recommend(
    template: RunConfig, fits: Mapping[str, TransferFit], target_file: Path, axes: Mapping[str, Mapping[str, AxisFit]]
) -> Recommendation:
    from analysis.recommend import Quantity, check_target, recommend
    from analysis.report import preferred
    from analysis.target import TargetConfig
    from scaling.config_file import build, read_yaml

    source = read_yaml(target_file)
    target = build(TargetConfig, source)
    fit = preferred(fits)
    check_target(target, template, lambda key: f"{source.place((key,))}: {key}")
    losses = {optimum.width: Quantity(optimum.best_loss, optimum.best_loss_interval) for optimum in fit.optima}
    lines = [found[fit.parametrization] for found in axes.values() if fit.parametrization in found]
    return recommend(template, fit, target, losses, [line for line in lines if line.is_line])


def _template(study: Study, fits: Mapping[str, TransferFit]) -> RunConfig:
    """A run of the study in the parametrization that the recommendation starts from."""
    from analysis.report import preferred

    preference = preferred(fits).parametrization
    return study.config.template(next(kind for kind in study.config.parametrizations if kind == preference))


def _template_of_table(path: Path, run: Path | None, fits: Mapping[str, TransferFit]) -> RunConfig:
    """What a table of runs leaves out (base shape, schedule, betas), from the config of one of its runs.

    Raises ConfigError where the config contradicts the table.
    """
    from analysis.report import preferred
    from sweeps.cli_run import load_run

    if run is None:
        cure = "give the config of one of them: --run configs/models/base.yaml"
        raise ConfigError(Fault(str(path), "a table does not say what its runs have in common", cure))
    template, fit, cure = load_run(run, ()), preferred(fits), "give the config of a run of the table"
    kind, faults = template.parametrization.kind, []
    if fit.parametrization not in (kind, "unknown"):
        what = f"is a run under {kind}, and the table's fit is of {fit.parametrization}"
        faults.append(Fault(f"{run}: parametrization.kind", what, cure))
    stated = {"model.depth": template.model.depth, "training: tokens": template.tokens, "training: batch": template.batch_tokens}
    for (key, value), column in zip(stated.items(), ("depth", "tokens", "batch_tokens"), strict=True):
        measured = {item.cell.size(column) for item in fit.optima} - {float("nan")}
        if not any(size != size or size == value for size in measured):
            faults.append(Fault(f"{run}: {key}", f"is {value}, and the table's {column} is {sorted(measured)[0]:.12g}", cure))
    if faults:
        raise ConfigError(*faults)
    return template


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
