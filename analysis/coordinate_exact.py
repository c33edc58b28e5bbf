"""Culprits of a coordinate check that no slope shows: numbers that are not finite, tensors that no optimizer moves.

Owns `exact_culprits`, for width and depth alike. They hold whatever the widths span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from analysis.coordinate_verdict import NO_SLOPE, Axis, Culprit
from scaling.coordinate_rows import NOT_OPTIMIZED, Measurement, Row, TensorFacts

_LOOK = "lower the learning rate, or look for a division by zero, a logarithm of zero or an overflow"


def exact_culprits(measurement: Measurement, axis: Axis, free: Callable[[str], str] = str) -> list[Culprit]:
    """All of them, each tensor once, under its `free` name, with the first width at which it happens."""
    broken = _not_finite(measurement, axis)
    culprits = broken + _unmoved(measurement, axis, over=_broken_runs(measurement))
    known: dict[tuple[str, str], Culprit] = {}
    for item in culprits:
        name = free(item.tensor)
        known.setdefault((name, item.statistic), Culprit(name, item.statistic, NO_SLOPE, math.nan, item.message))
    return list(known.values())


def is_broken(culprits: Sequence[Culprit]) -> bool:
    """Whether some run's numbers are not finite, so that no slope says anything."""
    return any(item.statistic == "not_finite" for item in culprits)


def _bad(row: Row) -> bool:
    """A loss, an output, an init or an update that is not a finite number."""
    return row.statistic in ("loss", "output", "init", "update") and not math.isfinite(row.value)


def _broken_runs(measurement: Measurement) -> set[tuple[int, int]]:
    return {(row.width, row.seed) for row in measurement.rows if _bad(row)}


def _not_finite(measurement: Measurement, axis: Axis) -> list[Culprit]:
    """At the smallest width where anything is: the tensors that start so, else the loss, else the tensors that end so."""
    bad = [row for row in measurement.rows if _bad(row)]
    if not bad:
        return []
    width = min(row.width for row in bad)
    at = f"at {axis} {width}"
    here = [row for row in bad if row.width == width]
    starts = [row.name for row in here if row.statistic == "init"]
    if starts:
        words = f"its initial entries are not finite {at}: look for a division by zero in its init"
        return [_culprit(name, "not_finite", words) for name in starts]
    losses = [row for row in measurement.rows if (row.width, row.statistic) == (width, "loss")]
    if any(row.statistic in ("loss", "output") for row in here):
        return [_culprit("loss", "not_finite", _loss_words(measurement, losses, width, at))]
    moved = {row.name for row in measurement.rows if (row.width, row.statistic) == (width, "update") and row.value != 0}
    if moved == {row.name for row in here}:
        return [_culprit("loss", "not_finite", f"every tensor's update is not finite {at}, or too large to be measured: {_LOOK}")]
    words = f"its update is not finite {at}, though the loss is: {_LOOK} in the gradient"
    return [_culprit(row.name, "not_finite", words) for row in here]


def _loss_words(measurement: Measurement, losses: Sequence[Row], width: int, at: str) -> str:
    steps = [sum(row.seed == seed for row in losses) - 1 for seed in {row.seed for row in losses if _bad(row)}]
    if steps and min(steps) > 0:
        return f"the loss is not finite {at} after {min(steps)} step{'s' if min(steps) > 1 else ''}: {_LOOK}"
    modules = [row for row in measurement.rows if row.kind == "module" and row.width == width and row.statistic == "activation"]
    first = next((row.name for row in modules if not math.isfinite(row.value)), None)
    what = "the loss is" if steps else "the output is"
    where = f"first in the output of {first}" if first else "though every module's output is finite"
    return (
        f"{what} not finite {at} before the first step, {where}: look for a division by zero, a logarithm of zero or an overflow"
    )


def _unmoved(measurement: Measurement, axis: Axis, over: set[tuple[int, int]]) -> list[Culprit]:
    """Tensors that no group holds, and those that a group holds and that stay where they are. over: runs that broke."""
    values = {(row.statistic, row.name, row.width, row.seed): row.value for row in measurement.rows if row.kind == "tensor"}
    still: dict[str, list[tuple[int, int]]] = {}
    moving: set[tuple[int, int]] = set()
    runs = {(row.width, row.seed) for row in measurement.rows}
    for (statistic, name, width, seed), value in values.items():
        if statistic == "update" and value == 0:
            still.setdefault(name, []).append((width, seed))
        elif statistic == "update":
            moving.add((width, seed))
    found = []
    for item in measurement.tensors:
        absent = [width for width, _ in still.get(item.name, []) if width in item.not_optimized]
        if absent:
            found.append(_culprit(item.name, "not_optimized", _absent_words(item, min(absent), axis)))
            continue
        frozen = sorted(
            (width, seed)
            for width, seed in still.get(item.name, [])
            if (width, seed) not in over
            and (values.get(("reached", item.name, width, seed)) or values.get(("lr", item.name, width, seed)) == 0)
        )
        if frozen:
            rate = values.get(("lr", item.name, *frozen[0]), math.nan)
            found.append(_culprit(item.name, "frozen", _frozen_words(rate, frozen[0][0], axis)))
    dead = sorted(runs - moving - over)
    if dead and not found:
        words = (
            f"no tensor moves at {axis} {dead[0][0]}, for no gradient reaches any: look for tensors in a row that start at zero, "
            "or a detach()"
        )
        found.append(_culprit("loss", "frozen", words))
    return found


def _absent_words(item: TensorFacts, width: int, axis: Axis) -> str:
    where = f" at {axis} {width}" if item.optimizer != NOT_OPTIMIZED or len(item.not_optimized) < len(item.shapes) else ""
    return f"no group of the optimizer holds it{where}: give it to the optimizer, or set requires_grad to False if it is to stay"


def _frozen_words(rate: float, width: int, axis: Axis) -> str:
    if rate == 0:
        return (
            f"it never moves at {axis} {width}, its learning rate is 0: give it one (where a warm-up starts at 0, more --steps), "
            "or set requires_grad to False if it is to stay"
        )
    return (
        f"it never moves at {axis} {width}, though a gradient reaches it and its learning rate is {rate:.2g}: "
        "is the step done, and is its update too small for its precision?"
    )


def _culprit(name: str, statistic: str, message: str) -> Culprit:
    return Culprit(name, statistic, NO_SLOPE, math.nan, message)
