"""How well a law predicts each size when it is fitted to the others, and how that error grows with the distance from them.

Owns `leave_out`. A level is a size as it was run (values closer than `SAME` are one); without its rows the law is fitted again, from the
fit to all rows, and predicts them. Errors are |log(law) - log(loss)| of a run; distances are decades from the convex hull of the runs that
were fitted, over the sizes that the law reads: 0 for a size between others, more for the smallest and the largest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from analysis.fit_engine import Index, minimise
from analysis.fit_uncertainty import Fitted
from analysis.law import Array
from analysis.results import text_table
from scaling.errors import DataError, Fault

if TYPE_CHECKING:
    from analysis.fit_result import ScalingLawFit

Mask = NDArray[np.bool_]
SAME = 0.02
"""Sizes whose logs differ by less are one level: read off a figure, or rounded."""
FEW_LEVELS = 3
REACHES = (0.0, 0.1, 0.3, 1.0)
"""Distances in decades up to which errors are averaged."""


@dataclass(frozen=True)
class LeftOut:
    """One level: its rows, their mean distance in decades, mean and largest error predicted, mean error when they are fitted too.

    converged: whether the fit to the other rows ended in a minimum; its errors are shown and not averaged where it did not.
    """

    size: float
    rows: int
    distance: float
    mean_error: float
    max_error: float
    fitted_error: float
    converged: bool

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class LeftOutSizes:
    """All levels of one size, from small to large; skipped: levels without which the other rows are too few for the law.

    distances (m,), errors (m,): of every run of a usable level.
    """

    by: str
    levels: tuple[LeftOut, ...]
    skipped: tuple[float, ...]
    distances: Array = field(repr=False)
    errors: Array = field(repr=False)

    @property
    def usable(self) -> tuple[LeftOut, ...]:
        return tuple(level for level in self.levels if level.converged)

    @property
    def error(self) -> float:
        """Mean error of a run whose size was left out; NaN where no refit converged."""
        return float(self.errors.mean()) if len(self.errors) else float("nan")

    @property
    def fitted_error(self) -> float:
        """Mean error of the same runs about the law that was fitted to all."""
        rows = [level.rows for level in self.usable]
        return float(np.average([level.fitted_error for level in self.usable], weights=rows)) if rows else float("nan")

    def by_distance(self) -> list[tuple[float, float, int, float]]:
        """(distance above, up to, runs, mean error), for the distances that there are; the last has no upper end."""
        found, above = [], -1.0
        for reach in (*REACHES, np.inf):
            inside = (above < self.distances) & (self.distances <= reach)
            if inside.any():
                found.append((max(above, 0.0), reach, int(inside.sum()), float(self.errors[inside].mean())))
            above = reach
        return found

    def to_dict(self) -> dict[str, Any]:
        distances = [
            {"above": above, "up_to": reach if np.isfinite(reach) else None, "rows": count, "error": error}
            for above, reach, count, error in self.by_distance()
        ]
        return {
            "by": self.by,
            "error": self.error,
            "fitted_error": self.fitted_error,
            "by_distance": distances,
            "levels": [level.to_dict() for level in self.levels],
            "skipped": list(self.skipped),
        }

    def __str__(self) -> str:
        head = [f"{self.by} left out, decades away", "runs", "mean error predicted"]
        rows = []
        for above, reach, count, error in self.by_distance():
            span = "0 (between others)" if reach == 0 else f"{above:g} to {reach:g}" if np.isfinite(reach) else f"above {above:g}"
            rows.append([span, str(count), f"{100 * error:.3f} %"])
        whole = f"{len(self.levels)} levels: {100 * self.error:.3f} % predicted, {100 * self.fitted_error:.3f} % when fitted too"
        failed = len(self.levels) - len(self.usable)
        lines = [text_table(head, rows), whole] + ([f"{failed} refits did not converge"] if failed else [])
        return "\n".join(lines + ([f"{len(self.skipped)} levels leave too little to fit"] if self.skipped else []))


def leave_out(found: ScalingLawFit, by: str = "params") -> LeftOutSizes:
    """Leave out each level of a size of the table, such as params, tokens or flops (budgets), in turn.

    Raises DataError where the table lacks the size or has fewer than three levels of it.
    """
    table, law, fitted = found.table, found.law, found.fitted
    if by not in table.columns:
        raise DataError(Fault(f"leave out {by}", "is no size of the table", f"choose from: {', '.join(table.columns)}"))
    level_of, sizes = levels(table.columns[by])
    if len(sizes) < FEW_LEVELS:
        raise DataError(Fault(f"leave out {by}", f"the table has {len(sizes)} levels of it", "give a table of more sizes"))
    kept = level_of[None, :] != np.arange(len(sizes))[:, None]
    enough = np.array([_enough(found, rows) for rows in kept])
    chosen = np.flatnonzero(enough)
    if not len(chosen):
        raise DataError(Fault(f"leave out {by}", "what is left is too little for the law every time", "choose another size"))
    theta, done = _refits(fitted, kept[chosen])
    predicted = np.abs(np.log(law.value(theta, fitted.x)[0]) - np.log(table.loss))
    own = np.abs(np.log(law.value(fitted.theta[None], fitted.x)[0][0]) - np.log(table.loss))
    logs = np.stack([fitted.x[name] for name in law.columns], axis=1) / np.log(10)
    found_levels, away, missed = [], [np.empty(0)], [np.empty(0)]
    for index, errors, converged in zip(chosen, predicted, done, strict=True):
        out = ~kept[index]
        distances = hull_distances(logs[out], logs[kept[index]])
        scores = (float(errors[out].mean()), float(errors[out].max()), float(own[out].mean()))
        found_levels.append(LeftOut(float(sizes[index]), int(out.sum()), float(distances.mean()), *scores, bool(converged)))
        if converged:
            away, missed = [*away, distances], [*missed, errors[out]]
    skipped = tuple(float(size) for size in sizes[~enough])
    return LeftOutSizes(by, tuple(found_levels), skipped, np.concatenate(away), np.concatenate(missed))


def _refits(fitted: Fitted, kept: Mask) -> tuple[Array, Mask]:
    """theta (S, p) fitted to the kept rows (S, n), all at once, and which ended in a minimum."""
    # The largest loss that may be E must not come from the rows that are left out.
    lowest = max(float(fitted.observed[rows].min()) for rows in kept)
    bounds = fitted.law.bounds(lowest, fitted.x)
    theta, done = np.repeat(fitted.theta[None], len(kept), axis=0), np.ones(len(kept), dtype=bool)
    for loss in fitted.loss.path:
        minima = minimise(fitted.law, fitted.x, fitted.observed, fitted.weights * kept, theta, loss, bounds)
        theta, done = minima.theta, minima.converged
    return theta, done


def levels(values: Array) -> tuple[Index, Array]:
    """The level of each value, and the levels' geometric means, from small to large; neighbours closer than SAME share one."""
    order = np.argsort(values)
    logs = np.log(values[order])
    level = np.empty(len(values), dtype=np.intp)
    level[order] = np.concatenate([[0], np.cumsum(np.diff(logs) > SAME)])
    means = [float(np.exp(np.log(values[level == index]).mean())) for index in range(int(level.max()) + 1)]
    return level, np.array(means)


def hull_distances(points: Array, cloud: Array) -> Array:
    """Euclidean distances of points (m, k) from the convex hull of a cloud (n, k), 0 inside; the cloud may be flat."""
    from scipy.optimize import nnls

    cloud = np.unique(cloud, axis=0)
    heavy = 1e4 * max(float(np.ptp(cloud, axis=0).max()), 1e-6)
    distances = []
    for point in points:
        # The nearest point of the hull is a mean of the cloud with weights from 0 up; a heavy row holds their sum to 1.
        shares, _ = nnls(np.vstack([(cloud - point).T, np.full(len(cloud), heavy)]), np.array([*np.zeros(cloud.shape[1]), heavy]))
        distance = float(np.linalg.norm((shares / shares.sum()) @ (cloud - point)))
        distances.append(distance if distance > 1e-6 else 0.0)
    return np.array(distances)


def _enough(found: ScalingLawFit, rows: Mask) -> bool:
    """More rows than parameters, and every column still at two levels."""
    left = found.table.rows(rows)
    several = all(len(levels(left.columns[name])[1]) > 1 for name in found.law.columns)
    return len(left) > len(found.law.parameters) and several
