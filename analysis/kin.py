"""What the cells of one parametrization say of each other's curves: their shape and how steep they are, never where their optimum is.

Owns the two priors. Cells of several sizes have curves that are mostly alike: a small model, which costs little, can be asked how a
curve looks, so that a large one is only asked where its bottom is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.posterior import UNKNOWN_RISE, Rise
from analysis.shapes import Array, kinship, library

RISE_SPREAD = 0.35
"""Standard deviation of k between cells, relative to k."""


def shapes_of(likelihoods: Sequence[Array]) -> Array:
    """Log prior weights of a cell's shapes, from the likelihoods of shapes of the other cells."""
    typical = library()[1].copy()
    for item in likelihoods:
        typical += np.log(kinship() @ item + 1e-300)
    weights = np.exp(typical - typical.max())
    return np.asarray(np.log(weights / weights.sum() @ kinship() + 1e-300))


def rise_of(scales: Sequence[Array]) -> Rise:
    """Prior on k, the mean rise one octave off the optimum, from draws of the k of other cells; unknown without one."""
    if not scales:
        return UNKNOWN_RISE
    middles = np.array([float(np.median(scale)) for scale in scales])
    weights = 1 / np.array(
        [float(scale.var()) + (RISE_SPREAD * middle) ** 2 for scale, middle in zip(scales, middles, strict=True)]
    )
    mean = float(weights @ middles / weights.sum())
    return Rise(mean, 1 / (1 / float(weights.sum()) + (RISE_SPREAD * mean) ** 2))
