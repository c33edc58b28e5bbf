"""`mutransfer coord`: whether a parametrization is right, and which tensor is wrong."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaling.errors import ConfigError, Fault
from sweeps.cli_common import DOTTED, NOT_OK, OK, answer, messages, overrides

if TYPE_CHECKING:
    from analysis.coordinates import CoordinateVerdict
    from scaling.coordinate_rows import Measurement
    from scaling.coordinates import Target

DEFAULT_WIDTHS = "64,128,256,512"


def register(app: typer.Typer) -> None:
    app.command("coord", context_settings=DOTTED)(coord_command)


def coord_command(
    context: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(help="A run's YAML file: checks the toolkit's own model.", show_default=False)
    ] = None,
    target: Annotated[str | None, typer.Option(help="Your own: path/to/file.py:Name or module:Name.", show_default=False)] = None,
    widths: Annotated[str, typer.Option(help="Comma-separated; four over a factor of eight are good.")] = DEFAULT_WIDTHS,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, paired over the widths.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps before updates are read.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write coord.json and coord.svg here.", show_default=False)] = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Also the effect of each update on the output (not judged).")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a config key: --set a.b=value.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Train a few steps at several widths and say pass or fail, and which tensor is wrong. Exit code 1 unless it passes."""
    sizes = _widths(widths)
    if (path is None) == (target is None):
        raise ConfigError(
            Fault("", "give a run's YAML file or --target, one of the two", "mutransfer coord configs/models/base.yaml")
        )
    options = overrides(settings or [], context.args)
    if target is not None and options:
        raise ConfigError(Fault("--set", "overrides keys of a run's YAML file, and --target has none"))

    from analysis.coordinates import judge
    from scaling.coordinates import measure

    console = messages()

    def show(width: int, seed: int) -> None:
        console.print(f"width {width}, seed {seed}", highlight=False)

    checked = _target(path, target, options, sizes)
    try:
        measurement = measure(checked, sizes, seeds=seeds, steps=steps, effects=effects, progress=show)
    except Exception as error:  # whatever the user's model raises
        if target is None:
            raise
        raise _user_fault(target, error) from error
    verdict = judge(measurement)
    document = verdict.to_dict()
    if out is not None:
        _write(out, document, measurement, verdict)
    answer(document, lambda: str(verdict), json)
    return OK if verdict.verdict == "pass" else NOT_OK


def _target(path: Path | None, target: str | None, options: list[str], widths: list[int]) -> Target:
    from scaling.coordinate_targets import RunTarget, load_target

    if target is not None:
        return load_target(target)
    assert path is not None, "checked by the caller"
    from scaling.data import prepare
    from sweeps.cli_run import load_run

    run = load_run(path, options)
    reasons = [reason for width in widths if (reason := run.model.check_width(width))]
    if reasons:
        raise ConfigError(*[Fault("--widths", reason) for reason in reasons])
    return RunTarget(run, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size))


def _user_fault(target: str, error: Exception) -> ConfigError:
    """Where in the user's code an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(target.rpartition(":")[0]).name] or frames
    where = f"{own[-1].filename}:{own[-1].lineno}"
    return ConfigError(
        Fault(where, f"{type(error).__name__}: {error}", f"raised in {own[-1].name}(); see --target in the README")
    )


def _widths(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if len(sizes) < 2 or sizes[0] < 1:
        raise ConfigError(Fault(f"--widths {text}", "needs at least two whole numbers", f"--widths {DEFAULT_WIDTHS}"))
    return sizes


def _write(out: Path, document: dict[str, object], measurement: Measurement, verdict: CoordinateVerdict) -> None:
    import json

    from analysis.coordinate_plots import figure_coordinates
    from analysis.report import svg
    from scaling.records import write_atomic

    write_atomic(out / "coord.svg", svg(figure_coordinates(measurement, verdict)))
    write_atomic(out / "coord.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
