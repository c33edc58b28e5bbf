"""Where training begins to diverge, over sizes: a line through intervals, since each size only says between which learning rates it lies.

Owns Frontier and `fit_frontier`: log2 of the lowest diverging LR = a + slope * log2(size) + scatter, each size's value known to lie in its
bracket. a and slope are flat beforehand, the scatter's standard deviation is half normal; all three are integrated on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.results import UNKNOWN, Interval, json_safe
from analysis.shapes import Array

SLOPES = np.linspace(-3.0, 3.0, 241)
SCATTER = 0.5
"""Octaves; of the half normal distribution of the scatter's standard deviation."""
SCATTERS = np.linspace(0.05, 1.5, 12)
OFFSETS = 121
"""Grid points of a, over the brackets and REACH octaves beyond."""
REACH = 3.0
LEVELS = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Frontier:
    """brackets: per size (highest stable log2 LR, lowest that diverges), infinite where none was met.

    slope: octaves a doubling of the size; its 90 % interval held the truth in 84 to 100 % of simulated tables of three to six sizes.
    """

    brackets: tuple[Interval, ...]
    slope: float = math.nan
    interval: Interval = UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        return dict(json_safe({"brackets": self.brackets, "slope": {"value": self.slope, "interval": self.interval}}))


def fit_frontier(log2_sizes: Array, brackets: Sequence[Interval]) -> Frontier:
    """The slope is NaN where fewer than three sizes have both a stable and a diverging learning rate."""
    ends = np.array(brackets, dtype=float).reshape(-1, 2)
    if np.isfinite(ends).all(axis=1).sum() < 3:
        return Frontier(tuple(brackets))
    x = log2_sizes - log2_sizes.mean()
    finite = ends[np.isfinite(ends)]
    offsets = np.linspace(finite.min() - REACH, finite.max() + REACH, OFFSETS)
    log_density = np.zeros((len(SLOPES), OFFSETS, len(SCATTERS))) - 0.5 * (SCATTERS / SCATTER) ** 2
    for at, (low, high) in zip(x, ends, strict=True):
        centre = offsets + SLOPES[:, None] * at
        log_density += np.log(_inside(low, high, centre[:, :, None], SCATTERS) + 1e-300)
    density = np.exp(log_density - log_density.max()).sum(axis=(1, 2))
    cumulative = np.cumsum(density) - 0.5 * density
    low, middle, high = (float(value) for value in np.interp(LEVELS, cumulative / density.sum(), SLOPES))
    return Frontier(tuple(brackets), middle, (low, high))


def _inside(low: float, high: float, centre: Array, scatter: Array) -> Array:
    """Probability that a normal value lies in the bracket."""
    from scipy.special import ndtr

    return np.asarray(ndtr((high - centre) / scatter) - ndtr((low - centre) / scatter))
