"""The gradient noise scale B_simple = tr(Sigma) / |G|^2 from a run's gradient norms at two batch sizes, with an interval. Torch-free.

Owns the estimates (McCandlish et al. 1812.06162, appendix A.1) and their uncertainty. G is the mean gradient, Sigma the covariance of one
sequence's gradient, both before clipping; B_simple is in sequences. Numerator and denominator are averaged apart, over a window or
exponentially, and divided last: the ratio of one step is biased and often negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.results import UNKNOWN, Interval, json_safe
from analysis.shapes import Array
from scaling.errors import DataError, Fault
from scaling.records import read_metrics

DEFINITION = "B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 1812.06162), Sigma of one sequence's gradient, before clipping"
BLOCKS = 20
"""Consecutive measurements are averaged into this many blocks at most, so that a slow drift counts as the noise it makes."""
LEAST_STEPS = 8
"""Fewer measured steps than this give no interval."""


@dataclass(frozen=True)
class Norms:
    """Measured steps of a run in order: squared gradient norms at two batch sizes; one value a step in every array."""

    step: Array
    batch_sequences: Array
    batch: Array
    part_sequences: Array
    parts: Array
    dropped: int = 0
    """Measured steps whose norms were not finite."""

    def between(self, first: float, end: float) -> Norms:
        """The steps from `first` on and before `end`."""
        chosen = (self.step >= first) & (self.step < end)
        return replace(self, **{name: getattr(self, name)[chosen] for name in _COLUMNS})

    @property
    def gradient_sq(self) -> Array:
        """An unbiased estimate of |G|^2 from every step; may be negative."""
        big, small = self.batch_sequences, self.part_sequences
        return np.asarray((big * self.batch - small * self.parts) / (big - small))

    @property
    def trace(self) -> Array:
        """An unbiased estimate of tr(Sigma) from every step."""
        return np.asarray((self.parts - self.batch) / (1 / self.part_sequences - 1 / self.batch_sequences))


_COLUMNS = ("step", "batch_sequences", "batch", "part_sequences", "parts")


def norms_of(rows: Iterable[Mapping[str, Any]]) -> Norms:
    """From rows of a run's metrics; those without a measurement are passed over, those that are not finite counted."""
    measured = [{"step": row["step"]} | row["gradient_sq"] for row in rows if row.get("gradient_sq")]
    finite = [row for row in measured if all(row[name] is not None for name in _COLUMNS)]
    columns = {name: np.array([row[name] for row in finite], dtype=float) for name in _COLUMNS}
    return Norms(**columns, dropped=len(measured) - len(finite))


def read_norms(directory: Path) -> Norms:
    """From a run directory. Raises DataError when the run was not measured."""
    path = directory / "metrics.jsonl"
    norms = norms_of(read_metrics(path))
    if not len(norms.step):
        what = "holds no gradient norms" if path.exists() else "no such file"
        cure = "train a run with --set runtime.noise_scale_every_steps=16 (a finished one in another folder: --out DIR)"
        raise DataError(Fault(str(path), what, cure))
    return norms


@dataclass(frozen=True)
class NoiseScale:
    """B_simple over some steps of a run, in sequences."""

    sequences: float
    """Infinite where the estimate of |G|^2 is not positive."""
    interval: Interval
    """Its upper end is infinite where |G|^2 may be 0: the steps say "at least" and no more."""
    gradient_sq: float
    trace: float
    steps: int
    """Measured."""
    first_step: int
    last_step: int
    batch_sequences: float
    """Mean batch that was measured."""
    level: float
    dropped: int = 0

    @property
    def bounded(self) -> bool:
        """Whether the interval has two ends."""
        return all(map(math.isfinite, self.interval))

    def to_dict(self, context: int | None = None) -> dict[str, Any]:
        """JSON view; with `context` (tokens a sequence) in tokens as well. An open end is null."""
        document: dict[str, Any] = {
            "definition": DEFINITION,
            "value": self.sequences,
            "interval": self.interval,
            "unit": "sequences",
        }
        if context is not None:
            document["tokens"] = {"value": self.sequences * context, "interval": [end * context for end in self.interval]}
        keys = ("gradient_sq", "trace", "steps", "first_step", "last_step", "batch_sequences", "level", "dropped")
        return dict(json_safe(document | {key: getattr(self, key) for key in keys}))

    def __str__(self) -> str:
        low, high = (
            f"{end:.3g}" if math.isfinite(end) else "unknown" if math.isnan(end) else "unbounded" for end in self.interval
        )
        value = f"{self.sequences:.3g} sequences" if math.isfinite(self.sequences) else "unbounded"
        window = f"{self.steps} measured steps from {self.first_step} to {self.last_step}"
        dropped = f", {self.dropped} of the run dropped as not finite" if self.dropped else ""
        return f"B_simple {value} [{low}, {high}] at {100 * self.level:g} % ({window}{dropped})"


def noise_scale(norms: Norms, *, level: float = 0.9) -> NoiseScale:
    """B_simple of all of `norms`, its interval by Fieller's method on means of consecutive blocks.

    The interval takes blocks as independent; a trend inside the window widens it. NaN with fewer than LEAST_STEPS steps.
    """
    if not len(norms.step):
        raise DataError(Fault("noise scale", "no step of the window was measured", "take a wider window"))
    gradient_sq, trace = norms.gradient_sq, norms.trace
    interval = UNKNOWN
    if len(trace) >= LEAST_STEPS:
        blocks = np.array_split(np.stack([trace, gradient_sq]), min(BLOCKS, len(trace)), axis=1)
        interval = ratio_interval(*np.array([block.mean(axis=1) for block in blocks]).T, level=level)
    top, bottom = float(trace.mean()), float(gradient_sq.mean())
    return NoiseScale(
        sequences=top / bottom if bottom > 0 else math.inf,
        interval=interval,
        gradient_sq=bottom,
        trace=top,
        steps=len(trace),
        first_step=int(norms.step[0]),
        last_step=int(norms.step[-1]),
        batch_sequences=float(norms.batch_sequences.mean()),
        level=level,
        dropped=norms.dropped,
    )


def ratio_interval(top: Array, bottom: Array, *, level: float) -> Interval:
    """The non-negative part of Fieller's (1954) interval of mean(top) / mean(bottom), from independent pairs.

    Its upper end is infinite where the mean of `bottom` is not told from 0.
    """
    from scipy.stats import t

    count = len(top)
    spread = np.cov(top, bottom) / count * float(t.ppf(0.5 + level / 2, count - 1)) ** 2
    mean_top, mean_bottom = float(top.mean()), float(bottom.mean())
    # The ratios r with (mean_top - r mean_bottom)^2 <= t^2 var(mean_top - r mean_bottom): a r^2 - 2 b r + c <= 0.
    a = mean_bottom**2 - spread[1, 1]
    b = mean_top * mean_bottom - spread[0, 1]
    c = mean_top**2 - spread[0, 0]
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and mean_bottom > 0:
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    if a > 0:  # |G|^2 below zero by more than its error: no noise scale fits
        return math.nan, math.nan
    return (0.0 if c <= 0 else (b - root) / a), math.inf


@dataclass(frozen=True)
class NoiseScaleCurve:
    """B_simple along a run from exponential averages, one value a measured step; NaN where |G|^2 is not above 0."""

    step: Array
    sequences: Array
    gradient_sq: Array
    trace: Array
    half_life_steps: float


def noise_scale_curve(norms: Norms, half_life_steps: float) -> NoiseScaleCurve:
    """Both estimates averaged exponentially over the steps before, apart, and their ratio; half_life_steps: training steps."""
    weights = 0.5 ** (np.subtract.outer(norms.step, norms.step) / half_life_steps)
    weights = np.tril(weights)
    weights /= weights.sum(axis=1, keepdims=True)
    gradient_sq, trace = weights @ norms.gradient_sq, weights @ norms.trace
    ratio = np.divide(trace, gradient_sq, out=np.full(len(trace), np.nan), where=gradient_sq > 0)
    return NoiseScaleCurve(norms.step, ratio, gradient_sq, trace, half_life_steps)
