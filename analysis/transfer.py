"""Does the best learning rate transfer across sizes? An equivalence test, and what the transferred one costs.

Owns TransferFit and its verdict. Let s be the slope of log2 LR* on log2(size), and the regret the loss of the largest size at
the best LR of the smallest, over the best loss of the largest. With 90 % intervals:

    transfers     the interval of s lies inside +-slope_tolerance and the regret's upper end is below regret_tolerance
    drifts        the interval of s lies outside of it, on one side, or the regret's lower end is above regret_tolerance:
                  the optimum moves, or the smallest size's is shown not to serve the largest
    inconclusive  otherwise, with what would decide

The default tolerance is a quarter of an octave a doubling: exponents in theory are multiples of 1/2 (Yang et al. 2203.03466,
Everett et al. 2407.05872), so a quarter is half way between no drift and the mildest one. Losses are in nats per token.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from analysis.across_sizes import AcrossSizes, across_sizes
from analysis.optimum import CellOptimum, cell_optima
from analysis.results import (
    UNKNOWN,
    Interval,
    fixed,
    html_table,
    interval_text,
    json_safe,
    number,
    power_of_two,
    text_table,
    whole,
)
from analysis.slope import SlopeFit, fit_slope
from analysis.table import CELL_COLUMNS, LEARNING_RATE, RunTable
from scaling.errors import DataError, Fault

Verdict = Literal["transfers", "drifts", "inconclusive"]
AXES = CELL_COLUMNS[1:]
MIN_SIZES = 3
SLOPE_TOLERANCE = 0.25
REGRET_TOLERANCE = 0.01


@dataclass(frozen=True)
class Slope:
    """Octaves of LR* a doubling of the size, 90 % interval; NaN when it cannot be fitted."""

    value: float = math.nan
    interval: Interval = UNKNOWN


@dataclass(frozen=True)
class Regret:
    """Loss at the transferred learning rate over the best loss, at the largest size; 90 % interval."""

    value: float = math.nan
    """Nats per token; infinite where runs diverge, NaN where it cannot be read."""
    interval: Interval = UNKNOWN
    relative: float = math.nan
    """Over the best loss of the largest size."""
    relative_interval: Interval = UNKNOWN
    log2_lr: float = math.nan
    """The transferred learning rate."""
    reference: float = math.nan
    """Size it is the optimum of."""
    target: float = math.nan
    """Size at which it is read."""


@dataclass(frozen=True)
class TransferFit:
    """The verdict on one parametrization, with everything it rests on."""

    parametrization: str
    axis: str
    verdict: Verdict
    slope: Slope
    regret: Regret
    optima: tuple[CellOptimum, ...]
    """Ordered by size."""
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    slope_tolerance: float = SLOPE_TOLERANCE
    regret_tolerance: float = REGRET_TOLERANCE
    line: SlopeFit | None = field(default=None, repr=False, compare=False)
    across: AcrossSizes | None = field(default=None, repr=False, compare=False)
    """What the sizes say of each other beside where the optimum is; None without the runs."""

    @property
    def quantity(self) -> str:
        """What is transferred: the learning rate, or another hyperparameter by its words."""
        return self.optima[0].cell.quantity if self.optima else LEARNING_RATE

    def cost_at(self, size: float, octaves: float) -> float:
        """Loss over the best one at `size`, `octaves` beside its optimum, in nats; NaN where it was not measured."""
        chosen = [item for item, at in zip(self.optima, self.sizes(), strict=True) if at == size and item.usable]
        return chosen[0].rise_at(chosen[0].log2_lr + octaves)[0] if chosen else math.nan

    def sizes(self) -> list[float]:
        return [_size(optimum, self.axis) for optimum in self.optima]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: open ends of intervals and missing numbers are null."""
        optima = [{self.axis: whole(_size(item, self.axis)), **item.to_dict()} for item in self.optima]
        return dict(
            json_safe(
                {
                    "verdict": self.verdict,
                    "axis": self.axis,
                    "quantity": self.quantity,
                    "slope": {"value": self.slope.value, "interval": self.slope.interval, "tolerance": self.slope_tolerance},
                    "regret": {
                        "value": self.regret.value,
                        "interval": self.regret.interval,
                        "relative": self.regret.relative,
                        "relative_interval": self.regret.relative_interval,
                        "tolerance": self.regret_tolerance,
                        "log2_lr": self.regret.log2_lr,
                        "reference": whole(self.regret.reference),
                        "target": whole(self.regret.target),
                    },
                    "scatter": self.line.scatter if self.line else math.nan,
                    "optima": optima,
                    "across_sizes": self.across.to_dict() if self.across else None,
                    "reasons": self.reasons,
                    "notes": self.notes,
                }
            )
        )

    def sentence(self) -> str:
        """The verdict in one sentence."""
        many = len(self.optima) > 1
        ends = f"{number(self.sizes()[0])}" + (f" to {number(self.sizes()[-1])}" if many else "") if self.optima else "none"
        sizes = f"{_several(self.axis) if many else self.axis} {ends}"
        slope = f"{number(self.slope.value)} octaves per doubling, 90 % interval {interval_text(self.slope.interval)}"
        centre = power_of_two(float(np.median([item.log2_lr for item in self.optima if item.usable] or [math.nan])))
        if self.verdict == "transfers":
            text = f"the best {self.quantity} transfers across {sizes}: it stays at {centre} ({slope})"
        elif self.verdict == "drifts":
            text = f"the best {self.quantity} drifts with {self.axis} across {sizes}: by {slope}"
            if not _outside(self.slope.interval, self.slope_tolerance):
                text = f"the best {self.quantity} does not transfer across {sizes} ({slope})"
        else:
            known = f" ({slope})" if math.isfinite(self.slope.value) else ""
            text = f"whether the best {self.quantity} transfers across {sizes} is not decided{known}"
        return f"{self.parametrization}: {text}; {self._cost()}"

    def _cost(self) -> str:
        regret, unit = self.regret, self.axis
        if not math.isfinite(regret.log2_lr):
            return "what a transferred one would cost cannot be read"
        at = f"{unit} {number(regret.reference)} ({power_of_two(regret.log2_lr)}) at {unit} {number(regret.target)}"
        using = f"using the optimum of {at}"
        if math.isinf(regret.value):
            return f"{using} diverges"
        if math.isnan(regret.value):
            bound = regret.interval[0]
            return f"{using} costs at least {number(bound, 3)} nats" if bound >= 0.0005 else f"what {using} costs cannot be read"
        return f"{using} costs {number(regret.value, 3)} nats {interval_text(regret.interval, 3)}"

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        header = [
            self.axis,
            "log2 LR*" if self.quantity == LEARNING_RATE else f"best log2 {self.quantity}",
            "90 % interval",
            "best loss",
            "within 0.25 % of it",
            "values fitted" if self.quantity != LEARNING_RATE else "LRs fitted",
            "runs",
            "seeds",
            "remark",
        ]
        rows = []
        for size, item in zip(self.sizes(), self.optima, strict=True):
            bound = {"low": "<= ", "high": ">= "}.get(item.censored or "", "")
            plateau = item.plateaus.get(0.0025, UNKNOWN)
            rows.append(
                [number(size), bound + fixed(item.log2_lr, 2), interval_text(item.interval), fixed(item.best_loss, 4),
                 interval_text(plateau), str(item.n_points), f"{item.n_runs} of {item.n_finite + item.n_diverged}",
                 str(item.n_seeds), item.censored or ""]
            )  # fmt: skip
        return header, rows

    def __str__(self) -> str:
        lines = [self.sentence(), *(f"  {reason}" for reason in self.reasons), text_table(*self._rows())]
        said: dict[str, list[str]] = {}
        for size, item in zip(self.sizes(), self.optima, strict=True):
            for flag in item.flags:
                said.setdefault(flag, []).append(number(size))
        flags = [f"  {self.axis} {', '.join(where)}: {flag}" for flag, where in said.items()]
        noise = next(
            (
                f"  noise of a run at {self.axis} {number(size)}: {item.noise}"
                for size, item in zip(self.sizes(), self.optima, strict=True)
                if item.noise is not None
            ),
            None,
        )
        lines += [f"  {line}" for line in (self.across.lines() if self.across else ())]
        return "\n".join([*lines, *([noise] if noise else []), *(f"  note: {note}" for note in self.notes), *flags])

    def _repr_html_(self) -> str:
        reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in (*self.reasons, *self.notes))
        across = "".join(f"<li>{html.escape(line)}</li>" for line in (self.across.lines() if self.across else ()))
        return f"<p><b>{html.escape(self.sentence())}</b></p><ul>{reasons}</ul>{html_table(*self._rows())}<ul>{across}</ul>"


def transfer(
    table: RunTable, *, axis: str = "width", slope_tolerance: float = SLOPE_TOLERANCE,
    regret_tolerance: float = REGRET_TOLERANCE, reference: float | None = None, at: Mapping[str, float] | None = None,
) -> dict[str, TransferFit]:  # fmt: skip
    """Judge every parametrization of the table.

    axis: width, depth, batch_tokens or tokens. slope_tolerance: octaves a doubling. regret_tolerance: relative to the best loss.
    reference: size whose optimum is transferred (default: the smallest). at: levels of the other dimensions to judge at where cells
    differ in them; default: those with most sizes. Raises DataError for an unknown axis or reference.
    """
    tolerances = {"slope_tolerance": slope_tolerance, "regret_tolerance": regret_tolerance}
    fits = transfer_of_optima(cell_optima(table), axis=axis, reference=reference, at=at, **tolerances)
    by_kind = {str(kind): rows for kind, rows in table.frame.groupby("parametrization")}
    return {kind: replace(fit, across=across_sizes(by_kind[kind], axis, fit.optima)) for kind, fit in fits.items()}


def transfer_of_optima(
    optima: Sequence[CellOptimum], *, axis: str = "width", slope_tolerance: float = SLOPE_TOLERANCE,
    regret_tolerance: float = REGRET_TOLERANCE, reference: float | None = None, at: Mapping[str, float] | None = None,
) -> dict[str, TransferFit]:  # fmt: skip
    """`transfer` for optima that were found already."""
    if axis not in AXES:
        raise DataError(Fault(f"axis {axis!r}", "is not a dimension of a sweep", f"one of {', '.join(AXES)}"))
    names = sorted({item.cell.parametrization for item in optima})
    fits = {}
    for name in names:
        chosen, notes = _path([item for item in optima if item.cell.parametrization == name], axis, at or {})
        if reference is not None and reference not in [_size(item, axis) for item in chosen]:
            sizes = ", ".join(number(_size(item, axis)) for item in chosen)
            raise DataError(Fault(f"reference {number(reference)}", f"{name} has no such {axis}", f"one of {sizes}"))
        fits[name] = _judge(name, chosen, axis, (slope_tolerance, regret_tolerance), reference, notes)
    return fits


def _several(axis: str) -> str:
    """widths, depths; batch_tokens and tokens are plural."""
    return axis if axis.endswith("s") else f"{axis}s"


def _size(optimum: CellOptimum, axis: str) -> float:
    return optimum.cell.size(axis)


def _path(optima: Sequence[CellOptimum], axis: str, at: Mapping[str, float]) -> tuple[list[CellOptimum], tuple[str, ...]]:
    """One cell a size: the others fixed where possible, or moving along when every size has one cell only."""
    known = [item for item in optima if math.isfinite(_size(item, axis))]
    sizes = [_size(item, axis) for item in known]
    if len(set(sizes)) == len(sizes):
        along = [name for name in AXES if name != axis and len({getattr(item.cell, name) for item in known}) > 1]
        words = (
            f"{', '.join(along)} change{'s' if len(along) == 1 else ''} along with {axis}: the verdict is on all of them together"
        )
        return sorted(known, key=lambda item: _size(item, axis)), (words,) if along else ()
    groups: dict[tuple[float, ...], list[CellOptimum]] = {}
    for item in known:
        groups.setdefault(item.cell.others(axis), []).append(item)
    wanted = tuple(at.get(name, math.nan) for name in AXES if name != axis)

    def rank(group: tuple[tuple[float, ...], list[CellOptimum]]) -> tuple[float, int, tuple[float, ...]]:
        return sum(level == other for level, other in zip(group[0], wanted, strict=True)), len(group[1]), group[0]

    others, best = max(groups.items(), key=rank)
    levels = ", ".join(
        f"{name} {value:.12g}" for name, value in zip([name for name in AXES if name != axis], others, strict=True) if value > 0
    )
    note = f"judged at {levels}; {len(known) - len(best)} cells at other levels are left aside"
    return sorted(best, key=lambda item: _size(item, axis)), (note,)


def _judge(
    name: str, optima: Sequence[CellOptimum], axis: str, tolerances: tuple[float, float], reference: float | None,
    notes: tuple[str, ...],
) -> TransferFit:  # fmt: skip
    usable = [item for item in optima if item.usable]
    regret = _regret(optima, axis, reference)
    line = None
    if len(usable) >= 2:
        informative = [item for item in optima if item.draws is not None and item.censored != "unresolved"]
        line = fit_slope([math.log2(_size(item, axis)) for item in informative], informative)
    slope = Slope(line.slope, line.interval) if line else Slope()
    verdict, reasons = _verdict(optima, axis, slope.interval, regret, tolerances)
    if verdict == "inconclusive":
        reasons += _cures(optima, axis, regret, slope.interval, tolerances)
    return TransferFit(name, axis, verdict, slope, regret, tuple(optima), tuple(reasons), notes, *tolerances, line)


def _regret(optima: Sequence[CellOptimum], axis: str, reference: float | None) -> Regret:
    if len(optima) < 2:
        return Regret()
    source = next(item for item in optima if reference is None or _size(item, axis) == reference)
    target = optima[-1]
    if source is target:
        return Regret()
    sizes = _size(source, axis), _size(target, axis)
    if not source.usable:
        return Regret(reference=sizes[0], target=sizes[1])
    value, interval = target.rise_at(source.log2_lr)
    best = abs(target.best_loss)
    return Regret(value, interval, value / best, (interval[0] / best, interval[1] / best), source.log2_lr, *sizes)


def _verdict(
    optima: Sequence[CellOptimum], axis: str, interval: Interval, regret: Regret, tolerances: tuple[float, float]
) -> tuple[Verdict, list[str]]:
    slope_tolerance, regret_tolerance = tolerances
    usable = [item for item in optima if item.usable]
    low, high = interval
    if _outside(interval, slope_tolerance) and len(usable) >= MIN_SIZES:
        words = f"the slope's interval {interval_text(interval)} lies outside +-{number(slope_tolerance)} octaves per doubling"
        return "drifts", [words]
    if regret.relative_interval[0] > regret_tolerance:
        least = "diverges" if math.isinf(regret.value) else f"costs at least {number(100 * regret.relative_interval[0])} %"
        where = f"the optimum of {axis} {number(regret.reference)} {least} at {number(regret.target)}"
        words = f"{where}, and {number(100 * regret_tolerance)} % is tolerated"
        return "drifts", [words]
    if len(usable) < MIN_SIZES:
        words = f"{len(usable)} of {len(optima)} {_several(axis)} have an interior optimum, at least {MIN_SIZES} are needed"
        return "inconclusive", [words]
    bounds = f"+-{number(slope_tolerance)} octaves per doubling"
    flat = -slope_tolerance <= low and high <= slope_tolerance
    cheap = regret.relative_interval[1] < regret_tolerance
    where = "lies inside" if flat else "is not inside"
    cost = f"{number(100 * regret.relative_interval[1])} % of the best loss" if math.isfinite(regret.interval[1]) else "unbounded"
    compare = "below" if cheap else "not below"
    reasons = [
        f"the slope's interval {interval_text(interval)} {where} {bounds}",
        f"the regret's upper end, {cost}, is {compare} the tolerance of {number(100 * regret_tolerance)} %",
    ]
    censored = [number(_size(item, axis)) for item in optima if not item.usable]
    if censored:
        reasons.append(f"{axis} {', '.join(censored)}: the optimum is not interior, so nothing is shown to transfer there")
    return ("transfers" if flat and cheap and not censored else "inconclusive"), reasons


def _outside(interval: Interval, tolerance: float) -> bool:
    """Whether the interval lies beyond the tolerance, on one side."""
    return interval[0] > tolerance or interval[1] < -tolerance


def _cures(
    optima: Sequence[CellOptimum], axis: str, regret: Regret, interval: Interval, tolerances: tuple[float, float]
) -> list[str]:
    """What would decide: the cheapest missing evidence first."""
    cures = []
    for item in optima:
        size = number(_size(item, axis))
        low, high = item.sampled
        if item.censored in ("low", "high"):
            span = (low - 2, low) if item.censored == "low" else (high, high + 2)
            ends = f"{power_of_two(span[0])} and {power_of_two(span[1])}"
            cures.append(f"to decide: {item.cell.values} between {ends} at {axis} {size}")
        elif item.censored == "unresolved" and not item.n_finite:
            lowest = power_of_two(item.lowest_diverged)
            cures.append(f"to decide: {item.cell.values} below {lowest} at {axis} {size}, where all runs diverged")
        elif item.censored == "unresolved":
            cures.append(f"to decide: more {item.cell.values} or seeds at {axis} {size}")
    usable = [item for item in optima if item.usable]
    missing = MIN_SIZES - len(usable) - len(cures)
    if missing > 0:
        cures.append(f"to decide: {missing} more {_several(axis) if missing > 1 else axis}")
    if not usable or cures:
        return cures
    worst = max(usable, key=lambda item: item.half_width if math.isfinite(item.half_width) else math.inf)
    low, high = (end if math.isfinite(end) else edge for end, edge in zip(worst.interval, worst.sampled, strict=True))
    gap = f"between {power_of_two(low - 0.25)} and {power_of_two(high + 0.25)} at {axis} {number(_size(worst, axis))}"
    cures.append(
        f"to decide: {worst.cell.values} {gap} (the widest interval), or {max(3, worst.n_seeds + 2)} seeds near the bottom"
    )
    width = interval[1] - interval[0]
    if width > tolerances[0]:
        cures.append(
            f"or a larger {axis}: the slope's interval is {number(width)} wide and shrinks with the range of {_several(axis)}"
        )
    if math.isnan(regret.value) and math.isfinite(regret.log2_lr):
        cures.append(f"a run at {power_of_two(regret.log2_lr)} at {axis} {number(regret.target)}, to read the regret")
    return cures
