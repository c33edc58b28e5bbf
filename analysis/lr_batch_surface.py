"""The loss near the best learning rate and batch: one curvature for all sizes, an optimum that follows a power law of size.

Owns the joint model, rise = level of the cell + q(log knobs - log optimum(size)), with q a positive definite quadratic plus
cubic terms (loss rises faster above the best LR than below it), its least-squares fit, and what is read off it: plateaus and
the ridge between LR and batch. Knobs are lr and batch_tokens, or one of them, as natural logs; the rise is a share of the best
run's loss. Cells whose best run lies at an edge enter as inequalities alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from analysis.batch_table import GridCell
from analysis.law import Array

Index = NDArray[np.intp]
START_FACTORS = (0.5, 1.0, 2.0)
"""Curvatures to start from, over the one that the window's width suggests."""
INSIDE = 0.9
"""Share of the cells whose optimum must lie among their runs for a fit to count."""
SAME = 1e-5
"""Starts whose sum of squares lies within this share of the lowest one have reached the optimum."""
GRID = 2001


@dataclass(frozen=True, eq=False)
class Rows:
    """Runs near the bottom of their cells. place (n, k): logs of knobs; rise (n,); cell (n,): which; sizes (c, r): centred logs
    of the sizes of every cell; bounds: (cell, knob, edge, sign) of censored optima, sign +1 for "at least".
    """

    place: Array
    rise: Array
    cell: Index
    sizes: Array
    bounds: tuple[tuple[int, int, float, int], ...] = ()

    @property
    def knobs(self) -> int:
        return int(self.place.shape[1])


@dataclass(frozen=True, eq=False)
class Surface:
    """The model's numbers. centre (k,): log optimum at the mean size; slopes (k, r): exponents; root (k, k): lower Cholesky
    factor of the curvature; cubic: of the monomials in `cubes`; noise: scatter of a run about it, as a share of the loss.
    """

    centre: Array
    slopes: Array
    root: Array
    cubic: Array
    noise: float

    def optimum(self, sizes: Array) -> Array:
        """Log knobs (c, k) at centred log sizes (c, r)."""
        return np.asarray(self.centre + sizes @ self.slopes.T)

    def rise(self, away: Array) -> Array:
        """q (n,) at log distances from the optimum (n, k), as a share of the loss."""
        return np.asarray(0.5 * np.sum((away @ self.root) ** 2, axis=1) + cubes(away) @ self.cubic)

    @property
    def ridge(self) -> float:
        """d log best lr / d log batch; NaN with one knob."""
        if len(self.centre) < 2:
            return float("nan")
        curvature = self.root @ self.root.T
        return float(-curvature[0, 1] / curvature[0, 0])

    def plateau(self, knob: int, share: float, reach: float) -> tuple[float, float]:
        """Log distances below and above the optimum, the other knob at its own, within which the loss rises by less than
        `share`; infinite where it does not rise by as much within `reach`.
        """
        ends = []
        for sign in (-1.0, 1.0):
            away = np.zeros((GRID, len(self.centre)))
            away[:, knob] = sign * np.linspace(0, reach, GRID)
            above = np.flatnonzero(self.rise(away) > share)
            ends.append(float(abs(away[above[0], knob])) if len(above) else np.inf)
        return ends[0], ends[1]

    def best_given(self, away_batch: float, reach: float) -> float:
        """Log distance of the best lr from the optimal one where the batch lies `away_batch` from its own, within `reach`."""
        grid = np.linspace(-reach, reach, GRID)
        return float(grid[int(self.rise(np.stack([grid, np.full(GRID, away_batch)], axis=1)).argmin())])


def cubes(away: Array) -> Array:
    """Cubic monomials (n, m): u^3, and with two knobs u^2 v, u v^2, v^3."""
    if away.shape[1] == 1:
        return np.asarray(away**3)
    u, v = away[:, 0], away[:, 1]
    return np.stack([u**3, u**2 * v, u * v**2, v**3], axis=1)


def _cube_slopes(away: Array) -> Array:
    """d cubes / d away (n, m, k)."""
    if away.shape[1] == 1:
        return np.asarray(3 * away**2)[:, :, None]
    u, v = away[:, 0], away[:, 1]
    zero = np.zeros_like(u)
    by_u = np.stack([3 * u**2, 2 * u * v, v**2, zero], axis=1)
    by_v = np.stack([zero, u**2, 2 * u * v, 3 * v**2], axis=1)
    return np.stack([by_u, by_v], axis=2)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Residuals and their gradient for one set of cell weights (c,); masks (k, r) say which exponents are free."""

    rows: Rows
    free: NDArray[np.bool_]
    weights: Array
    strength: float
    """Weight of a censored cell's log gap: the noise of a run over the resolution of its grid."""

    def unpack(self, theta: Array) -> Surface:
        k = self.rows.knobs
        slopes = np.zeros(self.free.shape)
        count = int(self.free.sum())
        slopes[self.free] = theta[k : k + count]
        root, at = np.zeros((k, k)), k + count
        for i in range(k):
            for j in range(i + 1):
                root[i, j] = np.exp(np.clip(theta[at], -30, 10)) if i == j else theta[at]
                at += 1
        return Surface(theta[:k], slopes, root, theta[at:], 0.0)

    def __call__(self, theta: Array) -> tuple[Array, Array]:
        rows, surface, k = self.rows, self.unpack(theta), self.rows.knobs
        sizes = rows.sizes[rows.cell]
        away = rows.place - surface.optimum(sizes)
        bent = away @ surface.root
        monomials = cubes(away)
        slope = bent @ surface.root.T + np.einsum("nmk,m->nk", _cube_slopes(away), surface.cubic)
        parts = [-slope]
        parts += [-slope[:, [i]] * sizes[:, [j]] for i, j in zip(*np.nonzero(self.free), strict=True)]
        for i in range(k):
            for j in range(i + 1):
                parts.append((bent[:, j] * away[:, i] * (surface.root[i, i] if i == j else 1.0))[:, None])
        model = np.concatenate([(0.5 * np.sum(bent**2, axis=1) + monomials @ surface.cubic)[:, None], *parts, monomials], axis=1)
        # The level of each cell is projected out: residuals and gradient about the cell's mean.
        model[:, 0] -= rows.rise
        counts = np.bincount(rows.cell, minlength=len(rows.sizes))
        means = (
            np.stack([np.bincount(rows.cell, column, minlength=len(rows.sizes)) for column in model.T], axis=1)
            / np.maximum(counts, 1)[:, None]
        )
        model = (model - means[rows.cell]) * np.sqrt(self.weights[rows.cell])[:, None]
        extra = np.zeros((len(rows.bounds), model.shape[1]))
        for index, (cell, knob, edge, sign) in enumerate(rows.bounds):
            gap = sign * (edge - surface.optimum(rows.sizes[[cell]])[0, knob])
            if gap > 0 and self.strength > 0:
                scale = self.strength * np.sqrt(self.weights[cell])
                extra[index, 0] = scale * gap
                extra[index, 1 + knob] = -scale * sign
                for at, (i, j) in enumerate(zip(*np.nonzero(self.free), strict=True)):
                    if i == knob:
                        extra[index, 1 + k + at] = -scale * sign * rows.sizes[cell, j]
        model = np.concatenate([model, extra])
        return model[:, 0], model[:, 1:]

    @property
    def cubic_terms(self) -> int:
        return 1 if self.rows.knobs == 1 else 4

    def solve(self, theta: Array, cubic: bool = True) -> tuple[Array, float, bool]:
        """theta, half the sum of squares, whether it converged; cubic=False holds the cubic terms. Rises count in thousandths."""
        count = len(theta) - (0 if cubic else self.cubic_terms)
        held = theta[count:]

        def residuals(at: Array) -> Array:
            return np.asarray(1e3 * self(np.concatenate([at, held]))[0])

        def slopes(at: Array) -> Array:
            return np.asarray(1e3 * self(np.concatenate([at, held]))[1][:, :count])

        with np.errstate(over="ignore", invalid="ignore"):
            found = least_squares(residuals, theta[:count], slopes, method="trf", x_scale="jac", max_nfev=200)
        return np.concatenate([found.x, held]), float(found.cost), bool(found.success)

    def inside(self, theta: Array, reach: float) -> float:
        """Share of the fitted cells whose optimum lies among their runs, or within `reach` (log) of them."""
        places, optima = self.rows.place, self.unpack(theta).optimum(self.rows.sizes)
        cells = np.unique(self.rows.cell)
        good = 0
        for cell in cells.tolist():
            mine = places[self.rows.cell == cell]
            good += bool(np.all((optima[cell] >= mine.min(axis=0) - reach) & (optima[cell] <= mine.max(axis=0) + reach)))
        return good / len(cells)


@dataclass(frozen=True, eq=False)
class JointFit:
    """The fit and what its bootstrap needs again; costs: half the sums of squares at the ends of all starts, rises in
    thousandths; cubic: whether its terms are fitted; inside: share of cells whose optimum lies among their runs.
    """

    surface: Surface
    theta: Array
    costs: tuple[float, ...]
    converged: bool
    problem: _Problem
    cubic: bool
    inside: float
    resolution: float

    @property
    def at_optimum(self) -> int:
        return sum(cost <= min(self.costs) * (1 + SAME) + 1e-12 for cost in self.costs)

    def refit(self, weights: Array) -> Surface | None:
        """With other weights of the cells (c,), from this optimum; None where that fails or leaves the runs."""
        problem = _Problem(self.problem.rows, self.problem.free, weights, self.problem.strength)
        try:
            theta, _, good = problem.solve(self.theta, self.cubic)
        except (ValueError, np.linalg.LinAlgError):
            return None
        sound = good and np.isfinite(theta).all() and problem.inside(theta, self.resolution) >= INSIDE
        return problem.unpack(theta) if sound else None


def fit_surface(rows: Rows, free: NDArray[np.bool_], resolution: float) -> JointFit:
    """Fit the joint model from several starts. free (k, r): which knob depends on which size; resolution: log step of the
    grids, which a censored cell's gap is weighed by.

    A cubic has a maximum too: an end whose optima do not lie among the runs is not taken. Where only those are left the cubic
    terms are dropped.
    """
    starts = _starts(rows, free)
    problem = _Problem(rows, free, np.ones(len(rows.sizes)), 0.0)
    found = _best(problem, starts, resolution)
    if rows.bounds:
        problem = _Problem(rows, free, np.ones(len(rows.sizes)), _noise(problem, found[0]) / resolution)
        found = _best(problem, [found[0], *starts], resolution)
    theta, costs, converged, cubic = found
    surface = replace(problem.unpack(theta), noise=_noise(problem, theta))
    return JointFit(surface, theta, costs, converged, problem, cubic, problem.inside(theta, resolution), resolution)


def _best(problem: _Problem, starts: Sequence[Array], resolution: float) -> tuple[Array, tuple[float, ...], bool, bool]:
    """The lowest end among the runs: theta, costs of all starts of its kind, whether it converged, whether cubic terms are in."""
    plain = [problem.solve(start, cubic=False) for start in starts]
    bent = [problem.solve(end[0]) for end in plain]
    for ends, cubic in ((bent, True), (plain, False)):
        sound = [end for end in ends if problem.inside(end[0], resolution) >= INSIDE]
        if sound:
            best = min(sound, key=lambda end: end[1])
            return best[0], tuple(end[1] for end in sound), best[2], cubic
    best = min(plain, key=lambda end: end[1])
    return best[0], tuple(end[1] for end in plain), False, False


def _noise(problem: _Problem, theta: Array) -> float:
    rows = problem.rows
    residual = problem(theta)[0][: len(rows.rise)]
    freedom = len(rows.rise) - len(theta) - len(np.unique(rows.cell))
    return float(np.sqrt(np.sum(residual**2) / freedom)) if freedom > 0 else float("nan")


def _starts(rows: Rows, free: NDArray[np.bool_]) -> list[Array]:
    """The optimum from a regression of the better half of each cell's rows; curvature from how wide the window is."""
    k = rows.knobs
    low = np.array([rows.rise[rows.cell == cell].min() if (rows.cell == cell).any() else 0.0 for cell in range(len(rows.sizes))])
    near = rows.rise - low[rows.cell] <= 0.25 * rows.rise.max()
    centre, slopes = np.zeros(k), np.zeros(free.shape)
    for i in range(k):
        design = np.concatenate([np.ones((int(near.sum()), 1)), rows.sizes[rows.cell[near]][:, free[i]]], axis=1)
        found = np.linalg.lstsq(design, rows.place[near, i], rcond=None)[0]
        centre[i], slopes[i, free[i]] = found[0], found[1:]
    away = rows.place - (centre + rows.sizes[rows.cell] @ slopes.T)
    curvature = 2 * rows.rise.max() / np.quantile(np.abs(away), 0.9, axis=0) ** 2
    starts = []
    for factor in START_FACTORS:
        root = [0.5 * np.log(factor * curvature[i]) if i == j else 0.0 for i in range(k) for j in range(i + 1)]
        starts.append(np.concatenate([centre, slopes[free], root, np.zeros(cubes(away[:1]).shape[1])]))
    return starts


def window_rows(cells: Sequence[GridCell], sizes: Array, window: float) -> Rows:
    """Runs within `window` (a share of the loss) of their cell's best; cells with a best run at an edge become bounds."""
    places, rises, members, bounds = [], [], [], []
    for index, cell in enumerate(cells):
        edges = cell.edges()
        if edges:
            bounds += [
                (index, cell.knobs.index(knob), float(cell.best[cell.knobs.index(knob)]), 1 if end == "high" else -1)
                for knob, end in edges.items()
            ]
            continue
        near = cell.rise <= window
        places.append(cell.logs[near])
        rises.append(cell.rise[near])
        members.append(np.full(int(near.sum()), index, dtype=np.intp))
    return Rows(np.concatenate(places), np.concatenate(rises), np.concatenate(members), sizes, tuple(bounds))
