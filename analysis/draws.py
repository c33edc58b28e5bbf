"""Draws of a cell's curve from its posterior: best loss, and what a learning rate costs.

Owns CellDraws. The draws are taken with a fixed seed: the same table gives the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.posterior import DISCREPANCY, Likelihood
from analysis.results import Interval
from analysis.shapes import Array, library

DRAWS = 2000
CURVE_ERROR = 2 * DISCREPANCY
"""Error of a value read off a curve, as a share of its rise; wider than in the fit, which reads every point at once."""


@dataclass(frozen=True)
class CellDraws:
    """Curves that are compatible with the runs of a cell, and the density of the optimum itself.

    optimum, level, scale, shape: one entry a draw, log2 LR, nats, nats at one octave, index in the library.
    """

    optimum: Array
    level: Array
    scale: Array
    shape: Array
    sigma: Array
    grid: Array
    """Optima (log2 LR) on which `table` stands."""
    table: Array
    """Likelihood (largest 1) of (optimum, shape) with the noise integrated out."""
    window: Interval
    sampled_lr: Array
    sampled_loss: Array
    """Mean finite loss of each sampled learning rate."""
    first_diverged: float
    censored: bool = False

    def rise_at(self, log2_lr: float) -> tuple[float, Interval]:
        """See CellOptimum.rise_at."""
        if log2_lr >= self.first_diverged:
            return math.inf, (math.inf, math.inf)
        inside = float(np.clip(log2_lr, self.sampled_lr[0], self.sampled_lr[-1]))
        values = self._rises(inside)
        low, middle, high = (float(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
        if self.censored or inside != log2_lr:
            return math.nan, (max(0.0, low), math.inf)
        return middle, (low, high)

    def _rises(self, log2_lr: float) -> Array:
        random = np.random.default_rng(1)
        if self.window[0] <= log2_lr <= self.window[1] and not self.censored:
            u = log2_lr - self.optimum
            values = np.empty(len(u))
            for index in np.unique(self.shape):
                chosen = self.shape == index
                values[chosen] = library()[0][int(index)](u[chosen])
            return np.maximum(0.0, self.scale * values * (1.0 + CURVE_ERROR * random.standard_normal(len(u))))
        # On the walls no curve was fitted: between measured losses a straight line.
        measured = np.interp(log2_lr, self.sampled_lr, self.sampled_loss)
        best = self.sampled_loss.min() if self.censored else self.level
        error = np.hypot(self.sigma, self._between(log2_lr))
        return np.maximum(0.0, measured + error * random.standard_normal(len(error)) - best)

    def _between(self, log2_lr: float) -> float:
        """Error of a straight line between two measured losses, nats: 0 at either, largest half way."""
        above = int(np.searchsorted(self.sampled_lr, log2_lr))
        if above == 0 or above == len(self.sampled_lr):
            return 0.0
        low, high = self.sampled_lr[above - 1], self.sampled_lr[above]
        share = (log2_lr - low) / (high - low)
        step = abs(self.sampled_loss[above] - self.sampled_loss[above - 1])
        return float(2.0 * CURVE_ERROR * step * math.sqrt(share * (1.0 - share)))


def draw_cell(
    cell: Likelihood, posterior: Array, log_prior_sigma: Array, runs: tuple[Array, Array], first_diverged: float
) -> CellDraws:
    """Draw curves from `posterior` (optimum, shape, noise), k and the level given those from their exact conditionals."""
    from scipy.special import ndtr, ndtri

    random = np.random.default_rng(0)
    cumulative = np.cumsum(posterior.ravel())
    picks = np.searchsorted(cumulative, (np.arange(DRAWS) + random.random()) / DRAWS * cumulative[-1])
    at, shape, noise = np.unravel_index(np.minimum(picks, posterior.size - 1), posterior.shape)
    scale, level = np.empty(DRAWS), np.empty(DRAWS)
    uniform, normal = random.random(DRAWS), random.standard_normal(DRAWS)
    values = np.empty((DRAWS, len(cell.data.rates)))
    for index in np.unique(shape):
        chosen = shape == index
        values[chosen] = library()[0][int(index)](cell.data.rates - cell.optima[at[chosen], None])
    for index in np.unique(noise):
        form, chosen = cell.forms[int(index)], noise == index
        square = np.maximum(((values[chosen] @ form.square) * values[chosen]).sum(axis=1) + cell.rise.precision, 1e-300)
        gain = (values[chosen] @ form.cross + cell.rise.precision * cell.rise.mean) / np.sqrt(square)
        below = ndtr(-gain)
        deviate = ndtri(np.clip(below + uniform[chosen] * (1.0 - below), 1e-12, 1.0 - 1e-12))
        scale[chosen] = np.maximum(0.0, (gain + deviate) / np.sqrt(square))
        level[chosen] = form.level_loss - scale[chosen] * (values[chosen] @ form.level_curve)
        level[chosen] += math.sqrt(form.level_variance) * normal[chosen]
    level += _seed_spread(cell, random)
    marginal = cell.table + log_prior_sigma
    table = np.exp(marginal - marginal.max()).sum(axis=2)
    rates = np.unique(runs[0])
    return CellDraws(
        cell.optima[at], level, scale, shape.astype(float), cell.sigmas[noise], cell.optima, table / table.max(),
        (float(cell.data.rates[0]), float(cell.data.rates[-1])), rates,
        np.array([runs[1][runs[0] == rate].mean() for rate in rates]), first_diverged,
    )  # fmt: skip


def flat_draws(ends: Interval, level: float, runs: tuple[Array, Array], first_diverged: float, censored: bool) -> CellDraws:
    """Draws of a cell without a fit: the optimum anywhere between `ends`, nothing known about the curve."""
    grid = np.linspace(*ends, 62)[1:-1]
    rates = np.unique(runs[0])
    zeros = np.zeros(DRAWS)
    return CellDraws(
        np.linspace(*ends, DRAWS), zeros + level, zeros, zeros, zeros, grid, np.ones((len(grid), len(library()[0]))),
        (math.inf, -math.inf), rates, np.array([runs[1][runs[0] == rate].mean() for rate in rates]), first_diverged, censored,
    )  # fmt: skip


def _seed_spread(cell: Likelihood, random: np.random.Generator) -> Array:
    """What the mean over the seeds may be off from the mean over all seeds; 0 with one seed, which cannot know."""
    spread = cell.block_levels
    if len(spread) < 2:
        return np.zeros(DRAWS)
    return np.asarray(random.standard_t(len(spread) - 1, DRAWS) * spread.std(ddof=1) / math.sqrt(len(spread)))
