"""What makes a fitted law doubtful, in words: identifiability of the table, bounds, correlations, the search, predictions far away.

Owns the guards. Each returns sentences; a fit with any is not `trusted`, however well it converged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from analysis.laws import Array, Inputs, Law, Routed
from analysis.results import Interval

CORRELATION = 0.99
DECADE = 10.0
FAR = 10.0
"""A prediction at more than this many times the largest size, or below the smallest by as much, is far."""
MOVED, OUTLIERS = 1.0, 0.02
"""Standard errors by which a refit without that share of the rows, those of the largest residuals, may move a parameter."""
SHARE = 0.05
"""Of starts at the optimum: fewer, and another search may find a lower one."""


def table_flags(law: Law, columns: Mapping[str, Array]) -> list[str]:
    """Levels, spans and collinearity of the columns that the law reads."""
    flags = []
    least = 2 if isinstance(law, Routed) or "E" not in law.parameters else 3
    for name in law.columns:
        levels = np.unique(columns[name].round(12))
        span = levels.max() / levels.min()
        if len(levels) < least:
            several = "one level" if len(levels) == 1 else f"{len(levels)} levels"
            flags.append(f"the table has {several} of {name}: its exponent is not identified")
        elif span < DECADE and name != "experts":
            flags.append(f"{name} spans a factor of {span:.3g}, under a decade: exponents are hardly identified")
    for first, second in combinations(law.columns, 2):
        logs = np.log(columns[first]), np.log(columns[second])
        if min(float(np.ptp(log)) for log in logs) > 0:
            correlation = float(np.corrcoef(*logs)[0, 1])
            if abs(correlation) > CORRELATION:
                flags.append(
                    f"{first} and {second} are collinear (correlation {correlation:.3f}): their exponents are not separable"
                )
    return flags


def bound_flags(law: Law, theta: Array, bounds: tuple[Array, Array]) -> list[str]:
    """Parameters that the search pushed against an end of their range."""
    flags = []
    for name, value, low, high in zip(law.parameters, theta, *bounds, strict=True):
        if value - low < 1e-6 * (high - low) or high - value < 1e-6 * (high - low):
            end = "lower" if value - low < high - value else "upper"
            flags.append(f"{name} lies on its {end} bound" + (" (0)" if name == "E" and end == "lower" else ""))
    return flags


def correlation_flags(law: Law, covariance: Array) -> list[str]:
    """Centred parameters that the data hardly tell apart (A and alpha are always correlated as printed, which says nothing)."""
    scale = np.sqrt(np.diag(covariance))
    if not np.isfinite(scale).all() or (scale == 0).any():
        return ["the standard errors cannot be computed"]
    correlation = covariance / np.outer(scale, scale)
    pairs = combinations(range(len(law.parameters)), 2)
    return [
        f"{law.parameters[i]} and {law.parameters[j]} are correlated by {correlation[i, j]:.4f}: the data hardly tell them apart"
        for i, j in pairs
        if abs(correlation[i, j]) > CORRELATION
    ]


def interval_flags(intervals: Mapping[str, Interval]) -> list[str]:
    """Parameters for which the data set no end."""
    flags = []
    for name, (low, high) in intervals.items():
        open_low, open_high = np.isneginf(low) or (name == "E" and low == 0), np.isposinf(high)
        if open_low or open_high:
            ends = "neither end" if open_low and open_high else "no lower end" if open_low else "no upper end"
            flags.append(f"the data set {ends} to {name}: weakly identified")
    return flags


def outlier_flags(names: Sequence[str], before: Array, after: Array, stderr: Array, count: int) -> list[str]:
    """Parameters that a few rows move by more than their own standard error; values as their intervals are sought."""
    moved = np.abs(after - before) / np.maximum(stderr, 1e-12)
    worst = int(np.nanargmax(np.where(np.isfinite(moved), moved, 0.0)))
    if not np.isfinite(moved[worst]) or moved[worst] < MOVED:
        return []
    rows = "the row of the largest residual" if count == 1 else f"the {count} rows of the largest residuals"
    return [f"without {rows}, {names[worst]} moves by {moved[worst]:.1f} standard errors: look at them"]


def search_flags(total: int, at_optimum: int, moved: bool, freedom: int) -> list[str]:
    flags = []
    if at_optimum < max(2, SHARE * total):
        flags.append(f"{at_optimum} of {total} starts reached the optimum: there may be a lower one")
    if not moved:
        flags.append("the fit returned its own start")
    if freedom < 1:
        flags.append("as many parameters as rows: nothing is left to judge the fit by")
    return flags


def prediction_flags(law: Law, x: Inputs, columns: Mapping[str, float]) -> list[str]:
    """How far a prediction lies from the rows."""
    flags = []
    for name in law.columns:
        logs, at = x.whole(name), float(np.log(columns[name]))
        beyond = max(at - float(logs.max()), float(logs.min()) - at)
        if beyond > np.log(FAR):
            flags.append(f"{name} {columns[name]:.4g} lies x{np.exp(beyond):.3g} from what was measured, beyond x{FAR:g}")
    return flags


def far_split_flags(x: Inputs, split: Sequence[tuple[str, float]]) -> list[str]:
    """How far a compute-optimal size or token count lies from the rows."""
    flags = []
    for name, value in split:
        logs, at = x.whole(name), float(np.log(value))
        for beyond, side in ((at - float(logs.max()), "above"), (float(logs.min()) - at, "below")):
            if beyond > np.log(FAR):
                far = f"lies x{np.exp(beyond):.3g} {side} what was measured, beyond x{FAR:g}"
                flags.append(f"the optimal {name} {value:.4g} {far}")
    return flags
