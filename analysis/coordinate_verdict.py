"""A coordinate check's outcome as data and text, and the table of slopes that `coordinates` and `depth_coordinates` judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from analysis.results import Interval, fixed, json_safe, number, text_table
from analysis.wider import Wider
from scaling.coordinate_rows import Measurement

Verdict = Literal["pass", "warn", "fail", "inconclusive"]
Axis = Literal["width", "depth"]
PRIOR_SEEDS = 4
SPREAD = 0.02
"""Standard deviation of a slope that paired seeds may hide."""


@dataclass(frozen=True)
class Slope:
    """A slope against log2(width or depth), 90 % interval over seeds."""

    value: float
    interval: Interval

    def off(self, expected: float) -> float:
        return self.value - expected

    @property
    def half_width(self) -> float:
        return 0.5 * (self.interval[1] - self.interval[0])


NO_SLOPE = Slope(math.nan, (math.nan, math.nan))


@dataclass(frozen=True)
class Culprit:
    """A tensor (or the module that computes attention) that is wrong, and the number that shows it."""

    tensor: str
    statistic: str
    slope: Slope
    expected: float
    message: str
    level: Literal["fail", "warn"] = "fail"


@dataclass(frozen=True)
class TensorReport:
    """One tensor's slopes beside what they should be."""

    name: str
    shape: tuple[int, ...]
    """At the largest width."""
    growing: int
    """How many of its dimensions grow with width; for depth, whether it is a block's."""
    init: Slope
    update: Slope
    sensitivity: Slope
    effect: Slope
    expected: Mapping[str, float]
    """Of init, update and sensitivity; the sensitivity with what the readout explains."""


@dataclass(frozen=True)
class CoordinateVerdict:
    """The outcome of a coordinate check. It is necessary for transfer, not sufficient."""

    verdict: Verdict
    culprits: tuple[Culprit, ...]
    tensors: tuple[TensorReport, ...]
    output: Slope
    """RMS of the model's output before the first step."""
    modules: Mapping[str, tuple[Slope, Slope]]
    """Module -> slopes of mean |activation| at the start and of its change; for reading, not judged."""
    widths: tuple[int, ...]
    """Or depths."""
    notes: tuple[str, ...] = ()
    axis: Axis = "width"
    wider: Wider | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, with the keys of the contract: verdict, culprits, rows."""
        culprits = [
            {
                "tensor": item.tensor,
                "statistic": item.statistic,
                "slope": item.slope.value,
                "interval": item.slope.interval,
                "expected": item.expected,
                "level": item.level,
                "message": item.message,
            }
            for item in self.culprits
        ]
        rows = [
            {"tensor": item.name, "statistic": name, "slope": slope.value, "interval": slope.interval}
            | {"expected": item.expected.get(name), "growing": item.growing, "shape": item.shape}
            for item in self.tensors
            for name, slope in _slopes(item).items()
        ]
        document = {
            "verdict": self.verdict,
            "axis": self.axis,
            "culprits": culprits,
            "rows": rows,
            "output": {"slope": self.output.value, "interval": self.output.interval},
            f"{self.axis}s": self.widths,
            "notes": self.notes,
        }
        if self.wider is not None:
            document["wider"] = self.wider.to_dict()
        return dict(json_safe(document))

    def __str__(self) -> str:
        lines = [f"{self.sentence()} ({self.axis}s {', '.join(map(str, self.widths))})"]
        lines += [f"  {item.tensor}: {item.message}" for item in self.culprits]
        lines += [
            "",
            f"slopes against log2({self.axis})",
            text_table(*self.table()),
            f"output at the start: {_cell(self.output.value)}",
        ]
        if self.wider is not None:
            lines += ["", str(self.wider)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def sentence(self) -> str:
        """The verdict in a line."""
        wrong = len({item.tensor for item in self.culprits if item.level == "fail"} - {"loss"})
        failed = [f"{wrong} tensor{'s are' if wrong != 1 else ' is'} wrong"] if wrong else []
        whole = {item.statistic for item in self.culprits if item.tensor == "loss"}
        failed += [words for statistic, words in _WHOLE.items() if statistic in whole]
        if self.wider is not None and self.wider.verdict == "fail":
            failed.append("wider models end worse")
        return {
            "pass": f"pass: every tensor's init, update and effect scale with {self.axis} as {_DEMANDS[self.axis]} demands",
            "warn": "warn: it can train as it is, and does not do what transfer needs in all details",
            "fail": f"fail: {' and '.join(failed)}",
            "inconclusive": "inconclusive",
        }[self.verdict]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the slopes, as text."""
        with_effects = any(math.isfinite(item.effect.value) for item in self.tensors)
        header = [
            "tensor",
            "shape",
            "grow" if self.axis == "width" else "of a block",
            "init",
            "right",
            "update",
            "right",
            "sensitivity",
            "right",
            *(["effect"] if with_effects else []),
        ]
        rows = []
        for item in self.tensors:
            pairs = [(item.init, "init"), (item.update, "update"), (item.sensitivity, "sensitivity")]
            cells = [text for slope, name in pairs for text in (_cell(slope.value), _cell(item.expected.get(name, math.nan)))]
            grow = str(item.growing) if self.axis == "width" else ("yes" if item.growing else "no")
            effect = [_cell(item.effect.value)] if with_effects else []
            rows.append([item.name, "x".join(map(str, item.shape)), grow, *cells, *effect])
        return header, rows


_WHOLE = {"not_finite": "the loss is not finite", "frozen": "nothing is trained"}
"""Culprits of the whole model."""
_DEMANDS: Mapping[Axis, str] = {"width": "maximal update", "depth": "CompleteP"}


def _cell(value: float) -> str:
    return fixed(value, 2) if math.isfinite(value) else "-"


def _slopes(item: TensorReport) -> dict[str, Slope]:
    return {"init": item.init, "update": item.update, "sensitivity": item.sensitivity, "effect": item.effect}


class Table:
    """The rows by (kind, name, statistic): {seed: {width: value}}."""

    def __init__(self, measurement: Measurement) -> None:
        self._values: dict[tuple[str, str, str], dict[int, dict[int, float]]] = {}
        self._typical: dict[tuple[str, str], float] = {}
        for row in measurement.rows:
            self._values.setdefault((row.kind, row.name, row.statistic), {}).setdefault(row.seed, {})[row.width] = row.value

    def slope(self, kind: str, name: str, statistic: str) -> Slope:
        """NO_SLOPE where a value is absent or 0 at some width.

        Two or three seeds say little of their own spread: it is drawn towards that of the same statistic in all tensors, which
        counts as `PRIOR_SEEDS` more (a moderated variance, Smyth 2004).
        """
        slopes = self._slopes(kind, name, statistic)
        if not slopes or any(math.isnan(value) for value in slopes):
            return NO_SLOPE
        from scipy.special import stdtrit

        own = (len(slopes) - 1) * float(np.var(slopes, ddof=1)) if len(slopes) > 1 else 0.0
        degrees = len(slopes) - 1 + PRIOR_SEEDS
        variance = (own + PRIOR_SEEDS * self._typical_variance(kind, statistic)) / degrees
        half = float(stdtrit(degrees, 0.95)) * math.hypot(math.sqrt(variance / len(slopes)), SPREAD)
        mean = float(np.mean(slopes))
        return Slope(mean, (mean - half, mean + half))

    def _slopes(self, kind: str, name: str, statistic: str) -> list[float]:
        return [ols(values) for values in self._values.get((kind, name, statistic), {}).values()]

    def _typical_variance(self, kind: str, statistic: str) -> float:
        """Median over the tensors of the variance over seeds."""
        known = self._typical.get((kind, statistic))
        if known is None:
            every = [self._slopes(kind, name, statistic) for name in self.names(kind, statistic)]
            variances = [float(np.var(slopes, ddof=1)) for slopes in every if len(slopes) > 1 and not np.isnan(slopes).any()]
            known = self._typical[kind, statistic] = float(np.median(variances)) if variances else 0.05**2
        return known

    def at(self, kind: str, name: str, statistic: str, width: int) -> float:
        values = [by_width.get(width, math.nan) for by_width in self._values.get((kind, name, statistic), {}).values()]
        return float(np.mean(values)) if values else math.nan

    def once(self, kind: str, name: str, statistic: str) -> float:
        """What was measured at one width and seed only."""
        return next((value for row in self._values.get((kind, name, statistic), {}).values() for value in row.values()), math.nan)

    def least(self, kind: str, name: str, statistic: str) -> float:
        values = self._values.get((kind, name, statistic), {}).values()
        return min((value for row in values for value in row.values()), default=math.nan)

    def names(self, kind: str, statistic: str) -> list[str]:
        return [name for known, name, known_statistic in self._values if (known, known_statistic) == (kind, statistic)]


def ols(values: Mapping[int, float]) -> float:
    if len(values) < 2 or any(not value > 0 or not math.isfinite(value) for value in values.values()):
        return math.nan
    # Of a handful of points; numpy would take ten times as long for each of hundreds of slopes.
    x, y = [math.log2(width) for width in values], [math.log2(value) for value in values.values()]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def with_wider(verdict: CoordinateVerdict, wider: Wider) -> CoordinateVerdict:
    """The check's verdict with this one in it: a rise fails it."""
    culprits = tuple(
        Culprit(
            "loss", "wider_is_worse", Slope(item.rise, (item.lower, 2 * item.rise - item.lower)), 0.0,
            f"width {item.large} ends {number(item.rise, 4)} above width {item.small} after {wider.steps} steps at one learning rate: "
            "wider must never be worse (Tensor Programs V, section 8)",
        )
        for item in wider.rises if item.worse
    )  # fmt: skip
    unsure = wider.verdict == "inconclusive" and verdict.verdict in ("pass", "warn")
    outcome: Verdict = "fail" if culprits else "inconclusive" if unsure else verdict.verdict
    return replace(verdict, verdict=outcome, culprits=(*verdict.culprits, *culprits), wider=wider)
