"""The best learning rate and batch of one size, from its runs alone: interior and curved, or censored; never extrapolated.

Owns `CellOptimum` and `cell_optimum`. A polynomial (quadratic, cubic where the runs allow) of log knobs is fitted to the runs
within a window of the best; its minimum counts only where the curvature is positive in all directions and the minimum lies
within the fitted runs. Intervals resample the residuals. Knobs are printed plain, computed as natural logs; losses are nats per
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.batch_table import GridCell
from analysis.fit_result import Estimate
from analysis.law import Array
from analysis.lr_batch_score import inside_hull
from analysis.lr_batch_surface import cubes

LEAST = {1: 5, 2: 9}
"""Runs in the window for a quadratic, by the number of knobs (reference practice: 5 in one, 9 in two dimensions)."""
CUBIC = {1: 7, 2: 16}
"""Runs in the window for cubic terms too."""
DRAWS, ENOUGH = 200, 0.95
"""Resamples, and the share that must have a minimum: otherwise the noise decides whether there is one, and the interval is
unknown.
"""
NEWTON = 30


@dataclass(frozen=True, eq=False)
class CellOptimum:
    """One size. knobs: {knob: estimate}, a censored one the edge that it lies at or beyond; censored: {knob: "low", "high" or
    "unresolved"}.

    best_loss: of the best run, nats; near: runs in the window; runs, diverged: all of them; reason: why no minimum was taken.
    """

    sizes: Mapping[str, float]
    name: str
    knobs: Mapping[str, Estimate]
    censored: Mapping[str, str]
    best_loss: float
    near: int
    runs: int
    diverged: int
    reason: str
    line: Mapping[str, tuple[Array, Array]] = field(default_factory=dict, repr=False)
    """{knob: (its values, fitted loss with the other knob at its optimum)}, within the fitted runs."""

    @property
    def usable(self) -> bool:
        return not self.censored

    def cells(self) -> list[str]:
        """For a table: each knob with its sign of censoring and its interval."""
        shown = []
        for knob, item in self.knobs.items():
            sign = {"low": "<= ", "high": ">= ", "unresolved": "~ "}.get(self.censored.get(knob, ""), "")
            shown += [f"{sign}{item.value:.4g}", item.cells()[2] if not sign else ""]
        return shown

    def to_dict(self) -> dict[str, Any]:
        knobs = {knob: {**item.to_dict(), "censored": self.censored.get(knob)} for knob, item in self.knobs.items()}
        counts = {"runs": self.runs, "near": self.near, "diverged": self.diverged}
        return {**self.sizes, "knobs": knobs, "best_loss": self.best_loss, **counts, "reason": self.reason}


def _terms(away: Array, cubic: bool) -> Array:
    """Design (n, p): one, linear, quadratic, cubic."""
    k = away.shape[1]
    squares = [away[:, i] * away[:, j] for i in range(k) for j in range(i + 1)]
    parts = [np.ones(len(away)), *away.T, *squares]
    design = np.stack(parts, axis=1)
    return np.concatenate([design, cubes(away)], axis=1) if cubic else design


def _derivatives(theta: Array, at: Array, cubic: bool) -> tuple[Array, Array]:
    """Gradient (B, k) and Hessian (B, k, k) of polynomials theta (B, p) at points (B, k), by central differences of fourth and
    second order, which are exact for cubics but for rounding.
    """
    k, step = at.shape[1], 1e-3

    def value(shift: Array) -> Array:
        return np.asarray(np.sum(theta * _terms(at + shift, cubic), axis=1))

    unit = np.eye(k) * step
    gradient = np.stack(
        [(8 * (value(unit[i]) - value(-unit[i])) - value(2 * unit[i]) + value(-2 * unit[i])) / (12 * step) for i in range(k)],
        axis=1,
    )
    hessian = np.empty((len(at), k, k))
    for i in range(k):
        for j in range(k):
            both = value(unit[i] + unit[j]) - value(unit[i] - unit[j]) - value(unit[j] - unit[i]) + value(-unit[i] - unit[j])
            hessian[:, i, j] = both / (4 * step**2)
    return gradient, hessian


def _minima(theta: Array, start: Array, cubic: bool, reach: float) -> tuple[Array, Array]:
    """Minima (B, k) of polynomials by Newton's method from `start`, and which are minima at all (B,)."""
    at = np.repeat(start[None], len(theta), axis=0)
    for _ in range(NEWTON):
        gradient, hessian = _derivatives(theta, at, cubic)
        values, vectors = np.linalg.eigh(hessian)
        # Away from a minimum: the same direction downhill, by the absolute curvature.
        bent = np.maximum(np.abs(values), 1e-6)
        step = -np.einsum("bij,bj->bi", vectors, np.einsum("bji,bj->bi", vectors, gradient) / bent)
        moved = np.clip(at + np.clip(step, -0.5, 0.5), -reach, reach)
        at, change = moved, np.abs(moved - at).max()
        if change < 1e-10:
            break
    gradient, hessian = _derivatives(theta, at, cubic)
    good = (np.linalg.eigvalsh(hessian).min(axis=1) > 0) & (np.abs(gradient).max(axis=1) < 1e-6)
    return at, good


def cell_optimum(cell: GridCell, window: float, level: float) -> CellOptimum:
    """Fit the bottom of one cell. window: rise over the best run, as a share of it; level: of the intervals."""
    near = cell.rise <= window
    k, count = len(cell.knobs), int(near.sum())
    edges = cell.edges()
    if edges:
        words = ", ".join(f"{knob} at its {'lowest' if end == 'low' else 'highest'}" for knob, end in edges.items())
        return _censored(cell, edges, count, f"the best run lies at an edge ({words}): sample beyond it")
    if count < LEAST[k]:
        return _censored(
            cell,
            dict.fromkeys(cell.knobs, "unresolved"),
            count,
            f"{count} runs within {100 * window:g} % of the best, {LEAST[k]} are needed",
        )
    cubic = count >= CUBIC[k]
    away, rise = cell.logs[near] - cell.best, cell.rise[near]
    design = _terms(away, cubic)
    inverse = np.asarray(np.linalg.pinv(design), dtype=np.float64)
    theta = np.asarray(inverse @ rise, dtype=np.float64)
    reach = float(np.abs(away).max())
    at, good = _minima(theta[None], np.zeros(k), cubic, reach)
    if not good[0] or not inside_hull(away, at[0]):
        what = "has no minimum" if not good[0] else "has its minimum outside of the runs"
        return _censored(cell, dict.fromkeys(cell.knobs, "unresolved"), count, f"the curve through the runs near the best {what}")
    draws = _draws(design, inverse, theta, rise, at[0], cubic, reach)
    knobs = {}
    for index, knob in enumerate(cell.knobs):
        middle = cell.best[index] + at[0, index]
        known = len(draws) >= ENOUGH * DRAWS
        low, high = np.quantile(draws[:, index], [(1 - level) / 2, (1 + level) / 2]) if known else (np.nan, np.nan)
        ends = (float(np.exp(cell.best[index] + low)), float(np.exp(cell.best[index] + high)))
        knobs[knob] = Estimate(
            float(np.exp(middle)), float(np.exp(middle) * draws[:, index].std(ddof=1)) if known else np.nan, ends
        )
    lines = {knob: _line(cell, theta, at[0], away, index, cubic) for index, knob in enumerate(cell.knobs)}
    return CellOptimum(cell.sizes, cell.name, knobs, {}, float(cell.loss.min()), count, len(cell.loss), len(cell.lost), "", lines)


def _draws(design: Array, inverse: Array, theta: Array, rise: Array, at: Array, cubic: bool, reach: float) -> Array:
    """Minima of refits to resampled residuals; refits without one are left out."""
    freedom = len(rise) - design.shape[1]
    if freedom < 1:
        return np.empty((0, design.shape[1]))
    residual = (rise - design @ theta) * np.sqrt(len(rise) / freedom)
    picks = np.random.default_rng(0).integers(len(rise), size=(DRAWS, len(rise)))
    refitted = theta + (residual - residual.mean())[picks] @ inverse.T
    found, good = _minima(refitted, at, cubic, reach)
    return np.asarray(found[good])


def _line(cell: GridCell, theta: Array, at: Array, away: Array, index: int, cubic: bool) -> tuple[Array, Array]:
    grid = np.linspace(away[:, index].min(), away[:, index].max(), 200)
    places = np.repeat(at[None], len(grid), axis=0)
    places[:, index] = grid
    return np.exp(cell.best[index] + grid), cell.loss.min() * (1 + _terms(places, cubic) @ theta)


def _censored(cell: GridCell, censored: Mapping[str, str], near: int, reason: str) -> CellOptimum:
    """The best run, as a bound where it lies at an edge; without an interval."""
    knobs = {}
    for index, knob in enumerate(cell.knobs):
        value = float(np.exp(cell.best[index]))
        ends = {"low": (0.0, value), "high": (value, np.inf)}.get(censored.get(knob, ""), (np.nan, np.nan))
        knobs[knob] = Estimate(value, np.nan, ends)
    whole = {knob: censored.get(knob, "unresolved") for knob in cell.knobs}
    return CellOptimum(cell.sizes, cell.name, knobs, whole, float(cell.loss.min()), near, len(cell.loss), len(cell.lost), reason)
