"""A power law through optima that are themselves uncertain: N_opt = k C^a, with intervals that count how optima scatter.

Owns `PowerLaw` and `fit_power`. Weighted least squares of logs. Each optimum's variance is its own error squared plus a scatter common
to all, which is estimated (Paule and Mandel 1982) unless given; the interval's scale comes from the residuals with Student's t of n - 2
degrees of freedom (Hartung and Knapp 2001), so that errors that are all wrong by one factor do not make it wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from analysis.fit_result import Estimate
from analysis.results import UNKNOWN, Interval
from analysis.shapes import Array

UNSURE = 1e-12
"""Errors below this are rounding (natural logs)."""


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """value = exp(level) (C / exp(centre))^exponent; covariance (2, 2) of level and exponent, its scale included.

    scatter: standard deviation of an optimum beyond its own error, natural log. freedom: of the t quantile. level_of: of the intervals.
    """

    centre: float
    level: float
    exponent: Estimate
    coefficient: Estimate
    covariance: Array
    scatter: float
    freedom: float
    count: int
    level_of: float

    def at(self, flops: float) -> Estimate:
        """The law at a budget (FLOP), in plain units; stderr by the delta method."""
        middle, reach, stderr = self._logs(np.array([float(flops)]))
        value = float(np.exp(middle[0]))
        ends = (float(np.exp(middle[0] - reach[0])), float(np.exp(middle[0] + reach[0])))
        return Estimate(value, value * float(stderr[0]), ends)

    def band(self, flops: Array) -> tuple[Array, Array, Array]:
        """Low end, value and high end at budgets."""
        middle, reach, _ = self._logs(np.asarray(flops, dtype=float))
        return np.exp(middle - reach), np.exp(middle), np.exp(middle + reach)

    def _logs(self, flops: Array) -> tuple[Array, Array, Array]:
        x = np.log(flops) - self.centre
        rows = np.stack([np.ones_like(x), x], axis=-1)
        stderr = np.sqrt(np.maximum(np.einsum("gp,pq,gq->g", rows, self.covariance, rows), 0.0))
        return self.level + self.exponent.value * x, _quantile(self.level_of, self.freedom) * stderr, stderr

    def to_dict(self) -> dict[str, Any]:
        return {
            "exponent": self.exponent.to_dict(),
            "coefficient": self.coefficient.to_dict(),
            "scatter": self.scatter,
            "optima": self.count,
        }


def fit_power(
    flops: ArrayLike,
    values: ArrayLike,
    stderr: Sequence[float] | Array | None = None,
    level: float = 0.9,
    scatter: float | None = None,
    freedom: float = np.inf,
) -> PowerLaw | None:
    """The law through values (n,) at budgets (n,); None with fewer than two budgets.

    stderr (n,): of log values; None or any NaN: all alike. scatter: beyond stderr, natural log; None estimates it, 0 gives weights
    1 / stderr^2. freedom: of the stderrs themselves, used with two budgets, where nothing else tells how sure the law is.
    """
    x, y = np.log(np.asarray(flops, dtype=float)), np.log(np.asarray(values, dtype=float))
    if len(np.unique(x)) < 2:
        return None
    errors = np.full(len(x), np.nan) if stderr is None else np.asarray(stderr, dtype=float)
    known = bool(np.isfinite(errors).all())
    variance = np.maximum(errors, UNSURE) ** 2 if known else np.ones_like(x)
    extra = scatter if scatter is not None else _scatter(x, y, variance) if known else 0.0
    weights = 1 / (variance + extra**2)
    centre = float(np.average(x, weights=weights))
    rows = np.stack([np.ones_like(x), x - centre], axis=1)
    covariance = np.linalg.inv((rows * weights[:, None]).T @ rows)
    found = covariance @ (rows.T @ (weights * y))
    left = len(x) - 2
    if left > 0:
        covariance = covariance * max(float(np.sum(weights * (y - rows @ found) ** 2)) / left, UNSURE**2)
    elif not known:
        covariance = np.full((2, 2), np.nan)
    used = float(left) if left > 0 else freedom
    spread = extra if known else float(np.sqrt(np.sum((y - rows @ found) ** 2) / left)) if left > 0 else np.nan
    return _law(centre, found, covariance, spread, used, len(x), level)


def _law(centre: float, found: Array, covariance: Array, scatter: float, freedom: float, count: int, level: float) -> PowerLaw:
    reach = _quantile(level, freedom)
    back = np.array([1.0, -centre])
    log_k, log_k_error = float(back @ found), float(np.sqrt(back @ covariance @ back))
    slope, error = float(found[1]), float(np.sqrt(covariance[1, 1]))
    exponent = Estimate(slope, error, _about(slope, reach * error))
    low, high = np.exp(_about(log_k, reach * log_k_error))
    k = float(np.exp(log_k))
    return PowerLaw(
        centre,
        float(found[0]),
        exponent,
        Estimate(k, k * log_k_error, (float(low), float(high))),
        covariance,
        scatter,
        freedom,
        count,
        level,
    )


def _about(value: float, reach: float) -> Interval:
    return (value - reach, value + reach) if np.isfinite(reach) else UNKNOWN


def _quantile(level: float, freedom: float) -> float:
    from scipy.stats import t as student

    return float(student.ppf((1 + level) / 2, freedom))


def _scatter(x: Array, y: Array, variance: Array) -> float:
    """Common scatter at which the weighted squares are as many as their degrees of freedom; 0 where they are fewer without any."""
    from scipy.optimize import brentq

    def excess(extra: float) -> float:
        weights = 1 / (variance + extra)
        rows = np.stack([np.ones_like(x), x - x.mean()], axis=1) * np.sqrt(weights)[:, None]
        residual = y * np.sqrt(weights) - rows @ np.linalg.lstsq(rows, y * np.sqrt(weights), rcond=None)[0]
        return float(residual @ residual) - (len(x) - 2)

    if len(x) < 3 or excess(0.0) <= 0:
        return 0.0
    top = float(np.var(y)) + 1.0
    while excess(top) > 0:
        top *= 4
    return float(np.sqrt(brentq(excess, 0.0, top)))
