"""The noise of one run: how much of it is known, and from where.

Owns NoiseEstimate and its pooling over cells. Noise is the standard deviation, in nats, of one run's loss about the curve of
its cell after the seed's own level is taken out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.posterior import Likelihood
from analysis.shapes import Array

TYPICAL = 0.005
"""Centre of the weak prior, relative to the loss; one standard deviation is a factor of 2.5."""
TYPICAL_LOG_SD = 0.9
CELL_SPREADS = (0.15, 0.4, 0.9)
"""Standard deviations of log noise between cells that are weighed; seeds of real runs differ by 10x between sizes at worst."""


@dataclass(frozen=True)
class NoiseEstimate:
    """Standard deviation of a run's loss in nats, worth `df` degrees of freedom of a scaled inverse chi-square."""

    sd: float
    df: float
    source: str
    """In words: what it was pooled from."""

    def log_prior(self, sigmas: Array) -> Array:
        """Log density on a grid even in log sigma, up to a constant."""
        return np.asarray(-self.df * np.log(sigmas) - 0.5 * self.df * (self.sd / sigmas) ** 2)

    def __str__(self) -> str:
        return f"{self.sd:.2g} nats ({self.df:.1f} degrees of freedom, {self.source})"


def weak_prior(sigmas: Array, scale: float) -> Array:
    """Log density on the grid when nothing else is known."""
    return np.asarray(-0.5 * ((np.log(sigmas) - math.log(TYPICAL * max(abs(scale), 1e-9))) / TYPICAL_LOG_SD) ** 2)


def evidence(cell: Likelihood) -> Array:
    """What one cell says about its own noise: likelihood on its sigma grid, largest value 1."""
    density = cell.posterior(np.zeros(len(cell.sigmas))).sum(axis=(0, 1))
    return np.asarray(density / density.max())


def pool(cells: Sequence[Array], sigmas: Array, scale: float) -> tuple[list[Array], Array]:
    """Pool the evidence of cells, which may differ by an unknown factor.

    Returns for every cell the density of its noise predicted from all other cells, and the density of the common noise.
    """
    log_sigma = np.log(sigmas)
    prior = np.exp(weak_prior(sigmas, scale))
    predicted = [np.zeros(len(sigmas)) for _ in cells]
    common = np.zeros(len(sigmas))
    for spread in CELL_SPREADS:
        kernel = np.exp(-0.5 * ((log_sigma[:, None] - log_sigma) / spread) ** 2)
        kernel /= kernel.sum(axis=1, keepdims=True)
        messages = np.array([kernel @ cell for cell in cells])
        common += prior * np.exp(np.log(messages).sum(axis=0))
        for index in range(len(cells)):
            others = prior * np.exp(np.log(np.delete(messages, index, axis=0)).sum(axis=0))
            predicted[index] += others @ kernel
    return [density / density.sum() for density in predicted], common / common.sum()


def summarise(density: Array, sigmas: Array, source: str) -> NoiseEstimate:
    """The scaled inverse chi-square with the mean and variance of log sigma that `density` has."""
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    log_sigma = np.log(sigmas)
    mean = float(density @ log_sigma)
    variance = max(float(density @ (log_sigma - mean) ** 2), 1e-4)
    df = float(brentq(lambda nu: polygamma(1, nu / 2) / 4 - variance, 0.05, 1e5))
    sd = math.exp(mean + 0.5 * (float(digamma(df / 2)) + math.log(2.0 / df)))
    return NoiseEstimate(sd, df, source)
