"""`mutransfer coord`: whether a parametrization is right, and which tensor is wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaling.errors import ConfigError, Fault
from sweeps.cli_common import DOTTED, NOT_OK, OK, answer, messages, overrides

if TYPE_CHECKING:
    from analysis.coordinate_verdict import Axis, CoordinateVerdict
    from scaling.coordinate_rows import Measurement
    from scaling.coordinates import Target

DEFAULT_WIDTHS = "64,128,256,512"
EXAMPLE_DEPTHS = "2,4,8,16"


def register(app: typer.Typer) -> None:
    app.command("coord", context_settings=DOTTED)(coord_command)


def coord_command(
    context: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(help="A run's YAML file: checks the toolkit's own model.", show_default=False)
    ] = None,
    target: Annotated[str | None, typer.Option(help="Your own: path/to/file.py:Name or module:Name.", show_default=False)] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated; four over a factor of eight are good. Default {DEFAULT_WIDTHS}.", show_default=False
        ),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(
            help=f"Check depth instead, at one width: {EXAMPLE_DEPTHS}. A target's sizes are then depths.", show_default=False
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, paired over the widths.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps before updates are read.")] = 3,
    train_steps: Annotated[
        int, typer.Option(min=0, help="Then train every width this long (200, say): is wider worse? 0 is off.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="Write coord.html, coord.json and coord.svg here.", show_default=False)] = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Also the effect of each update on the output (not judged).")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a config key: --set a.b=value.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Train a few steps at several widths (or depths) and say pass or fail, and which tensor is wrong. Exit code 1 unless it passes."""
    axis, sizes = _sizes(widths, depths)
    if axis == "depth" and train_steps:
        raise ConfigError(Fault("--train-steps", "asks whether wider models train worse, and --depths has one width"))
    if (path is None) == (target is None):
        raise ConfigError(
            Fault("", "give a run's YAML file or --target, one of the two", "mutransfer coord configs/models/base.yaml")
        )
    options = overrides(settings or [], context.args)
    if target is not None and options:
        raise ConfigError(Fault("--set", "overrides keys of a run's YAML file, and --target has none"))
    console = messages()

    def show(size: int, seed: int) -> None:
        console.print(f"{axis} {size}, seed {seed}", highlight=False)

    checked = _target(path, target, options, axis, sizes)
    try:
        measurement, verdict = _check(checked, axis, sizes, seeds, steps, effects, show)
        if train_steps:
            console.print(f"training {train_steps} steps", highlight=False)
            verdict = _wider(checked, sizes, seeds, train_steps, verdict, show)
    except Exception as error:  # whatever the user's model raises
        if target is None:
            raise
        raise _user_fault(target, error) from error
    document = verdict.to_dict()
    if out is not None:
        _write(out, f"coordinate check of {target or path}", document, measurement, verdict)
    answer(document, lambda: str(verdict), json)
    return OK if verdict.verdict == "pass" else NOT_OK


def _check(
    target: Target, axis: Axis, sizes: list[int], seeds: int, steps: int, effects: bool, show: Callable[[int, int], None]
) -> tuple[Measurement, CoordinateVerdict]:
    """The measurement, over layers where sizes are depths, and its verdict."""
    if axis == "width":
        from analysis.coordinates import judge
        from scaling.coordinates import measure

        measurement = measure(target, sizes, seeds=seeds, steps=steps, effects=effects, progress=show)
        return measurement, judge(measurement)
    from analysis.depth_coordinates import judge_depth, over_layers
    from scaling.coordinates import measure_depths

    measurement, layers = measure_depths(target, sizes, seeds=seeds, steps=steps, effects=effects, progress=show)
    return over_layers(measurement, layers), judge_depth(measurement, layers)


def _wider(
    target: Target, widths: list[int], seeds: int, steps: int, verdict: CoordinateVerdict, show: Callable[[int, int], None]
) -> CoordinateVerdict:
    from analysis.coordinate_verdict import with_wider
    from analysis.wider import judge_wider
    from scaling.wider import train_losses

    return with_wider(verdict, judge_wider(train_losses(target, widths, seeds=seeds, steps=steps, progress=show), steps))


def _target(path: Path | None, target: str | None, options: list[str], axis: Axis, sizes: list[int]) -> Target:
    from scaling.coordinate_targets import DepthTarget, RunTarget, load_target

    if target is not None:
        return load_target(target)
    assert path is not None, "checked by the caller"
    from scaling.data import prepare
    from sweeps.cli_run import load_run

    run = load_run(path, options)
    reasons = [reason for width in sizes if axis == "width" and (reason := run.model.check_width(width))]
    if reasons:
        raise ConfigError(*[Fault("--widths", reason) for reason in reasons])
    kind = RunTarget if axis == "width" else DepthTarget
    return kind(run, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size))


def _user_fault(target: str, error: Exception) -> ConfigError:
    """Where in the user's code an exception was raised; what the check itself found wrong with the target says so."""
    from scaling.coordinate_faults import TargetError

    if isinstance(error, TargetError):
        return ConfigError(*(replace(fault, where=f"--target {target}: {fault.where}") for fault in error.faults))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(target.rpartition(":")[0]).name] or frames
    where = f"{own[-1].filename}:{own[-1].lineno}"
    return ConfigError(
        Fault(where, f"{type(error).__name__}: {error}", f"raised in {own[-1].name}(); see --target in the README")
    )


def _sizes(widths: str | None, depths: str | None) -> tuple[Axis, list[int]]:
    """What is varied, and its values in order."""
    if widths is not None and depths is not None:
        raise ConfigError(Fault("--depths", "give --widths or --depths, one of the two", f"--depths {EXAMPLE_DEPTHS}"))
    axis: Axis = "width" if depths is None else "depth"
    text, example = (widths or DEFAULT_WIDTHS, DEFAULT_WIDTHS) if depths is None else (depths, EXAMPLE_DEPTHS)
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if len(sizes) < 2 or sizes[0] < 1:
        raise ConfigError(Fault(f"--{axis}s {text}", "needs at least two whole numbers", f"--{axis}s {example}"))
    return axis, sizes


def _write(out: Path, title: str, document: dict[str, object], measurement: Measurement, verdict: CoordinateVerdict) -> None:
    import json

    from analysis.coordinate_plots import figure_coordinates
    from analysis.coordinate_report import render_report
    from analysis.report import svg
    from scaling.records import write_atomic

    picture = svg(figure_coordinates(measurement, verdict))
    write_atomic(out / "coord.svg", picture)
    write_atomic(out / "coord.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_atomic(out / "coord.html", render_report(verdict, title, picture))
