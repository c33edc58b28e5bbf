"""Minimizes a robust sum of residuals for many starts, refits or profile points at once, in plain numpy.

Owns `Loss` (what is summed) and `minimise` (a batched, damped Gauss-Newton method with box bounds). Each member of a batch has its own
damping and its own stop, which asks for a gradient that is small against the curvature and the objective, so that a factor on the
objective (mean instead of sum) changes nothing. Residuals are log(law) - log(loss), or law - loss in raw space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.laws import Array, Inputs, Law

LOSSES = ("huber-log", "l1-log", "least-squares-log", "least-squares", "huber")
TIGHT, CONVERGED = 1e-9, 1e-6
"""Largest gradient, over sqrt(curvature x objective): where a member stops, and what still counts as a minimum (rounding)."""
L1_KNEES = (1e-3, 1e-4, 1e-5, 1e-6)
"""L1 is the limit of Huber's loss: knees in log loss that are gone through, the last one far below any table's resolution."""
BLOCK = 16384
"""Rows times members that are computed at once: the arrays of more do not stay in a core's cache."""
Index = NDArray[np.intp]
Penalty = Callable[[Array], tuple[Array, Array]]
"""theta (S, p) -> one more residual (S,) and its gradient (S, p)."""


@dataclass(frozen=True)
class Loss:
    """What is summed over the rows. delta: where Huber's square turns into a line, in units of the residual (log loss, or loss)."""

    kind: str
    delta: float

    @property
    def path(self) -> tuple[Loss, ...]:
        """Losses to minimize one after the other, each from the last one's minimum."""
        return tuple(Loss("huber-log", knee) for knee in L1_KNEES) if self.kind == "l1-log" else (self,)

    @property
    def in_logs(self) -> bool:
        return self.kind.endswith("-log")

    @property
    def knee(self) -> float:
        return np.inf if self.kind.startswith("least") else self.delta

    def rho(self, residual: Array) -> Array:
        """0.5 r^2 up to the knee, then a line."""
        size = np.abs(residual)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(size <= self.knee, 0.5 * residual**2, self.knee * (size - 0.5 * self.knee))

    def residual(self, predicted: Array, observed: Array) -> Array:
        if self.in_logs:
            return np.asarray(np.log(np.maximum(predicted, 1e-300)) - np.log(observed))
        return np.asarray(predicted - observed)


@dataclass(frozen=True)
class Minima:
    """theta (S, p), objective (S,), whether each stopped at a minimum (S,), gradient norm at the end, scale-free (S,)."""

    theta: Array
    objective: Array
    converged: NDArray[np.bool_]
    gradient: Array


class _Problem:
    """Rows, weights and loss of a batch; evaluates objective, gradient and the two halves of the curvature."""

    def __init__(self, law: Law, x: Inputs, observed: Array, weights: Array, loss: Loss, penalty: Penalty | None) -> None:
        self.law, self.x, self.loss, self.penalty = law, x, loss, penalty
        self.observed, self.weights = np.atleast_2d(observed), np.atleast_2d(weights)

    def rows(self, values: Array, chosen: Index) -> Array:
        return values if len(values) == 1 else values[chosen]

    def __call__(self, theta: Array, chosen: Index) -> tuple[Array, Array, Array, Array]:
        """Objective (S,), gradient (S, p), curvature inside the knee and beyond it (S, p, p) each."""
        block = max(1, BLOCK // self.observed.shape[1])
        pieces = [slice(first, first + block) for first in range(0, len(theta), block)]
        parts = [self._block(theta[piece], chosen[piece]) for piece in pieces]
        if len(parts) == 1:
            objective, gradient, full, inner = parts[0]
        else:
            objective, gradient, full, inner = (np.concatenate(part) for part in zip(*parts, strict=True))
        if self.penalty is not None:
            extra, slope = self.penalty(theta)
            square = slope[:, :, None] * slope[:, None, :]
            objective, gradient = objective + 0.5 * extra**2, gradient + extra[:, None] * slope
            full, inner = full + square, inner + square
        return objective, gradient, inner, full - inner

    def _block(self, theta: Array, chosen: Index) -> tuple[Array, Array, Array, Array]:
        """Objective, gradient and curvature, all of it and inside the knee, of few enough members to stay in the cache."""
        predicted, jacobian = self.law.value(theta, self.x)
        weights = self.rows(self.weights, chosen)
        residual = self.loss.residual(predicted, self.rows(self.observed, chosen))
        size, knee = np.abs(residual), self.loss.knee
        objective = np.sum(weights * self.loss.rho(residual), axis=1)
        # The residual's gradient is the law's over its value, in logs: cheaper to divide the rows' weights than the gradient.
        slope = weights / np.maximum(predicted, 1e-300) if self.loss.in_logs else weights
        square = slope / np.maximum(predicted, 1e-300) if self.loss.in_logs else weights
        turned = np.swapaxes(jacobian, 1, 2)
        if not np.isfinite(knee):
            full = (turned * square[:, None, :]) @ jacobian
            return objective, (turned @ (slope * residual)[:, :, None])[:, :, 0], full, full
        gradient = (turned @ (slope * np.clip(residual, -knee, knee))[:, :, None])[:, :, 0]
        full = (turned * (square * np.minimum(1.0, knee / np.maximum(size, 1e-300)))[:, None, :]) @ jacobian
        return objective, gradient, full, (turned * (square * (size <= knee))[:, None, :]) @ jacobian


def minimise(
    law: Law,
    x: Inputs,
    observed: Array,
    weights: Array,
    start: Array,
    loss: Loss,
    bounds: tuple[Array, Array],
    penalty: Callable[[Index], Penalty] | None = None,
    iterations: int = 200,
) -> Minima:
    """Minimize for every row of `start` (S, p).

    observed, weights: (n,) or one row for each member (S, n). penalty: given the members still moving (indices), one more residual
    for each. The rows beyond the knee enter the curvature with a factor that fades from 1 (reweighting: slow, sure) towards 0
    (Newton: fast near the minimum) as steps succeed.
    """
    low, high = bounds
    theta = np.clip(start.astype(np.float64), low, high)
    count, p = theta.shape
    moving = np.arange(count)
    problem = _Problem(law, x, observed, weights, loss, penalty(moving) if penalty else None)
    objective, gradient, inner, outer = (np.array(part) for part in problem(theta, moving))
    damping, fade = np.full(count, 1e-3), np.ones(count)
    norm, done, stuck = np.full(count, np.inf), np.zeros(count, dtype=bool), np.zeros(count, dtype=int)
    for _ in range(iterations):
        at = theta[moving]
        free = ~(((at <= low) & (gradient[moving] > 0)) | ((at >= high) & (gradient[moving] < 0)))
        flat = np.where(free, gradient[moving], 0.0)
        whole = np.einsum("sii->si", inner[moving] + outer[moving])
        scale = np.sqrt(np.maximum(whole * objective[moving, None], 1e-300))
        norm[moving] = np.max(np.abs(flat) / scale, axis=1)
        done[moving] = (norm[moving] < TIGHT) | (objective[moving] < 1e-26)
        keep = ~done[moving] & (stuck[moving] < 40)
        moving, free, flat, whole = moving[keep], free[keep], flat[keep], whole[keep]
        if not len(moving):
            break
        curvature = inner[moving] + fade[moving, None, None] * outer[moving]
        pinned = ~free
        curvature = np.where(pinned[:, :, None] | pinned[:, None, :], 0.0, curvature)
        ridge = damping[moving, None] * whole + pinned * 1.0 + 1e-14 * whole.max(axis=1, keepdims=True)
        curvature[:, np.arange(p), np.arange(p)] += ridge
        step = -np.linalg.solve(curvature, flat[:, :, None])[:, :, 0]
        trial = np.clip(theta[moving] + np.clip(step, -3.0, 3.0), low, high)
        if penalty:
            problem.penalty = penalty(moving)
        new = problem(trial, moving)
        better = new[0] < objective[moving]
        won = moving[better]
        theta[won] = trial[better]
        for target, part in zip((objective, gradient, inner, outer), new, strict=True):
            target[won] = part[better]
        lost = moving[~better]
        stuck[won], stuck[lost] = 0, stuck[lost] + 1
        damping[won], fade[won] = np.maximum(damping[won] * 0.2, 1e-12), fade[won] * 0.3
        at_full = fade[lost] >= 1
        damping[lost] = np.where(at_full, damping[lost] * 5, damping[lost] * 1.5)
        fade[lost] = np.minimum(np.maximum(fade[lost] * 5, 1e-3), 1.0)
    return Minima(theta, objective, (norm < CONVERGED) | (objective < 1e-26), norm)
