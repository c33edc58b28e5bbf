"""What small sizes say about large ones beside where the optimum is: how they rank choices, how much a wrong LR costs, where runs diverge.

Owns AcrossSizes and its three parts. A choice is a learning rate (or a value of another hyperparameter); a run that diverged is the worst
choice. Losses are in nats per token; intervals are at 90 % and say what the noise of the runs leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.frontier import Frontier, fit_frontier
from analysis.optimum import CellOptimum
from analysis.results import UNKNOWN, Interval, interval_text, json_safe, number, power_of_two, whole
from analysis.shapes import Array

if TYPE_CHECKING:
    import pandas as pd

DRAWS = 1000
LEVELS = (0.05, 0.95)
RESOLVED = 1.645
"""Standard errors by which two choices must differ at the target for their order to count as known."""
MIN_CHOICES = 3


@dataclass(frozen=True)
class Ranking:
    """How far the order of the choices at `size` is that at `target` (Magnusson et al. 2504.11393, decision accuracy)."""

    size: float
    target: float
    choices: int
    """Choices that were made at both sizes."""
    accuracy: float
    """Share of the pairs of choices that both sizes order the same way; pairs that the target cannot tell apart do not count."""
    interval: Interval
    pairs: int
    """Pairs that the target tells apart beyond its noise."""
    correlation: float
    """Kendall's tau-b over all shared choices."""

    def __str__(self) -> str:
        percent = interval_text((100 * self.interval[0], 100 * self.interval[1]), 0)
        return f"{100 * self.accuracy:.0f} % {percent} of {self.pairs} at {number(self.size)}"

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"size": whole(self.size), "target": whole(self.target)}


@dataclass(frozen=True)
class Sensitivity:
    """Mean loss above the best one over a range of learning rates that all sizes share (Wortsman et al. 2309.14322, section 2.2).

    There losses are cut off at that of an untrained model; here at the largest finite loss of the table, or a given `ceiling`.
    """

    log2_lrs: Interval
    """Range of log2 LR, or UNKNOWN where the sizes share none."""
    ceiling: float
    rises: tuple[float, ...]
    """Nats, one a size."""

    def to_dict(self) -> dict[str, Any]:
        return {"log2_lrs": self.log2_lrs, "ceiling": self.ceiling, "rises": self.rises}


@dataclass(frozen=True)
class AcrossSizes:
    """One parametrization over one axis; `sizes` in rising order."""

    axis: str
    sizes: tuple[float, ...]
    rankings: tuple[Ranking, ...]
    """Each smaller size against the largest."""
    sensitivity: Sensitivity
    frontier: Frontier
    margins: tuple[float, ...]
    """Octaves from the optimum to the lowest learning rate that diverges, at least; NaN where either is unknown."""
    choices: str = "learning rates"

    def to_dict(self) -> dict[str, Any]:
        return dict(
            json_safe(
                {
                    "rankings": [ranking.to_dict() for ranking in self.rankings],
                    "sensitivity": self.sensitivity.to_dict(),
                    "divergence": self.frontier.to_dict() | {"margins": self.margins},
                }
            )
        )

    def lines(self) -> list[str]:
        """In sentences."""
        return [*self._ranking(), *self._sensitivity(), *self._divergence()]

    def _ranking(self) -> list[str]:
        parts = [str(item) for item in self.rankings if math.isfinite(item.accuracy)]
        if not parts:
            return []
        return [f"pairs of {self.choices} ordered as at {self.axis} {number(self.rankings[0].target)}: {', '.join(parts)}"]

    def _sensitivity(self) -> list[str]:
        found = self.sensitivity
        if math.isnan(found.log2_lrs[0]):
            return []
        parts = [f"{number(value, 3)} at {number(size)}" for size, value in zip(self.sizes, found.rises, strict=True)]
        ends = f"{power_of_two(found.log2_lrs[0])} to {power_of_two(found.log2_lrs[1])}"
        return [f"mean loss above the best over {ends}, nats: {', '.join(parts)}"]

    def _divergence(self) -> list[str]:
        if not any(math.isfinite(high) for _, high in self.frontier.brackets):
            return []
        parts = []
        for size, (low, high), margin in zip(self.sizes, self.frontier.brackets, self.margins, strict=True):
            where = f"above {power_of_two(low)}" if math.isinf(high) else f"{power_of_two(low)} to {power_of_two(high)}"
            where = f"below {power_of_two(high)}" if math.isinf(low) else where
            parts.append(f"{where} at {number(size)}" + (f" ({number(margin, 1)} octaves above the best)" if margin > 0 else ""))
        known = math.isfinite(self.frontier.slope)
        slope = f"; it moves by {number(self.frontier.slope)} octaves a doubling {interval_text(self.frontier.interval)}"
        return [f"runs begin to diverge between: {', '.join(parts)}{slope if known else ''}"]


def across_sizes(rows: pd.DataFrame, axis: str, optima: Sequence[CellOptimum], ceiling: float | None = None) -> AcrossSizes:
    """Of one parametrization: `rows` of its runs, and the optima in the order of their sizes. ceiling: see Sensitivity."""
    sizes = [item.cell.size(axis) for item in optima]
    by_size = [_choices(rows[_of_cell(rows, item)]) for item in optima]
    noise = [item.noise.sd if item.noise is not None else math.nan for item in optima]
    finite = rows["loss"].to_numpy(float)
    top = ceiling if ceiling is not None else float(np.nanmax(finite)) if np.isfinite(finite).any() else math.nan
    target = len(sizes) - 1
    rankings = tuple(
        _ranking((sizes[at], sizes[target]), (by_size[at], by_size[target]), (noise[at], noise[target])) for at in range(target)
    )
    brackets = [_bracket(choices, item) for choices, item in zip(by_size, optima, strict=True)]
    margins = [low - item.log2_lr if item.usable else math.nan for (low, _), item in zip(brackets, optima, strict=True)]
    frontier = fit_frontier(np.log2(sizes), brackets)
    sensitivity = _sensitivity(by_size, optima, top)
    return AcrossSizes(axis, tuple(sizes), rankings, sensitivity, frontier, tuple(margins), _words(optima))


def _words(optima: Sequence[CellOptimum]) -> str:
    return next((item.cell.values for item in optima), "learning rates")  # noqa: PD011


@dataclass(frozen=True)
class _Choices:
    """Distinct log2 LRs of one size, their mean loss (infinite where most runs diverged) and number of finite runs."""

    log2_lr: Array
    loss: Array
    runs: Array


def _of_cell(rows: pd.DataFrame, item: CellOptimum) -> Any:
    from analysis.table import CELL_COLUMNS

    chosen = np.ones(len(rows), dtype=bool)
    for name in CELL_COLUMNS[1:]:
        level = item.cell.size(name)
        column = rows[name].to_numpy(float)
        chosen &= np.isnan(column) if math.isnan(level) else column == level
    return chosen


def _choices(rows: pd.DataFrame) -> _Choices:
    """Pruned runs are no values and are left out."""
    known = rows[rows["diverged"] | np.isfinite(rows["loss"].to_numpy(float))]
    grouped = known.groupby("log2_lr").agg(loss=("loss", "mean"), runs=("loss", "count"), lost=("diverged", "mean"))
    loss = np.where(grouped["lost"].to_numpy(float) >= 0.5, np.inf, grouped["loss"].to_numpy(float))
    return _Choices(grouped.index.to_numpy(float), loss, grouped["runs"].to_numpy(float))


def _ranking(sizes: tuple[float, float], choices: tuple[_Choices, _Choices], noise: tuple[float, float]) -> Ranking:
    from scipy.stats import kendalltau

    shared, here, there = np.intersect1d(choices[0].log2_lr, choices[1].log2_lr, return_indices=True)
    if len(shared) < MIN_CHOICES:
        return Ranking(*sizes, len(shared), math.nan, UNKNOWN, 0, math.nan)
    small, large = choices[0].loss[here], choices[1].loss[there]
    errors = [
        np.nan_to_num(sd) / np.sqrt(np.maximum(side.runs[at], 1))
        for sd, side, at in zip(noise, choices, (here, there), strict=True)
    ]
    first, second = np.triu_indices(len(shared), 1)
    known = _told_apart(large, errors[1], first, second)
    if not known.any():
        return Ranking(*sizes, len(shared), math.nan, UNKNOWN, 0, math.nan)
    first, second = first[known], second[known]
    wanted = large[first] < large[second]
    random = np.random.default_rng(0)
    drawn = small + errors[0] * random.standard_normal((DRAWS, len(small)))
    agrees = (drawn[:, first] < drawn[:, second]) == wanted
    low, high = np.quantile(agrees.mean(axis=1), LEVELS)
    accuracy = float(((small[first] < small[second]) == wanted).mean())
    tau = float(kendalltau(_ranks(small), _ranks(large)).statistic)
    interval = (min(float(low), accuracy), max(float(high), accuracy))
    return Ranking(*sizes, len(shared), accuracy, interval, len(first), tau)


def _told_apart(loss: Array, error: Array, first: Any, second: Any) -> Any:
    """Pairs of which the target's losses differ beyond their noise; two diverged runs do not differ."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(loss[first] - loss[second])
    return np.nan_to_num(gap, nan=0.0, posinf=np.inf) > RESOLVED * np.hypot(error[first], error[second])


def _ranks(loss: Array) -> Array:
    from scipy.stats import rankdata

    return np.asarray(rankdata(loss), dtype=float)


def _sensitivity(by_size: Sequence[_Choices], optima: Sequence[CellOptimum], ceiling: float) -> Sensitivity:
    """Trapezes between the sampled learning rates, over the range that every size was sampled in."""
    nothing = Sensitivity(UNKNOWN, ceiling, (math.nan,) * len(by_size))
    if not by_size or min(len(choices.log2_lr) for choices in by_size) < 2 or not math.isfinite(ceiling):
        return nothing
    low = max(float(choices.log2_lr[0]) for choices in by_size)
    high = min(float(choices.log2_lr[-1]) for choices in by_size)
    if high - low < 1:
        return nothing
    values = []
    for choices, item in zip(by_size, optima, strict=True):
        grid = np.unique(np.concatenate([[low, high], choices.log2_lr[(choices.log2_lr > low) & (choices.log2_lr < high)]]))
        loss = np.interp(grid, choices.log2_lr, np.minimum(choices.loss, ceiling))
        best = item.best_loss if math.isfinite(item.best_loss) else float(loss.min())
        values.append(max(0.0, float(np.trapezoid(loss, grid)) / (high - low) - best))
    return Sensitivity((low, high), ceiling, tuple(values))


def _bracket(choices: _Choices, item: CellOptimum) -> Interval:
    """Highest learning rate below every divergence, and lowest at which most runs diverge, above the best; infinite where none was met."""
    lost = choices.log2_lr[np.isinf(choices.loss)]
    best = item.log2_lr if math.isfinite(item.log2_lr) else -math.inf
    above = lost[lost > best]
    high = float(above.min()) if len(above) else math.inf
    stable = choices.log2_lr[np.isfinite(choices.loss) & (choices.log2_lr < high)]
    return (float(stable.max()) if len(stable) else -math.inf), high
