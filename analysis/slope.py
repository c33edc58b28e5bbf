"""How the best learning rate moves with size: a line through optima that are themselves uncertain.

Owns the joint posterior of `log2_lr* = level + slope * log2(size)` over all cells of one parametrization. Each cell enters with
its whole likelihood, not with a mean and an error: skewed intervals, open ends and censored cells (an inequality) count for what
they say. Cells scatter about the line by an unknown amount, which three cells can hardly measure: it has a prior of its own.
Curves of one parametrization resemble each other, so the allowance for their shape mostly cancels in the slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.draws import CellDraws
from analysis.optimum import CellOptimum
from analysis.results import Interval
from analysis.shapes import Array, kinship, library

SCATTERS = (0.02, 0.06, 0.12, 0.25, 0.5)
"""Octaves: standard deviations of an optimum about the line."""
SCATTER_WEIGHTS = (0.26, 0.28, 0.28, 0.13, 0.05)
STEEPEST = 4.0
"""Slopes beyond this many octaves a doubling are not considered."""
STEP = 0.02
LEVELS, SLOPES = 41, 121
DRAWS = 2000


@dataclass(frozen=True)
class SlopeFit:
    """Posterior of the line, in octaves of the learning rate against doublings of the size."""

    slope: float
    interval: Interval
    centre: float
    """log2(size) at which `level` is."""
    levels: Array
    """Draws of log2_lr* at `centre`, with `slopes`."""
    slopes: Array
    scatter: float
    """Posterior mean of the scatter of optima about the line, octaves."""

    def band(self, log2_size: Array) -> tuple[Array, Array, Array]:
        """Low, middle and high (5, 50, 95 %) of the line at `log2_size`."""
        lines = self.levels[:, None] + self.slopes[:, None] * (np.asarray(log2_size) - self.centre)
        low, middle, high = np.quantile(lines, (0.05, 0.5, 0.95), axis=0)
        return low, middle, high


def fit_slope(log2_size: Sequence[float], optima: Sequence[CellOptimum]) -> SlopeFit:
    """Fit the line through the cells that have a likelihood; the sizes must not all be equal."""
    cells = [(size, optimum, optimum.draws) for size, optimum in zip(log2_size, optima, strict=True) if optimum.draws is not None]
    sizes = np.array([size for size, _, _ in cells])
    centre = float(sizes.mean())
    supports = [_messages(optimum, draws) for _, optimum, draws in cells]
    region = _region(sizes - centre, [optimum for _, optimum, _ in cells])
    for _ in range(4):
        levels, slopes = (np.linspace(low, high, count) for (low, high), count in zip(region, (LEVELS, SLOPES), strict=True))
        density, scatter = _density(levels, slopes, sizes - centre, supports)
        grown = _grown(region, density)
        if grown == region:
            break
        region = grown
    return _summary(levels, slopes, density, centre, scatter)


def _messages(optimum: CellOptimum, draws: CellDraws) -> tuple[float, Array]:
    """What a cell says about the line's value at its size: first grid value, log likelihood (typical shape, scatter, value)."""
    table = draws.table @ kinship().T
    if optimum.censored == "low":
        _flatten(table, draws.grid <= optimum.log2_lr)
    if optimum.censored == "high":
        _flatten(table, draws.grid >= optimum.log2_lr)
    table /= table.max()
    values = np.arange(draws.grid[0] - 0.5, draws.grid[-1] + 0.5, STEP)
    # Beyond the grid a censored cell says no more than at its end.
    grid = np.concatenate([draws.grid[0] - np.arange(1.5, 0, -0.05), draws.grid, draws.grid[-1] + np.arange(0.05, 1.5, 0.05)])
    pad_low, pad_high = (np.repeat(table[[end]], count, axis=0) for end, count in ((0, 30), (-1, 29)))
    if not optimum.censored:
        pad_low, pad_high = 0.0 * pad_low, 0.0 * pad_high
    table = np.concatenate([pad_low, table, pad_high])
    messages = []
    for scatter in SCATTERS:
        kernel = np.exp(-0.5 * ((values[:, None] - grid) / scatter) ** 2) * np.gradient(grid)
        kernel /= np.maximum(kernel.sum(axis=1, keepdims=True), 1e-300)
        messages.append(kernel @ table)
    # The floor lets one cell in many be wrong without deciding all.
    return float(values[0]), np.log(np.maximum(np.array(messages).transpose(2, 0, 1), 1e-9))


def _flatten(table: Array, beyond: NDArray[np.bool_]) -> None:
    """A censored cell is an inequality: everywhere beyond the edge it fits as well as anywhere beyond the edge."""
    table[beyond] = table[beyond].max(axis=0)


def _region(sizes: Array, optima: Sequence[CellOptimum]) -> tuple[Interval, Interval]:
    """Where to look first: five standard errors about a weighted straight line."""
    draws = [optimum.draws for optimum in optima]
    means = np.array([float(item.optimum.mean()) for item in draws if item is not None])
    sds = np.array([float(item.optimum.std()) for item in draws if item is not None])
    sds = np.where([optimum.usable for optimum in optima], np.hypot(sds, 0.15), 2.0)
    design = np.stack([np.ones(len(sizes)), sizes], axis=1) / sds[:, None]
    covariance = np.linalg.inv(design.T @ design)
    level, slope = covariance @ design.T @ (means / sds)
    reach_level, reach_slope = 5.0 * np.sqrt(np.diag(covariance))
    levels = (float(level - reach_level), float(level + reach_level))
    return levels, _limited(float(slope - reach_slope), float(slope + reach_slope))


def _limited(low: float, high: float) -> Interval:
    low, high = max(low, -STEEPEST), min(high, STEEPEST)
    return (low, high) if low < high - 0.5 else (-STEEPEST, STEEPEST)


def _density(levels: Array, slopes: Array, sizes: Array, supports: Sequence[tuple[float, Array]]) -> tuple[Array, float]:
    """Posterior over (level, slope), flat prior, summed over typical shapes and scatters."""
    total = library()[1][:, None, None] + np.log(SCATTER_WEIGHTS)[:, None]
    total = np.repeat(total, len(levels) * len(slopes), axis=2)
    for size, (first, messages) in zip(sizes, supports, strict=True):
        at = np.rint((levels[:, None] + slopes * size - first) / STEP).astype(int).ravel()
        total = total + messages[:, :, np.clip(at, 0, messages.shape[2] - 1)]
    density = np.exp(total - total.max())
    density /= density.sum()
    scatter = float(density.sum(axis=(0, 2)) @ np.array(SCATTERS))
    return density.sum(axis=(0, 1)).reshape(len(levels), len(slopes)), scatter


def _grown(region: tuple[Interval, Interval], density: Array) -> tuple[Interval, Interval]:
    """Twice the region on a side where the posterior has not died out."""
    (low, high), (flat, steep) = region
    level, slope = density.sum(axis=1), density.sum(axis=0)
    if max(level[0], level[-1]) > 1e-3 * level.max():
        low, high = low - 0.5 * (high - low), high + 0.5 * (high - low)
    if max(slope[0], slope[-1]) > 1e-3 * slope.max():
        flat, steep = _limited(flat - 0.5 * (steep - flat), steep + 0.5 * (steep - flat))
    return (low, high), (flat, steep)


def _summary(levels: Array, slopes: Array, density: Array, centre: float, scatter: float) -> SlopeFit:
    marginal = density.sum(axis=0)
    cumulative = np.cumsum(marginal) - 0.5 * marginal
    low, middle, high = (float(value) for value in np.interp((0.05, 0.5, 0.95), cumulative, slopes))
    random = np.random.default_rng(0)
    flat = np.cumsum(density.ravel())
    picks = np.searchsorted(flat, (np.arange(DRAWS) + random.random()) / DRAWS * flat[-1])
    rows, columns = np.unravel_index(np.minimum(picks, density.size - 1), density.shape)
    # Spread over their grid steps, so that quantiles of the line do not jump.
    levels_drawn = levels[rows] + (levels[1] - levels[0]) * (random.random(DRAWS) - 0.5)
    slopes_drawn = slopes[columns] + (slopes[1] - slopes[0]) * (random.random(DRAWS) - 0.5)
    # A quantile at the limit of what was considered is no bound.
    limit = 0.97 * STEEPEST
    interval = (low if low > -limit else -np.inf, high if high < limit else np.inf)
    return SlopeFit(middle, interval, centre, levels_drawn, slopes_drawn, scatter)
