"""What a handful of noisy losses say about where a cell's optimum is.

Owns the likelihood of one cell on a grid of (optimum, shape of the curve, noise). Everything is deterministic.

    loss = level of the seed + k * shape(log2_lr - log2_lr*) + error

The seeds' levels and k > 0 are integrated out in closed form (flat priors); shapes come from `analysis.shapes`. The error is
the noise of a run plus the curve's own error, which all seeds of a learning rate share: no simple curve is exact high on the
walls, so a loss that lies r above the best one is trusted to `DISCREPANCY * r` at most. That allowance for bias keeps the
intervals honest where the noise is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from analysis.shapes import Array, library

DISCREPANCY = 0.07
"""Standard deviation of the curve's own error, as a share of the rise above the best loss; set by simulation."""
REACH = 2.0
"""Octaves beyond the sampled learning rates where an optimum is still considered."""
SIGMA_STEPS = 22
SIGMA_RANGE = (5e-5, 0.05)
"""Noise considered, relative to the best loss."""


@dataclass(frozen=True)
class CellData:
    """The runs of one cell that enter its fit."""

    log2_lr: Array
    loss: Array
    block: NDArray[np.int64]
    """Runs of one block share their level: the seed."""
    low: float
    """No optimum below this log2 LR: the nearest one that was clearly worse, or the prior's reach."""
    high: float

    @property
    def rates(self) -> Array:
        return np.unique(self.log2_lr)


def mean_losses(log2_lr: Array, loss: Array, block: NDArray[np.int64]) -> Array:
    """Mean loss of each distinct learning rate, the blocks' levels taken out."""
    return additive_fit(log2_lr, loss, block)[0]


def additive_fit(log2_lr: Array, loss: Array, block: NDArray[np.int64]) -> tuple[Array, Array]:
    """Least squares of loss on learning rate plus block: means of the distinct LRs, levels of the blocks (sum 0)."""
    rates, blocks = np.unique(log2_lr), np.unique(block)
    design = (log2_lr[:, None] == rates).astype(float)
    if len(blocks) > 1:
        contrasts = (block[:, None] == blocks).astype(float)
        design = np.hstack([design, contrasts[:, 1:] - contrasts[:, :1]])
    solution = np.linalg.lstsq(design, loss, rcond=None)[0]
    levels = solution[len(rates) :]
    return np.asarray(solution[: len(rates)]), np.concatenate([[-levels.sum()], levels])


@dataclass(frozen=True)
class Reduced:
    """The cell at one noise value, with everything but the curve integrated out: quadratic form in the curve's values."""

    square: Array
    cross: Array
    total: float
    log_constant: float
    level_loss: float
    """Mean level of the blocks where the curve is 0 everywhere, nats."""
    level_curve: Array
    """What a unit of the curve at each learning rate takes off the level."""
    level_variance: float


@dataclass(frozen=True)
class Sums:
    """What the runs of a cell come down to: counts and sums for each learning rate (rows) and block (columns)."""

    counts: Array
    """Runs, shape (rates, blocks)."""
    by_rate: Array
    by_block: Array
    square: float
    """Sum of squared losses; all losses with their mean taken off, so that the sums do not cancel."""
    mean: float

    @classmethod
    def of(cls, data: CellData) -> Sums:
        rates = np.searchsorted(data.rates, data.log2_lr)
        blocks, block = np.unique(data.block, return_inverse=True)
        counts = np.zeros((len(data.rates), len(blocks)))
        np.add.at(counts, (rates, block), 1.0)
        loss = data.loss - data.loss.mean()
        by_rate, by_block = np.zeros(len(data.rates)), np.zeros(len(blocks))
        np.add.at(by_rate, rates, loss)
        np.add.at(by_block, block, loss)
        return cls(counts, by_rate, by_block, float(loss @ loss), float(data.loss.mean()))


def reduce_data(sums: Sums, sigma: float, rises: Array) -> Reduced:
    """Generalised least squares on the distinct learning rates; the blocks' levels are projected out.

    The covariance is sigma^2 on the diagonal plus, for runs of one learning rate, (DISCREPANCY * rise)^2: its inverse (Woodbury)
    and determinant need only the sums, so thousands of runs cost what a few do.
    """
    per_rate, per_block = sums.counts.sum(axis=1), sums.counts.sum(axis=0)
    variance, shared = sigma**2, (DISCREPANCY * rises) ** 2
    taken = shared / (variance + shared * per_rate)
    left = 1.0 - taken * per_rate
    rate_rate = np.diag(per_rate * left) / variance
    rate_block = left[:, None] * sums.counts / variance
    block_block = (np.diag(per_block) - sums.counts.T @ (taken[:, None] * sums.counts)) / variance
    rate_loss = left * sums.by_rate / variance
    block_loss = (sums.by_block - sums.counts.T @ (taken * sums.by_rate)) / variance
    total = (sums.square - float(taken @ sums.by_rate**2)) / variance
    to_curve, to_loss = np.linalg.solve(block_block, rate_block.T), np.linalg.solve(block_block, block_loss)
    log_determinant = (per_rate.sum() - len(per_rate)) * np.log(variance) + float(np.log(variance + shared * per_rate).sum())
    return Reduced(
        rate_rate - rate_block @ to_curve,
        rate_loss - rate_block @ to_loss,
        total - float(block_loss @ to_loss),
        -0.5 * (log_determinant + float(np.linalg.slogdet(block_block)[1])),
        float(to_loss.mean() + sums.mean),
        to_curve.mean(axis=0),
        float(np.linalg.inv(block_block).mean()),
    )


def sigma_grid(scale: float) -> Array:
    """Noise values (nats) that are weighed for losses of size `scale`."""
    return np.asarray(np.geomspace(SIGMA_RANGE[0], SIGMA_RANGE[1], SIGMA_STEPS) * max(abs(scale), 1e-9))


@dataclass(frozen=True)
class Rise:
    """What is known of k, the mean rise one octave off the optimum, beforehand: nats, normal."""

    mean: float
    precision: float
    """1 / variance; 0 when nothing is known."""


UNKNOWN_RISE = Rise(0.0, 0.0)


@dataclass(frozen=True)
class Likelihood:
    """Log likelihood of one cell on the grid (optimum, shape, noise); levels and k integrated out."""

    data: CellData
    optima: Array
    sigmas: Array
    table: Array
    """Shape (optima, shapes, sigmas)."""
    forms: tuple[Reduced, ...]
    """One for each noise value."""
    block_levels: Array
    """Levels of the blocks (seeds) about their mean, nats."""
    curves: Array = field(repr=False)
    """Every shape at every optimum, in units of k at the learning rates; shape (optima x shapes, rates)."""
    rise: Rise = UNKNOWN_RISE

    def under(self, rise: Rise) -> Likelihood:
        """The same runs, with something known of k beforehand."""
        return replace(self, table=_log_table(self.curves, self.forms, rise).reshape(self.table.shape), rise=rise)

    def posterior(self, log_prior_sigma: Array, log_shape: Array | None = None) -> Array:
        """Density over the grid, sum 1, under `log_shape` or the library's prior weights."""
        shapes = library()[1] if log_shape is None else log_shape
        return normalised(self.table + shapes[:, None] + log_prior_sigma)

    def shapes(self, log_prior_sigma: Array) -> Array:
        """Likelihood of each shape, largest 1; optimum and noise integrated out."""
        density = np.exp(self.table + log_prior_sigma - (self.table + log_prior_sigma).max()).sum(axis=(0, 2))
        return np.asarray(density / density.max())


SURE = 8.0
"""Standard deviations from which a rise is above 0 for certain: log Phi(8) is -6e-16."""


def likelihood(data: CellData, sigmas: Array, rise: Rise = UNKNOWN_RISE) -> Likelihood:
    """Evaluate the grid; some ten milliseconds."""
    optima = _optima(data)
    u = data.rates - optima[:, None]
    curves = np.stack([shape(u) for shape in library()[0]], axis=1).reshape(-1, len(data.rates))
    means, levels = additive_fit(data.log2_lr, data.loss, data.block)
    sums = Sums.of(data)
    forms = tuple(reduce_data(sums, float(sigma), means - means.min()) for sigma in sigmas)
    table = _log_table(curves, forms, rise).reshape(len(optima), -1, len(sigmas))
    return Likelihood(data, optima, sigmas, table, forms, levels, curves, rise)


def _log_table(curves: Array, forms: Sequence[Reduced], rise: Rise) -> Array:
    """Log likelihood of every curve (rows) at every noise (columns), k integrated out over k > 0."""
    from scipy.special import log_ndtr

    # One product for all noise values: a quadratic form is linear in the products of the curve's values.
    first, second = np.triu_indices(curves.shape[1])
    factor = np.where(first == second, 1.0, 2.0)[:, None]
    square = (curves[:, first] * curves[:, second]) @ (factor * np.stack([form.square[first, second] for form in forms], axis=1))
    square = np.maximum(square + rise.precision, 1e-300)
    gain = curves @ np.stack([form.cross for form in forms], axis=1) + rise.precision * rise.mean
    gain /= np.sqrt(square)
    constant = np.array([form.log_constant - 0.5 * form.total for form in forms])
    table = constant + 0.5 * gain**2 - 0.5 * np.log(square)
    near = gain < SURE
    table[near] += log_ndtr(gain[near])
    return np.asarray(table)


def _optima(data: CellData) -> Array:
    """Midpoints of an even grid over the allowed range, fine against the spacing of the learning rates."""
    span = data.high - data.low
    count = int(np.clip(np.ceil(span / (0.03 * float(np.diff(data.rates).min()))), 60, 300))
    return np.asarray(data.low + (np.arange(count) + 0.5) * span / count)


def normalised(log_density: Array) -> Array:
    """exp of `log_density`, scaled to sum 1."""
    density = np.exp(log_density - log_density.max())
    return np.asarray(density / density.sum())
