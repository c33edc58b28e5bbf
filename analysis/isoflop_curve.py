"""One IsoFLOP curve: where the loss of equal-compute runs is lowest over model size, and how sure that is.

Owns the three ways to read a minimum (spline, parabola, cubic), its interval and its censoring. Sizes are natural logs of parameters,
losses nats per token. A minimum that no smaller and no larger size brackets is an inequality ("at most", "at least"), one whose curvature
the noise could have made is undecided: neither is ever extrapolated to a number. An interval is the set of sizes at which the fitted slope
may be 0 (polynomials), or the percentiles of a bootstrap of the noise (spline); where it leaves the fitted sizes its end is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from analysis.results import UNKNOWN, Interval
from analysis.shapes import Array

Method = Literal["spline", "parabola", "cubic"]
METHODS: tuple[Method, ...] = ("spline", "parabola", "cubic")
Censored = Literal["low", "high", "unresolved"]
DEGREE = {"spline": 3, "parabola": 2, "cubic": 3}
"""Of the polynomial that is fitted, or, for the spline, about which the noise is measured."""
REACH = {"spline": 8.0, "parabola": 4.0, "cubic": 8.0}
"""Factor of the best size, either way, within which the polynomial is fitted."""
LEAST = {"spline": 6, "parabola": 5, "cubic": 6}
"""Sizes that the window holds at least, where the budget has them."""
SIZES = 3
"""Fewer sizes bracket nothing."""
GRID, DRAWS, DRAW_GRID = 2001, 400, 301
ROUNDING = 1e-9
"""Noise of a table without noise, as a share of the loss."""


@dataclass(frozen=True, eq=False)
class Budget:
    """Runs of one budget: log_size, log_other (parameters and tokens, or the reverse), loss, weights (n,); flops: their mean.

    The variance of a row is that of a row of weight 1 over its weight; known: weights are 1 / stderr^2.
    """

    flops: float
    log_size: Array
    log_other: Array
    loss: Array
    weights: Array
    known: bool

    @property
    def sizes(self) -> Array:
        return np.unique(self.log_size)

    @property
    def means(self) -> Array:
        """Weighted mean loss of each size."""
        return np.array([np.average(self.loss[mine], weights=self.weights[mine]) for mine in self._members()])

    @property
    def size_weights(self) -> Array:
        return np.array([self.weights[mine].sum() for mine in self._members()])

    def other_at(self, log_size: Array | float) -> Array:
        """log of the other of parameters and tokens for a size under this budget, between the runs' own."""
        other = np.array([self.log_other[mine].mean() for mine in self._members()])
        return np.asarray(np.interp(log_size, self.sizes, other))

    def _members(self) -> list[NDArray[np.intp]]:
        return [np.flatnonzero(self.log_size == size) for size in self.sizes]


@dataclass(frozen=True)
class Window:
    """What a polynomial may read: a factor of the best size either way, or that many sizes about it."""

    method: Method
    reach: float
    points: int | None = None

    def __str__(self) -> str:
        if self.method == "spline":
            return "Akima spline through every size"
        if self.points is not None:
            return f"{self.method} through the {self.points} sizes about the lowest loss"
        if np.isinf(self.reach):
            return f"{self.method} through every size"
        return f"{self.method} through sizes within x{self.reach:g} of the lowest loss, {LEAST[self.method]} at least"

    def sizes(self, budget: Budget) -> Array:
        """The sizes inside."""
        sizes, best = budget.sizes, int(np.argmin(budget.means))
        count = LEAST[self.method] if self.points is None else self.points
        first = max(0, min(best - count // 2, len(sizes) - count))
        inside = np.zeros(len(sizes), dtype=bool)
        inside[first : first + count] = True
        if self.points is None:
            inside |= np.abs(sizes - sizes[best]) <= np.log(self.reach) + 1e-9
        return np.asarray(sizes[inside])


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A weighted polynomial about `centre`: coefficients (p,) of rising powers; unit: their covariance for noise 1; squares: weighted sum
    of squared residuals, in shares of the lowest loss squared (of the variance where stderrs are known), of `freedom` degrees of freedom.
    """

    centre: float
    coefficients: Array
    unit: Array
    squares: float
    freedom: int
    span: Interval

    def __call__(self, log_size: Array) -> Array:
        return np.asarray(self._powers(log_size) @ self.coefficients)

    def slope(self, log_size: Array | float) -> tuple[Array, Array]:
        """d loss / d log size, and the root of its variance for noise 1."""
        u = np.atleast_1d(np.asarray(log_size, dtype=float)) - self.centre
        order = np.arange(len(self.coefficients))
        rows = order * u[:, None] ** np.maximum(order - 1, 0)
        variance = np.einsum("gp,pq,gq->g", rows, self.unit, rows)
        return rows @ self.coefficients, np.sqrt(np.maximum(variance, 0.0))

    def curvature(self, log_size: float) -> float:
        u, c = log_size - self.centre, self.coefficients
        return float(sum(k * (k - 1) * c[k] * u ** (k - 2) for k in range(2, len(c))))

    def minimum(self) -> float | None:
        """Where the slope is 0 and the curvature positive; None where there is no such place inside the fitted sizes."""
        roots = np.roots(np.polyder(self.coefficients[::-1]))
        places = [float(root.real) + self.centre for root in roots if abs(root.imag) < 1e-12]
        inside = [place for place in places if self.span[0] < place < self.span[1] and self.curvature(place) > 0]
        return inside[0] if inside else None

    def _powers(self, log_size: Array) -> Array:
        return np.vander(np.asarray(log_size, dtype=float) - self.centre, len(self.coefficients), increasing=True)


def fit_polynomial(budget: Budget, window: Window) -> Polynomial | None:
    """Weighted least squares in the window; None with too few sizes for the degree."""
    sizes, degree = window.sizes(budget), DEGREE[window.method]
    if window.method == "spline":
        degree = min(degree, len(sizes) - 2)
    if len(sizes) < degree + 1 or degree < 2:
        return None
    rows = (budget.log_size >= sizes[0]) & (budget.log_size <= sizes[-1])
    centre = float(sizes.mean())
    powers = np.vander(budget.log_size[rows] - centre, degree + 1, increasing=True)
    weights, loss = budget.weights[rows], budget.loss[rows]
    unit = np.linalg.inv((powers * weights[:, None]).T @ powers)
    coefficients = unit @ (powers.T @ (weights * loss))
    squares = float(np.sum(weights * (loss - powers @ coefficients) ** 2))
    if not budget.known:
        squares /= float(budget.loss.min()) ** 2
    return Polynomial(centre, coefficients, unit, squares, int(rows.sum()) - degree - 1, (float(sizes[0]), float(sizes[-1])))


@dataclass(frozen=True)
class Noise:
    """Standard deviation of a row of weight 1, nats, or a factor of known standard errors; NaN unknown. freedom: its degrees."""

    sd: float
    freedom: float


@dataclass(frozen=True, eq=False)
class Minimum:
    """The minimum of one curve.

    log_size: NaN when unresolved, the edge of the grid when censored "low" (at most) or "high" (at least). stderr, interval: of
    log_size; line: (log_size, loss) of the fitted curve. reason: why it is no number.
    """

    log_size: float
    stderr: float
    interval: Interval
    loss: float
    censored: Censored | None
    line: tuple[Array, Array]
    reason: str = ""


def find_minimum(
    budget: Budget, window: Window, polynomial: Polynomial | None, noise: Noise, level: float, draws: int
) -> Minimum:
    """The minimum of a budget's curve with its interval, or what can be said instead."""
    sizes, means, nothing = budget.sizes, budget.means, (np.empty(0), np.empty(0))
    best, lowest = int(np.argmin(means)), float(means.min())
    flat = "the curve is too flat for its noise: any of its sizes may be the best"
    if best in (0, len(sizes) - 1) or means[-1] == lowest:
        end = _inner_end(budget, noise, level)
        if end is None:
            return Minimum(np.nan, np.nan, (-np.inf, np.inf), lowest, "unresolved", nothing, flat)
        low, interval = best == 0, (-np.inf, end) if best == 0 else (end, np.inf)
        reason = f"the {'smallest' if low else 'largest'} size has the lowest loss"
        return Minimum(float(sizes[best]), np.nan, interval, lowest, "low" if low else "high", nothing, reason)
    found = _spline(budget, noise, level, draws) if window.method == "spline" else _slope_zero(polynomial, noise, level)
    if found is None:
        few = polynomial is None
        reason = (
            "too few sizes for the curve" if few else "the fitted curve has no minimum of positive curvature between its sizes"
        )
        return Minimum(np.nan, np.nan, (-np.inf, np.inf), lowest, "unresolved", nothing, reason)
    place, stderr, interval, line = found
    if np.isinf(interval[0]) and np.isinf(interval[1]):
        return Minimum(np.nan, np.nan, interval, lowest, "unresolved", line, flat)
    return Minimum(place, stderr, interval, float(np.interp(place, *line)), None, line)


def _inner_end(budget: Budget, noise: Noise, level: float) -> float | None:
    """For a lowest loss at an edge: the first size beyond all that the noise does not tell from it; None where that is every size."""
    from scipy.stats import t as student

    sizes, means, weights = budget.sizes, budget.means, budget.size_weights
    best = int(np.argmin(means))
    sd = noise.sd if np.isfinite(noise.sd) else 0.0
    margin = float(student.ppf(level, noise.freedom)) * sd * np.sqrt(1 / weights + 1 / weights[best]) if sd > 0 else 0.0
    alike = np.flatnonzero(means - means[best] <= margin)
    beyond = int(alike.max()) + 1 if best == 0 else int(alike.min()) - 1
    return float(sizes[beyond]) if 0 <= beyond < len(sizes) else None


Found = tuple[float, float, Interval, tuple[Array, Array]]


def _slope_zero(polynomial: Polynomial | None, noise: Noise, level: float) -> Found | None:
    """Of a polynomial: the sizes about its minimum at which a test does not tell its slope from 0."""
    from scipy.stats import t as student

    place = polynomial.minimum() if polynomial is not None else None
    if polynomial is None or place is None:
        return None
    grid = np.linspace(*polynomial.span, GRID)
    line = (grid, polynomial(grid))
    if not np.isfinite(noise.sd):
        return place, np.nan, UNKNOWN, line
    slope, unit = polynomial.slope(grid)
    excess = np.abs(slope) - float(student.ppf((1 + level) / 2, noise.freedom)) * noise.sd * unit
    at = int(np.searchsorted(grid, place))
    interval = (_crossing(grid[:at][::-1], excess[:at][::-1], -np.inf), _crossing(grid[at:], excess[at:], np.inf))
    stderr = noise.sd * float(polynomial.slope(place)[1][0]) / polynomial.curvature(place)
    return place, stderr, interval, line


def _crossing(places: Array, excess: Array, open_end: float) -> float:
    """Where `excess` first turns positive on the way out."""
    above = np.flatnonzero(excess > 0)
    if not len(above):
        return open_end
    first = int(above[0])
    if first == 0:
        return float(places[0])
    share = excess[first - 1] / (excess[first - 1] - excess[first])
    return float(places[first - 1] + share * (places[first] - places[first - 1]))


def _spline(budget: Budget, noise: Noise, level: float, draws: int) -> Found:
    """Of an Akima spline through the means of the sizes; the noise is drawn anew about them."""
    from scipy.interpolate import Akima1DInterpolator
    from scipy.stats import norm
    from scipy.stats import t as student

    sizes, means = budget.sizes, budget.means
    grid = np.linspace(sizes[0], sizes[-1], GRID)
    line = (grid, np.asarray(Akima1DInterpolator(sizes, means)(grid)))
    place = float(grid[int(np.argmin(line[1]))])
    if not np.isfinite(noise.sd):
        return place, np.nan, UNKNOWN, line
    shaken = np.random.default_rng(0).standard_normal((len(sizes), draws)) * noise.sd / np.sqrt(budget.size_weights)[:, None]
    coarse = np.unique(np.concatenate([np.linspace(sizes[0], sizes[-1], DRAW_GRID), sizes]))
    places = coarse[np.argmin(Akima1DInterpolator(sizes, means[:, None] + shaken)(coarse), axis=0)]
    low, down, up, high = np.quantile(places, [(1 - level) / 2, norm.cdf(-1), norm.cdf(1), (1 + level) / 2])
    # The draws take the noise for known; Student's t widens for what its degrees of freedom leave open.
    wider = float(student.ppf((1 + level) / 2, noise.freedom) / norm.ppf((1 + level) / 2))
    ends = place - wider * max(place - low, 0.0), place + wider * max(high - place, 0.0)
    interval = (ends[0] if ends[0] > sizes[0] else -np.inf, ends[1] if ends[1] < sizes[-1] else np.inf)
    return place, float(max(up - down, 2 * ROUNDING)) / 2, interval, line


def moderated(squares: Sequence[float], freedom: Sequence[int]) -> list[Noise]:
    """Noise of each budget from its own residuals and, as far as budgets resemble each other, from all of them.

    squares, freedom: sums of squares and their degrees of freedom. Each variance is pulled to a common one that counts as d0 more degrees
    of freedom; d0 comes from the spread of the variances themselves (Smyth 2004, moments of log variances), so that budgets of
    tenfold noise stay apart and equal ones are pooled. Unknown (NaN) where no budget has a degree of freedom.
    """
    total, known = np.asarray(squares, dtype=float), np.asarray(freedom, dtype=float)
    seen = known > 0
    if not seen.any():
        return [Noise(np.nan, 0.0)] * len(total)
    variance = np.maximum(total[seen] / known[seen], ROUNDING**2)
    prior, common = _common(variance, known[seen])
    if np.isinf(prior):
        pooled = float(np.sum(variance * known[seen]) / known[seen].sum())
        return [Noise(float(np.sqrt(pooled)), float(known.sum()))] * len(total)
    own = np.where(seen, total, 0.0)
    each = np.maximum((prior * common + own) / (prior + known), ROUNDING**2)
    return [Noise(float(sd), float(prior + df)) for sd, df in zip(np.sqrt(each), known, strict=True)]


def _common(variance: Array, freedom: Array) -> tuple[float, float]:
    """(d0, common variance): infinite d0 where the variances differ by no more than chance."""
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    logs = np.log(variance) - digamma(freedom / 2) + np.log(freedom / 2)
    excess = float(logs.var(ddof=1) - polygamma(1, freedom / 2).mean()) if len(logs) > 1 else 0.0
    if excess <= polygamma(1, 500.0):
        return np.inf, float(np.exp(logs.mean()))
    prior = float(brentq(lambda d: polygamma(1, d / 2) - excess, 1e-3, 1e3))
    return prior, float(np.exp(logs.mean() + digamma(prior / 2) - np.log(prior / 2)))
