"""Loss curves under learning-rate schedules, and the multi-power law's value on a whole schedule at once (Luo et al. 2025,
2503.12811).

Owns `LrSchedule` (the LR of every step), `Curve` (a logged loss curve with its schedule), `load_curves`, and `multi_power`:
L(t) = L0 + A S1(t)^-alpha - B sum_{k <= t} (lr[k-1] - lr[k]) (1 - (1 + C lr[k]^-gamma S_k(t))^-beta), with S1(t) the sum of the
LR up to step t and S_k(t) that from step k on. The warm-up's rises are terms of the sum like any other: without them the law is
off by a tenth of a nat. Steps count updates, losses are nats per token; learning rates are those of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.fit_table import LOSS_UNITS, raw_rows, rows_where
from analysis.law import Array
from analysis.table import nearest, numbers_of
from scaling.errors import DataError, Fault, raise_all

if TYPE_CHECKING:
    import pandas as pd

    from scaling.config import ScheduleConfig

PARAMETERS = ("L0", "A", "alpha", "B", "C", "beta", "gamma")
KNOWN = ("schedule", "step", "lr", "loss")
CHUNK = 2_000_000
"""Terms that are computed at once: 16 MB an array."""
FLOOR = 1e-9
"""An LR of 0 counts as that share of the peak: its power is finite, and its term is what the limit says."""
JUMP = 0.02
"""A change of the LR between two logged points by more than that share, with none before and after, is a step and no slope."""


@dataclass(frozen=True, eq=False)
class LrSchedule:
    """lr (T + 1,): of step 0, which is before training, to T; `name` for messages."""

    name: str
    lr: Array

    @property
    def steps(self) -> int:
        return len(self.lr) - 1

    @property
    def peak_lr(self) -> float:
        return float(self.lr.max())

    @classmethod
    def of(cls, lr: ArrayLike, name: str = "given") -> LrSchedule:
        """From the LR of every update, the first one's first. Raises DataError where that is no schedule."""
        values = np.asarray(lr, dtype=np.float64)
        if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all() or (values < 0).any() or not values.max() > 0:
            raise DataError(
                Fault(
                    f"schedule {name}",
                    "is no list of learning rates, one a step, finite and not negative",
                    "give one number a step",
                )
            )
        return cls(name, np.concatenate([[0.0], values]))

    @classmethod
    def named(cls, schedule: ScheduleConfig, steps: int, peak_lr: float) -> LrSchedule:
        """A schedule of scaling.schedule over `steps` updates."""
        from scaling.schedule import lr_factor

        if steps < 2 or not peak_lr > 0:
            raise DataError(
                Fault(
                    f"schedule {schedule.kind}",
                    f"has {steps} steps and a peak LR of {peak_lr:g}",
                    "give at least 2 steps and a positive LR",
                )
            )
        return cls.of([peak_lr * lr_factor(schedule, step, steps) for step in range(steps)], f"{schedule.kind}, {steps} steps")


@dataclass(frozen=True, eq=False)
class Curve:
    """A logged curve: steps (n,) rising, loss (n,) in nats, under `schedule`."""

    schedule: LrSchedule
    steps: NDArray[np.intp]
    loss: Array

    @property
    def name(self) -> str:
        return self.schedule.name


@dataclass(frozen=True, eq=False)
class Terms:
    """The decay sum of a schedule, ready for any parameters: drop, log lr and S before step k of every k at which the LR
    changes; S1 (T + 1,).
    """

    drop: Array
    log_lr: Array
    before: Array
    sums: Array

    @classmethod
    def of(cls, schedule: LrSchedule, block: int = 1, warmup: bool = True) -> Terms:
        """block: consecutive changes that are taken together at their mean; 1 is exact. warmup=False leaves rises before the
        first peak out, which is a mistake that a test shows.
        """
        lr = schedule.lr
        sums = np.cumsum(lr)
        drop: Array = np.concatenate([[0.0], lr[:-1] - lr[1:]])
        if not warmup:
            drop[: int(np.argmax(lr)) + 1] = 0.0
        k = np.flatnonzero(drop)
        before = np.concatenate([[0.0], sums])[k]
        values = np.log(np.maximum(lr[k], FLOOR * schedule.peak_lr))
        if block > 1 and len(k):
            # Changes of one sign in a row, cut into blocks.
            breaks = np.concatenate([[True], (np.diff(k) > 1) | (np.sign(drop[k][1:]) != np.sign(drop[k][:-1]))])
            run = np.cumsum(breaks) - 1
            place = np.arange(len(k)) - np.flatnonzero(breaks)[run]
            _, member = np.unique(run * (len(lr) + 1) + place // block, return_inverse=True)
            weight = np.asarray(np.bincount(member, drop[k]), dtype=np.float64)
            before, values = (np.bincount(member, drop[k] * part) / weight for part in (before, values))
            return cls(weight, values, before, sums)
        return cls(drop[k], values, before, sums)


def multi_power(theta: Array, terms: Terms, steps: NDArray[np.intp]) -> tuple[Array, Array]:
    """Loss (n,) at steps and its gradient (n, 7) by theta, the logs of PARAMETERS."""
    level, scale, alpha, factor, rate, beta, gamma = np.exp(theta)
    total = terms.sums[steps]
    power = scale * total**-alpha
    slope_power = np.stack([power, -alpha * np.log(total) * power], axis=1)
    decay = np.zeros((len(steps), 4))
    log_rate = np.log(rate) - gamma * terms.log_lr
    size = max(1, CHUNK // max(1, len(terms.drop)))
    for first in range(0, len(steps), size):
        rows = slice(first, first + size)
        since = np.maximum(total[rows, None] - terms.before, 0.0)
        x = np.log1p(np.exp(np.minimum(log_rate, 600.0)) * since)
        left = np.exp(-beta * x)
        # d left / d log C, with 1 - exp(-x) = C' S / (1 + C' S).
        by_rate = -beta * left * -np.expm1(-x)
        decay[rows, 0] = (1 - left) @ terms.drop
        decay[rows, 1] = -by_rate @ terms.drop
        decay[rows, 2] = (beta * x * left) @ terms.drop
        decay[rows, 3] = by_rate @ (terms.drop * terms.log_lr) * gamma
    loss = level + power - factor * decay[:, 0]
    gradient = np.concatenate([np.full((len(steps), 1), level), slope_power, -factor * decay], axis=1)
    return loss, gradient


def load_curves(
    source: Path | str | pd.DataFrame, columns: Mapping[str, str] | None = None, *, where: Sequence[str] = (), loss_unit: str = "nats",
    warmup_steps: int | None = None, schedules: Mapping[str, ArrayLike] | None = None,
) -> tuple[list[Curve], list[str]]:  # fmt: skip
    """Curves of columns schedule, step, lr, loss, and notes. schedules: {name: LR of every update} where the logged ones do not
    do.

    Otherwise the LR between logged points is a straight line, a step where it is constant before and after; before the first
    point it rises linearly over `warmup_steps`, which must be said. Raises DataError.
    """
    notes: list[str] = []
    frame, place = raw_rows(source, columns or {}, notes, KNOWN)
    frame = rows_where(frame, where, place, notes)
    present, faults = [str(name) for name in frame.columns], []
    given = dict(schedules or {})
    needed = [name for name in KNOWN if name != "lr" or not given]
    for name in needed:
        if name not in frame:
            faults.append(
                Fault(f"{place}: column {name!r}", "is missing", f"map it with --column {name}=NAME; {nearest(name, present)}")
            )
    if loss_unit not in LOSS_UNITS:
        faults.append(Fault(f"loss unit {loss_unit!r}", "is not known", f"choose from: {', '.join(LOSS_UNITS)}"))
    raise_all(faults, DataError)
    numbers = {
        name: np.asarray(numbers_of(frame[name], name, place, faults), dtype=np.float64)
        for name in ("step", "lr", "loss")
        if name in frame and name in (*needed, "lr")
    }
    raise_all(faults, DataError)
    names = frame["schedule"].astype(str).to_numpy()
    sound = np.isfinite(np.stack(list(numbers.values()))).all(axis=0) & (numbers["loss"] > 0) & (numbers["step"] >= 1)
    if (~sound).any():
        notes.append(f"{int((~sound).sum())} rows without a step, an LR or a finite loss dropped")
    curves = []
    for name in dict.fromkeys(names[sound]):
        rows = np.flatnonzero(sound & (names == name))
        rows = rows[np.argsort(numbers["step"][rows], kind="stable")]
        steps = np.rint(numbers["step"][rows]).astype(np.intp)
        if (np.diff(steps) == 0).any():
            what = f"has several rows of one step under schedule {name}: curves of several models or seeds are not one curve"
            raise DataError(Fault(place, what, "choose one: --where NAME=VALUE"))
        if name in given:
            schedule = LrSchedule.of(given[name], str(name))
            if schedule.steps < steps[-1]:
                raise DataError(
                    Fault(
                        f"schedule {name}",
                        f"ends at step {schedule.steps}, and its curve at {steps[-1]}",
                        "give the LR of every step",
                    )
                )
        else:
            if "lr" not in numbers:
                raise DataError(
                    Fault(
                        f"schedule {name}",
                        "is not among the given ones, and the table has no column lr",
                        "give its LR of every step",
                    )
                )
            schedule = _from_points(str(name), steps, numbers["lr"][rows], warmup_steps)
        curves.append(Curve(schedule, steps, numbers["loss"][rows] * LOSS_UNITS[loss_unit]))
    if not curves:
        raise DataError(Fault(place, "holds no usable curve", "; ".join(notes)))
    if len(given) < len(curves):
        notes.append("learning rates between logged points are read off the table: straight lines, and steps where they jump")
    return curves, notes


def _from_points(name: str, steps: NDArray[np.intp], lr: Array, warmup_steps: int | None) -> LrSchedule:
    """The LR of every step from logged ones."""
    if warmup_steps is None and steps[0] > 1:
        what = f"is first logged at step {steps[0]}: what the LR was before is not known, and the law sums over it"
        raise DataError(Fault(f"schedule {name}", what, "give warmup_steps (0: the first LR from the start)"))
    whole = np.interp(np.arange(steps[-1] + 1), steps, lr)
    change = np.abs(np.diff(lr)) / lr.max()
    for index in np.flatnonzero(change > JUMP).tolist():
        before, after = change[index - 1] if index else 0.0, change[index + 1] if index + 1 < len(change) else 0.0
        if before == 0 and after == 0:
            whole[steps[index] : steps[index + 1]] = lr[index]
    if warmup_steps:
        rise = np.arange(min(warmup_steps, steps[-1]) + 1)
        whole[: len(rise)] = np.minimum(rise / warmup_steps, 1.0) * whole[len(rise) - 1]
    whole[0] = 0.0
    return LrSchedule(name, whole)


def schedule_of(given: Any, curves: Sequence[Curve]) -> LrSchedule:
    """An LrSchedule as it is, the name of a curve's, or a list of the LR of every update."""
    if isinstance(given, LrSchedule):
        return given
    if isinstance(given, str):
        names = [curve.name for curve in curves]
        if given not in names:
            raise DataError(Fault(f"schedule {given!r}", "is not in the table", nearest(given, names)))
        return curves[names.index(given)].schedule
    return LrSchedule.of(given)
