"""How sure a fitted law is: profile likelihood with t quantiles, and bootstraps of pairs, residuals, groups, or wild.

Owns the intervals. The profile is the default, since it is right as often as it says on 9, 16 and 50 runs (docs/scaling-laws.md), where the
percentiles of a bootstrap are too narrow. A quantity's interval holds the values at which the best fit's objective rises by less than
t^2 E[psi^2] / (2 E[psi']), psi the loss' slope under normal noise of the scale s that the residuals have (for least squares t^2 s^2 / 2,
the usual F test). t is the quantile of Student's t with (2/k)^2 (n - p) degrees of freedom where that unit grows as s^k: k is 2 for least
squares and 1 for L1, whose unit is known that much better. All this takes the noise for even. Where the table has at
least 8 rows a parameter, a bootstrap of pairs says whether it is: where it spreads wider than the curvature, the interval is widened by
that ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.stats import norm
from scipy.stats import t as student

from analysis.fit_engine import Index, Loss, Minima, Penalty, minimise
from analysis.laws import Array, Inputs, Law
from analysis.results import UNKNOWN, Interval

LEVEL = 0.9
ROWS_A_PARAMETER, DRAWS = 8, 400
"""Fewer rows than that, and a bootstrap of pairs says more about its own singular resamples than about the noise."""
CLIP = 2.0
BLIND = 1e-14
"""Smallest eigenvalue of the scaled curvature that is more than rounding."""
LEAST_NOISE = 1e-9
"""A table without noise has intervals of rounding, not of nothing."""
STEPS = (0.5, 1.0, 1.5, 2.0, 2.6, 3.3, 4.2, 5.5, 7.5, 11.0)
FAR = (16.0, 25.0, 40.0, 70.0, 150.0)
"""Where the profile is computed, in standard errors; the far ones only where the near ones do not reach."""
STIFF = 200.0
"""Strength of the pull to a value, over the objective's own curvature there: the attained value is exact at any."""
Quantities = Callable[[Array], Array]
"""theta (S, p) -> quantities (S, m), each in the units in which its interval is sought (logs for positive ones)."""
Kind = Literal["pairs", "residuals", "groups", "wild"]
FEW_GROUPS = 12
"""Signs of fewer groups make under 4096 different tables: Webb's six weights are drawn instead."""
WEBB = np.array([-np.sqrt(1.5), -1.0, -np.sqrt(0.5), np.sqrt(0.5), 1.0, np.sqrt(1.5)])
"""Webb 2014: mean 0, variance 1."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """What the intervals need of a fit: rows, weights (mean 1), loss, bounds and the minimum theta (p,)."""

    law: Law
    x: Inputs
    observed: Array
    weights: Array
    loss: Loss
    bounds: tuple[Array, Array]
    theta: Array
    draws: Array | None = None
    """Minima of resampled pairs (B, p); None where the rows are too few."""

    def with_draws(self) -> Fitted:
        """With a bootstrap of pairs, where there are rows enough for one and enough of its refits converge."""
        if len(self.observed) < ROWS_A_PARAMETER * len(self.theta):
            return self
        minima = bootstrap(self, "pairs", DRAWS)
        return replace(self, draws=minima.theta[minima.converged]) if minima.converged.mean() > 0.5 else self

    @property
    def freedom(self) -> int:
        return len(self.observed) - len(self.theta)

    def residuals(self) -> Array:
        return self.loss.residual(self.law.value(self.theta[None], self.x)[0][0], self.observed)

    def noise(self) -> float:
        """Standard deviation of a row of weight 1 about the law, in units of the residual, degrees of freedom counted.

        From squares for least squares; else from absolute residuals, as for normal noise, so that outliers count once.
        """
        if self.freedom < 1:
            return float("nan")
        residual = self.residuals()
        if not np.isfinite(self.loss.knee):
            return float(np.sqrt(np.sum(self.weights * residual**2) / self.freedom))
        return float(np.sum(np.sqrt(self.weights) * np.abs(residual)) / self.freedom * np.sqrt(np.pi / 2))

    def near_noise(self) -> float:
        """The noise near the law, on which a robust loss' curvature hangs: `noise`, of which heavy tails are no part.

        Where rows are many, no residual counts for more than CLIP deviations, by the median, as for normal noise clipped there.
        """
        if not np.isfinite(self.loss.knee) or len(self.observed) < ROWS_A_PARAMETER * len(self.theta):
            return self.noise()
        sizes = np.sqrt(self.weights) * np.abs(self.residuals())
        middle = np.median(sizes) / norm.ppf(0.75) * np.sqrt(len(sizes) / self.freedom)
        share = np.sqrt(2 / np.pi) * -np.expm1(-(CLIP**2) / 2) + 2 * CLIP * norm.sf(CLIP)
        return float(np.sum(np.minimum(sizes, CLIP * middle)) / self.freedom / share)

    def moments(self, factor: float = 1.0) -> tuple[float, float]:
        """E[psi^2] and E[psi'] of the loss' slope under normal noise of this scale times a factor."""
        sigma, knee = factor * max(self.near_noise(), LEAST_NOISE), self.loss.path[-1].knee
        if not np.isfinite(knee):
            return sigma**2, 1.0
        c = knee / sigma
        inside = 2 * norm.cdf(c) - 1
        square = sigma**2 * (inside - 2 * c * norm.pdf(c)) + 2 * knee**2 * norm.sf(c)
        return float(square), float(inside)

    def quantile(self, level: float) -> float:
        """Student's t for a two-sided interval; its degrees of freedom are those of the objective's unit (Satterthwaite)."""
        (square, slope), (lower, flatter) = self.moments(1.01), self.moments(1 / 1.01)
        power = np.log(square / slope * flatter / lower) / (2 * np.log(1.01))
        return float(student.ppf((1 + level) / 2, (2 / power) ** 2 * self.freedom))

    def covariance(self) -> tuple[Array, Array]:
        """Of theta, by the curvature; and directions (k, p) in which the rows say nothing: what changes along one has no error."""
        predicted, jacobian = self.law.value(self.theta[None], self.x)
        rows = jacobian[0] / predicted[0][:, None] if self.loss.in_logs else jacobian[0]
        square, slope = self.moments()
        matrix = (rows * self.weights[:, None]).T @ rows
        diagonal = np.sqrt(np.diag(matrix))
        scale = np.where(diagonal > 1e-150, diagonal, 1.0)
        found, vectors = np.linalg.eigh(matrix / np.outer(scale, scale))
        seen = found > BLIND
        inverse = (vectors[:, seen] / found[seen]) @ vectors[:, seen].T / np.outer(scale, scale)
        return np.asarray(inverse * square / slope**2), np.asarray((vectors[:, ~seen] / scale[:, None]).T)


def printed(law: Law, centres: Mapping[str, float]) -> Quantities:
    """The parameters as papers print them; logs of the positive ones, in which their intervals are sought."""
    logs = [name in law.positive for name in law.parameters]

    def quantities(theta: Array) -> Array:
        public = law.public(theta, centres)
        return np.where(logs, np.log(np.maximum(public, 1e-300)), public)

    return quantities


def gradients(quantities: Quantities, theta: Array, chosen: Index | None = None) -> Array:
    """Gradient of every quantity (S, m, p), or of one for each member (S, p), by central differences, all in one call."""
    count, p = theta.shape
    shifts = 1e-5 * np.concatenate([np.eye(p), -np.eye(p)])
    values = quantities((theta[None] + shifts[:, None]).reshape(-1, p)).reshape(2, p, count, -1)
    slopes = (values[0] - values[1]) / 2e-5
    return np.moveaxis(slopes, 0, -1) if chosen is None else slopes[:, np.arange(count), chosen].T


def widening(fitted: Fitted, quantities: Quantities, stderr: Array) -> Array:
    """Spread of the bootstrap of pairs over the curvature's standard errors, at least 1; from its 5 and 95 % quantiles."""
    if fitted.draws is None:
        return np.ones_like(stderr)
    low, high = np.quantile(quantities(fitted.draws), [0.05, 0.95], axis=0)
    return np.asarray(np.maximum((high - low) / (2 * norm.ppf(0.95)) / np.maximum(stderr, 1e-12), 1.0))


@dataclass(frozen=True, eq=False)
class Profile:
    """Intervals of quantities (units of `Quantities`), standard errors, and a lower minimum if one was met on the way; wider: the ratio
    by which the bootstrap of pairs widened each; curves: the profiles themselves, None where no row is left to judge by.
    """

    values: Array
    stderr: Array
    intervals: tuple[Interval, ...]
    better: Array | None
    wider: Array
    curves: Curves | None = None


def profile(fitted: Fitted, quantities: Quantities, level: float = LEVEL) -> Profile:
    """Profile-likelihood intervals of all quantities; an end that the data do not set is infinite."""
    values = quantities(fitted.theta[None])[0]
    if fitted.freedom < 1:
        return Profile(values, np.full(len(values), np.nan), (UNKNOWN,) * len(values), None, np.ones(len(values)))
    covariance, blind = fitted.covariance()
    slopes = gradients(quantities, fitted.theta[None])[0]
    unknown = np.any(np.abs(slopes @ blind.T) > 1e-6, axis=1)
    stderr = np.sqrt(np.maximum(np.einsum("mp,pq,mq->m", slopes, covariance, slopes), 0.0))
    square, slope = fitted.moments()
    wider = widening(fitted, quantities, stderr)
    unit, reach = square / slope / 2, wider * fitted.quantile(level)
    walk = _Walk(fitted, quantities, values, np.maximum(stderr, 1e-9), slopes @ covariance, unit)
    near = walk.go(np.arange(len(values)), STEPS)
    open_ends = [(index, side) for index in range(len(values)) for side in (-1, 1) if near.reached(index, side) < reach[index]]
    far = walk.go(np.array(sorted({index for index, _ in open_ends}), dtype=int), FAR) if open_ends else None
    curves = near if far is None else near.join(far)
    intervals = tuple((curves.end(index, -1, reach[index]), curves.end(index, 1, reach[index])) for index in range(len(values)))
    return Profile(values, np.where(unknown, np.nan, stderr * wider), intervals, curves.better(), wider, curves)


@dataclass(frozen=True, eq=False)
class Curves:
    """Points of the profiles: which quantity, which side, value attained, signed root of the rise, in t units."""

    values: Array
    index: Index
    side: Index
    attained: Array
    root: Array
    theta: Array

    def join(self, other: Curves) -> Curves:
        pairs = zip(
            (self.index, self.side, self.attained, self.root, self.theta),
            (other.index, other.side, other.attained, other.root, other.theta),
            strict=True,
        )
        return Curves(self.values, *(np.concatenate(pair) for pair in pairs))

    def _line(self, index: int, side: int) -> tuple[Array, Array]:
        """Distance from the fitted value and root along one side, both rising."""
        mine = (self.index == index) & (self.side == side) & np.isfinite(self.root)
        distance, root = side * (self.attained[mine] - self.values[index]), self.root[mine]
        order = np.argsort(distance)
        distance, root = np.concatenate([[0.0], distance[order]]), np.concatenate([[0.0], root[order]])
        # A point above its neighbours further out is a local minimum: the profile lies lower.
        root = np.minimum.accumulate(root[::-1])[::-1]
        keep = np.concatenate([[True], (np.diff(distance) > 1e-12) & (np.diff(np.maximum.accumulate(root)) > 1e-9)])
        return distance[keep], root[keep]

    def points(self, index: int) -> tuple[Array, Array]:
        """Values of one quantity, rising, and how far the objective has risen there, as its root in t units; 0 at the fit."""
        (below, down), (above, up) = self._line(index, -1), self._line(index, 1)
        values = np.concatenate([self.values[index] - below[:0:-1], self.values[index] + above])
        return values, np.concatenate([down[:0:-1], up])

    def reached(self, index: int, side: int) -> float:
        return float(self._line(index, side)[1].max())

    def end(self, index: int, side: int, reach: float) -> float:
        distance, root = self._line(index, side)
        if root[-1] < reach:
            return side * np.inf
        at = PchipInterpolator(root, distance)(reach) if len(root) > 2 else np.interp(reach, root, distance)
        return float(self.values[index] + side * at)

    def better(self) -> Array | None:
        """theta of the lowest point, where it lies clearly below the fit."""
        lowest = int(np.nanargmin(self.root))
        return self.theta[lowest] if self.root[lowest] < -0.05 else None


@dataclass(frozen=True, eq=False)
class _Walk:
    fitted: Fitted
    quantities: Quantities
    values: Array
    stderr: Array
    toward: Array
    unit: float

    def go(self, chosen: Index, steps: Sequence[float]) -> Curves:
        """Best fits with each chosen quantity pulled to points that many standard errors away on both sides."""
        signed = np.array([side * step for side in (-1, 1) for step in steps])
        index, away = np.repeat(chosen, len(signed)), np.tile(signed, len(chosen))
        aim = self.values[index] + away * self.stderr[index]
        start = self.fitted.theta + self.toward[index] * (away / self.stderr[index])[:, None]
        stiff = np.sqrt(STIFF * self.unit) / self.stderr[index]

        def penalty(members: Index) -> Penalty:
            mine = index[members]

            def pull(theta: Array) -> tuple[Array, Array]:
                value = self.quantities(theta)[np.arange(len(theta)), mine]
                strength = stiff[members]
                return strength * (value - aim[members]), strength[:, None] * gradients(self.quantities, theta, mine)

            return pull

        f = self.fitted
        theta = start
        for loss in f.loss.path:
            theta = minimise(f.law, f.x, f.observed, f.weights, theta, loss, f.bounds, penalty, 120).theta
        attained = self.quantities(theta)[np.arange(len(theta)), index]
        final = f.loss.path[-1]
        predicted = f.law.value(np.concatenate([theta, f.theta[None]]), f.x)[0]
        objective = np.sum(f.weights * final.rho(final.residual(predicted, f.observed)), axis=1)
        rise = (objective[:-1] - objective[-1]) / max(self.unit, 1e-300)
        root = np.sign(rise) * np.sqrt(np.abs(rise))
        return Curves(self.values, index, np.sign(away).astype(np.intp), attained, root, theta)


def bootstrap(fitted: Fitted, kind: Kind, draws: int, seed: int = 0, groups: Array | None = None) -> Minima:
    """Refits of `draws` resampled tables, all at once from the fit's own minimum; Minima.converged counts those that failed.

    pairs: rows with replacement. groups: whole groups (runs, sizes) with replacement, `groups` (n,) naming each row's. residuals: the
    law plus residuals drawn with replacement, centred and widened by sqrt(n / (n - p)). wild: the law plus each row's own residual,
    widened alike, times a random weight that all rows of a group share (every row its own where `groups` is None): a sign, or one of
    WEBB where groups are few.
    """
    random, n = np.random.default_rng(seed), len(fitted.observed)
    observed, weights = fitted.observed, fitted.weights
    if kind == "residuals":
        residual = -fitted.residuals()
        residual = (residual - residual.mean()) * np.sqrt(n / max(fitted.freedom, 1))
        moved = residual[random.integers(n, size=(draws, n))]
        observed = _observed(fitted, moved)
    elif kind == "wild":
        member = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
        few = member.max() + 1 < FEW_GROUPS
        factor = random.choice(WEBB if few else np.array([-1.0, 1.0]), (draws, int(member.max()) + 1))[:, member]
        moved = -fitted.residuals() * np.sqrt(n / max(fitted.freedom, 1)) * factor
        observed = _observed(fitted, moved)
    elif kind == "groups":
        assert groups is not None, "a group bootstrap names each row's group"
        names, member = np.unique(groups, return_inverse=True)
        counts = random.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
        weights = weights * counts[:, member]
    else:
        weights = weights * random.multinomial(n, np.full(n, 1 / n), size=draws)
    minima = None
    start = np.repeat(fitted.theta[None], draws, axis=0)
    for loss in fitted.loss.path:
        minima = minimise(fitted.law, fitted.x, observed, weights, start, loss, fitted.bounds)
        start = minima.theta
    assert minima is not None, "a loss has at least one step"
    return minima


def _observed(fitted: Fitted, moved: Array) -> Array:
    """Losses (B, n) that lie `moved` (units of the residual) from the fitted law."""
    predicted = fitted.law.value(fitted.theta[None], fitted.x)[0]
    return np.asarray(predicted * np.exp(moved) if fitted.loss.in_logs else predicted + moved)


def without_largest(fitted: Fitted, count: int) -> Array:
    """theta (p,) refitted without the `count` rows of the largest residuals."""
    weights = fitted.weights.copy()
    weights[np.argsort(np.abs(fitted.residuals()))[len(weights) - count :]] = 0.0
    theta = fitted.theta[None]
    for loss in fitted.loss.path:
        theta = minimise(fitted.law, fitted.x, fitted.observed, weights, theta, loss, fitted.bounds).theta
    return np.asarray(theta[0])


def percentiles(draws: Array, level: float = LEVEL) -> list[Interval]:
    """Of each column of draws (B, m)."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]
