"""The family of curves that a loss may follow near its best learning rate.

Owns the library of shapes and their prior weights. A shape is a function of u = log2_lr - log2_lr* in octaves, 0 at its only
minimum u = 0, scaled so that the mean of its rises one octave to the left and to the right is 1. Three kinds:

    smooth  2 (exp(a u) - a u - 1) / a^2 = u^2 + a u^3 / 3 + ...: the quadratic with a cubic term, but with one minimum for any a
    split   u^2 on the left, r u^2 on the right: curvature that jumps at the bottom
    corner  a falling slope that turns into a wall: what a curve looks like where training becomes unstable at the optimum

No few points can tell these apart, and they disagree on where the minimum is; weighing them all is what makes the interval of
an optimum honest. The weights follow measured curves of small transformers: steeper on the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kind = Literal["smooth", "split", "corner"]

KIN = 0.6
"""Share of cells whose curve looks like that of the other widths of their parametrization."""
KIN_SPREAD: dict[Kind, float] = {"smooth": 0.25, "split": 0.35, "corner": 0.7}
WEIGHTS: dict[Kind, float] = {"smooth": 0.45, "split": 0.4, "corner": 0.15}
SMOOTH_MEAN, SMOOTH_SD = 0.35, 0.45
"""Of a, per octave."""
SPLIT_MEAN, SPLIT_SD = 0.8, 0.8
"""Of the log of r."""
CORNERS = tuple((ratio, rounding) for ratio in (1.0, 2.0, 4.0) for rounding in (0.15, 0.4))
"""Slope of the wall over the slope on the left at the turn, and the width of the turn in octaves."""


CORNER_DECAY = 0.3
"""Per octave: how the slope on the left of a corner levels off."""


@dataclass(frozen=True)
class Shape:
    """One member of the library."""

    kind: Kind
    parameter: float
    """a, log r, or log of the ratio of slopes; above 0 is steeper on the right."""
    rounding: float = 0.0
    """Octaves; corners only."""

    def __call__(self, u: Array) -> Array:
        """Rise over the minimum at `u` octaves from it, in units of the mean rise at one octave."""
        unit = 0.5 * float(self._raw(np.array([-1.0, 1.0])).sum())
        return np.asarray(self._raw(np.asarray(u, dtype=float)) / unit)

    def _raw(self, u: Array) -> Array:
        if self.kind == "smooth":
            return _smooth(u, self.parameter)
        if self.kind == "split":
            return np.asarray(u**2 * np.where(u > 0, np.exp(self.parameter), 1.0))
        ratio, width = float(np.exp(self.parameter)), self.rounding
        bottom = _corner_bottom(ratio, width)
        return np.asarray(_corner(u + bottom, ratio, width) - _corner(np.array(bottom), ratio, width))


def _smooth(u: Array, a: float) -> Array:
    z = np.clip(a * u, -30.0, 30.0)
    # The closed form cancels for small z; there the series is exact to rounding.
    safe = np.where(np.abs(z) < 1e-2, 1.0, z)
    closed = 2.0 * (np.expm1(safe) - safe) / safe**2
    return np.asarray(u**2 * np.where(np.abs(z) < 1e-2, 1.0 + z / 3.0 + z**2 / 12.0 + z**3 / 60.0, closed))


def _corner(u: Array, ratio: float, width: float) -> Array:
    return np.asarray(np.exp(-CORNER_DECAY * u) / CORNER_DECAY + (1.0 + ratio) * width * np.logaddexp(0.0, u / width))


@cache
def _corner_bottom(ratio: float, width: float) -> float:
    grid = np.linspace(-2.0, 2.0, 400_001)
    return float(grid[_corner(grid, ratio, width).argmin()])


@cache
def library() -> tuple[tuple[Shape, ...], Array]:
    """All shapes and the log of their prior weights (which sum to 1)."""
    smooth = [Shape("smooth", float(a)) for a in np.linspace(-0.85, 1.85, 19)]
    split = [Shape("split", float(q)) for q in np.linspace(-1.0, 2.4, 11)]
    corner = [Shape("corner", float(np.log(ratio)), rounding) for ratio, rounding in CORNERS]
    shares = [
        _share(WEIGHTS["smooth"], [-0.5 * ((s.parameter - SMOOTH_MEAN) / SMOOTH_SD) ** 2 for s in smooth]),
        _share(WEIGHTS["split"], [-0.5 * ((s.parameter - SPLIT_MEAN) / SPLIT_SD) ** 2 for s in split]),
        _share(WEIGHTS["corner"], [0.0 for _ in corner]),
    ]
    return (*smooth, *split, *corner), np.log(np.concatenate(shares))


def _share(total: float, log_weight: list[float]) -> Array:
    weight = np.exp(np.array(log_weight))
    return np.asarray(total * weight / weight.sum())


@cache
def kinship() -> Array:
    """Probability of a cell's shape (column) given the shape that is typical of its parametrization (row)."""
    shapes, log_prior = library()
    parameter = np.array([shape.parameter for shape in shapes])
    kinds = np.array([shape.kind for shape in shapes])
    spread = np.array([KIN_SPREAD[shape.kind] for shape in shapes])
    near = np.exp(-0.5 * ((parameter - parameter[:, None]) / spread[:, None]) ** 2 + log_prior) * (kinds == kinds[:, None])
    near /= near.sum(axis=1, keepdims=True)
    return np.asarray(KIN * near + (1.0 - KIN) * np.exp(log_prior))
