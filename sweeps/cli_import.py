"""`mutransfer import`: runs of other trackers as a table, or finished runs of another study taken over into one here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaling.errors import ConfigError, Fault, program, raise_all
from sweeps.cli_common import NOT_OK, OK, answer, messages

if TYPE_CHECKING:
    import pandas as pd

    from analysis.import_sources import Format
    from analysis.importers import ImportOptions
    from sweeps.import_study import TakenOver
    from sweeps.study_dir import Study

SHOWN = 3
TABLES = (".csv", ".parquet", ".pq")


def register(app: typer.Typer) -> None:
    app.command("import")(import_command)


def import_command(
    place: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A CSV, Parquet or JSON file of runs, a wandb or mlruns folder, MLflow's database URL, a folder of TensorBoard runs; "
            "with --into, a study's directory or database URL.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the table here (.csv or .parquet).", show_default=False)] = None,
    into: Annotated[
        Path | None, typer.Option(help="Take finished runs over into this study, its directory or YAML file.", show_default=False)
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            help="A column's name in the source, or a product: --column width=d_model, --column tokens=steps*batch*1024.",
            show_default=False,
        ),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--value", help="One value for all runs: --value parametrization=mup.", show_default=False),
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="Only runs that have this: --where weight_decay=0.1.", show_default=False)
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="A config key that tells no experiments apart: --ignore host.", show_default=False)
    ] = None,
    loss_metric: Annotated[str | None, typer.Option(help="The metric that is the loss.", show_default=False)] = None,
    loss_from: Annotated[str, typer.Option(help="last (final value), min, or mean:K (of the last K points).")] = "last",
    loss_unit: Annotated[str, typer.Option(help="nats or bits, per token.")] = "nats",
    form: Annotated[
        str | None,
        typer.Option("--format", help="table, wandb, mlflow or tensorboard; default: what lies there.", show_default=False),
    ] = None,
    name_pattern: Annotated[
        str | None,
        typer.Option(
            help=r"TensorBoard: a regular expression over a run's folder: 'w(?P<width>\d+)_lr(?P<lr>[^_]+)'.", show_default=False
        ),
    ] = None,
    config_file: Annotated[
        str | None, typer.Option(help="TensorBoard: the config file beside a run's events.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="With --into: the study, where the database holds several.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Make runs of another tracker a table for `transfer`, or take runs of another study over; without --out, look."""
    given = {
        "--out": out,
        "--column": columns,
        "--value": values,
        "--where": where,
        "--ignore": ignore,
        "--loss-metric": loss_metric,
        "--format": form,
        "--name-pattern": name_pattern,
        "--config-file": config_file,
    }
    if into is not None:
        idle = [option for option, value in given.items() if value] + [
            option
            for option, value, default in (("--loss-from", loss_from, "last"), ("--loss-unit", loss_unit, "nats"))
            if value != default
        ]
        cure = "leave it out: a study's runs are taken as they are"
        raise_all([Fault(option, "is for tables, and --into takes over runs of a study", cure) for option in idle], ConfigError)
        return _take_over(place, into, name, json)
    if name is not None:
        raise ConfigError(Fault("--name", "is for --into", "leave it out"))
    options = _options(columns, values, where, ignore, loss_metric, loss_from, loss_unit)
    return _import_table(place, _format(form), options, name_pattern, config_file, _out(out, place), json)


def _format(text: str | None) -> Format | None:
    from analysis.import_sources import FORMATS

    found = next((form for form in FORMATS if form == text), None)
    if text is not None and found is None:
        raise ConfigError(Fault(f"--format {text}", "is no format that can be read", f"choose from: {', '.join(FORMATS)}"))
    return found


def _out(out: Path | None, place: str) -> Path | None:
    if out is not None and out.suffix.lower() not in TABLES:
        raise ConfigError(Fault(f"--out {out}", "is neither .csv nor .parquet", f"for example --out {out.stem or 'runs'}.csv"))
    if out is not None and "://" not in place and out.resolve() == Path(place).resolve():
        raise ConfigError(Fault(f"--out {out}", "is the source itself", "give another file"))
    return out


def _options(
    columns: Sequence[str] | None,
    values: Sequence[str] | None,
    where: Sequence[str] | None,
    ignore: Sequence[str] | None,
    loss_metric: str | None,
    loss_from: str,
    loss_unit: str,
) -> ImportOptions:
    """The options as a config. Raises ConfigError with every one that is wrong."""
    from pydantic import ValidationError

    from analysis.importers import ImportOptions

    faults: list[Fault] = []
    pairs = {
        "columns": _pairs("--column", columns, "lr=base_lr", faults),
        "constants": _pairs("--value", values, "parametrization=mup", faults),
        "where": _pairs("--where", where, "weight_decay=0.1", faults),
    }
    rest = {"ignore": tuple(ignore or ()), "loss_metric": loss_metric, "loss_from": loss_from, "loss_unit": loss_unit}
    cures = {"loss_from": "--loss-from last, min, or mean:K with K a whole number", "loss_unit": "--loss-unit nats or bits"}
    try:
        options = ImportOptions.model_validate({**pairs, **rest})
    except ValidationError as error:
        for item in error.errors():
            key = str(item["loc"][0])
            faults.append(Fault(f"--{key.replace('_', '-')} {item['input']}", "is not one of its values", cures.get(key, "")))
    raise_all(faults, ConfigError)
    return options


def _pairs(option: str, texts: Sequence[str] | None, example: str, faults: list[Fault]) -> dict[str, str]:
    """{"lr": "base_lr"} from "lr=base_lr"."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not key:
            faults.append(Fault(f"{option} {text}", "is not of the form NAME=VALUE", f"for example {option} {example}"))
        elif key in found:
            faults.append(Fault(f"{option} {text}", f"{key!r} is given twice", "leave one out"))
        else:
            found[key] = value
    return found


def _import_table(
    place: str,
    form: Format | None,
    options: ImportOptions,
    name_pattern: str | None,
    config_file: str | None,
    out: Path | None,
    json: bool,
) -> int:
    from analysis.import_sources import read_source
    from analysis.importers import import_runs

    imported = import_runs(read_source(place, form, name_pattern, config_file), options)
    if out is not None:
        _write(out, imported.frame)
    document = imported.to_dict() | {"out": None if out is None else str(out)}
    then = (
        f"written to {out}; next: {program()} transfer {out}" if out else "nothing is written: give --out FILE.csv (or .parquet)"
    )
    answer(document, lambda: f"{imported}\n{then}", json)
    return NOT_OK if imported.incomplete else OK


def _write(out: Path, frame: pd.DataFrame) -> None:
    """The table, whole or not at all."""
    from scaling.errors import MissingExtra
    from scaling.records import write_atomic

    if out.suffix.lower() == ".csv":
        write_atomic(out, frame.to_csv(index=False))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    # A config key may hold words in one run and a number in another; Parquet wants one kind a column.
    mixed: dict[str, Any] = {
        str(name): frame[name].map(lambda value: None if value is None else str(value))
        for name in frame
        if frame[name].dtype == object
    }
    try:
        frame.assign(**mixed).to_parquet(temporary, index=False)
        temporary.replace(out)
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "writing Parquet") from None
    finally:
        temporary.unlink(missing_ok=True)


def _take_over(place: str, into: Path, name: str | None, json: bool) -> int:
    from sweeps.import_study import take_over
    from sweeps.plan import make_plan
    from sweeps.study_dir import find_study, open_study

    study = open_study(into) if into.is_file() else find_study(into)
    if study.config.storage is not None:
        from sweeps.fleet import pull

        pull(study)
    result = take_over(place, study, name)
    if study.config.storage is not None:
        from sweeps.fleet import hand_in

        hand_in(study, lambda text: messages().print(text, markup=False, highlight=False))
    from scaling.records import read_records

    records = {record.run_id: record for record in read_records(study.directory)}
    planned = {item.run_id for item in make_plan(study.config, records)}
    document = _document(place, study, result) | {"planned_taken": len(planned & set(result.taken))}
    answer(document, lambda: _text(document, result), json)
    return NOT_OK if result.damaged or not (result.taken or result.known or result.other_loss) else OK


def _document(place: str, study: Study, result: TakenOver) -> dict[str, Any]:
    return {
        "source": place.rpartition("@")[2] if "://" in place else place,
        "study": str(study.directory),
        "taken": len(result.taken),
        "known": len(result.known),
        "other_loss": [{"run_id": run_id, "here": here, "there": there} for run_id, here, there in result.other_loss],
        "strangers": result.strangers,
        "damaged": result.damaged,
    }


def _text(document: Mapping[str, Any], result: TakenOver) -> str:
    """The account of runs taken over, reasons shared by many runs once."""
    lines = [
        f"{document['taken']} runs taken over from {document['source']} into {document['study']}, "
        f"{document['planned_taken']} of them in its plan; {document['known']} were there already"
    ]
    for run_id, here, there in result.other_loss[:SHOWN]:
        lines.append(
            f"  {run_id} is there already with another loss ({_loss(here)} here, {_loss(there)} there): kept as it is here"
        )
    if len(result.other_loss) > SHOWN:
        lines.append(f"  ... and {len(result.other_loss) - SHOWN} more")
    reasons: dict[str, list[str]] = {}
    for run_id, why in result.strangers.items():
        reasons.setdefault(why, []).append(run_id)
    if reasons:
        lines.append(f"{len(result.strangers)} are no runs of this study:")
    lines += [
        f"  {len(runs)} {why}: {', '.join(runs[:SHOWN])}{', ...' if len(runs) > SHOWN else ''}" for why, runs in reasons.items()
    ]
    lines += [f"  damaged, left where it is: {where}: {what}" for where, what in result.damaged.items()]
    return "\n".join([*lines, f"next: {program()} status {document['study']}"])


def _loss(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.6g}"
