"""The search for a law's minimum on a table: variable projection to start, many starts, one batched descent, and an account of it.

Owns `search_minimum`, which knows nothing of intervals or guards: `fit` and the roll-out both call it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.fit_engine import LOSSES, Loss, minimise
from analysis.fit_table import FitTable
from analysis.laws import LAWS, Array, Inputs, Law
from analysis.table import nearest
from scaling.errors import DataError, Fault

DELTA = 1e-3
"""Huber's knee in log loss, Hoffmann et al. 2022."""
STARTS = 32
OTHER_LAWS = ("critical-batch", "lr-batch", "multi-power")
"""Laws of something else than the final loss of a run: analysis.other_laws."""
SAME = 1e-6
"""Starts whose objective lies within this share of the lowest one have reached the optimum."""


@dataclass(frozen=True)
class Starts:
    """The search: how many starts, how many ended at the optimum, the objectives' spread (largest over smallest)."""

    total: int
    at_optimum: int
    spread: float


def checked_law(law: str | Law) -> Law:
    if isinstance(law, Law):
        return law
    if law not in LAWS:
        known = ("auto", *LAWS, *OTHER_LAWS)
        raise DataError(Fault(f"law {law!r}", "is not known", nearest(law, known)))
    return LAWS[law]


def checked_loss(loss: str, delta: float) -> Loss:
    if loss not in LOSSES:
        raise DataError(Fault(f"loss {loss!r}", "is not known", f"choose from: {', '.join(LOSSES)}"))
    if not (delta > 0 and np.isfinite(delta)):
        raise DataError(Fault(f"delta {delta:g}", "is not positive", f"for example {DELTA:g}"))
    return Loss(loss, delta)


@dataclass(frozen=True, eq=False)
class Search:
    """The lowest minimum found: theta (p,), the starts' account, whether it is a minimum, whether any start moved."""

    theta: Array
    starts: Starts
    success: bool
    moved: bool


def search_minimum(law: Law, table: FitTable, loss: Loss, starts: int = STARTS, more: Array | None = None) -> Search:
    """Variable projection over a grid of exponents, then a descent from the best points and from ones spread over the rest.

    more: further starts (k, p). Raises DataError where the table has fewer rows than the law has parameters.
    """
    x = Inputs.of({name: table.columns[name] for name in law.columns})
    count = len(law.parameters)
    if len(table) < count:
        raise DataError(
            Fault(f"law {law.name}", f"has {count} parameters, and the table {len(table)} usable rows", "; ".join(table.notes))
        )
    weights = unit_weights(table)
    seeds = _seeds(law, x, table.loss, weights)
    predicted = law.value(seeds, x)[0]
    order = np.argsort(np.sum(weights * loss.rho(loss.residual(predicted, table.loss)), axis=1))
    half = min(starts // 2, len(order))
    spread = np.linspace(half, len(order) - 1, min(starts - half, len(order) - half)).astype(int)
    theta = seeds[np.concatenate([order[:half], order[np.unique(spread)]])]
    theta = theta if more is None else np.concatenate([theta, more])
    began, bounds = theta, law.bounds(float(table.loss.min()), x)
    for step in loss.path:
        minima = minimise(law, x, table.loss, weights, theta, step, bounds)
        theta = minima.theta
    best = int(np.argmin(np.where(np.isfinite(minima.objective), minima.objective, np.inf)))
    lowest = float(minima.objective[best])
    reached = int((minima.objective <= lowest * (1 + SAME) + 1e-20).sum())
    account = Starts(len(theta), reached, float(np.nanmax(minima.objective) / max(lowest, 1e-300)))
    moved = bool(np.abs(theta[best] - np.clip(began[best], *bounds)).max() > 0) or bool(minima.converged[best])
    return Search(theta[best], account, bool(minima.converged[best]), moved)


def unit_weights(table: FitTable) -> Array:
    """Weights of mean 1, so that the noise is that of a row of average weight."""
    return np.ones(len(table)) if table.weights is None else np.asarray(table.weights / table.weights.mean())


def _seeds(law: Law, x: Inputs, losses: Array, weights: Array) -> Array:
    """Starts (G, p): for each point of the grid the non-negative levels that fit best, relative to the loss."""
    from scipy.optimize import nnls

    found = []
    for shape in law.shapes(x):
        target = law.target(shape, losses)
        row = np.sqrt(weights) / target
        levels, _ = nnls(law.design(shape, x) * row[:, None], target * row)
        found.append(law.assemble(shape, levels, float(losses.min())))
    return np.array(found)
