"""Where learning rates stop to train: the lowest one that diverged at each size and batch, against the best one.

Owns `frontier`. A run is lost when it diverged or ended a fifth above its cell's best, at a learning rate above the best one of
its batch; each pair of highest kept and lowest lost learning rate brackets the boundary. Diverged runs say nothing else: they
are not in the fits of the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.batch_table import SAME, GridCell
from analysis.law import Array

WALL = 0.2
"""Rise over the cell's best loss from which a run counts as lost, as a share of it."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Brackets (m,) of the boundary. below, above: highest lr kept and lowest lost; best: the cell's best lr; batch: NaN
    without one; cell: which.
    """

    below: Array
    above: Array
    best: Array
    batch: Array
    cell: Array
    untouched: int
    """Size and batch pairs in which no learning rate above the best was lost."""

    @property
    def factors(self) -> Array:
        """Boundary over the cell's best lr, at the bracket's geometric middle."""
        return np.asarray(np.sqrt(self.below * self.above) / self.best)

    def __str__(self) -> str:
        if not len(self.above):
            return f"no learning rate above the best was lost at any of {self.untouched} sizes and batches"
        low, middle, high = np.quantile(self.factors, [0.1, 0.5, 0.9])
        places = f"80 % of {len(self.above)} sizes and batches: {low:.3g} to {high:.3g}"
        text = f"runs are lost from {middle:.3g} times the best learning rate of their size on ({places})"
        return text + (f"; at {self.untouched} none was lost" if self.untouched else "")

    def to_dict(self) -> dict[str, Any]:
        low, middle, high = np.quantile(self.factors, [0.1, 0.5, 0.9]) if len(self.above) else (np.nan,) * 3
        return {
            "brackets": len(self.above),
            "untouched": self.untouched,
            "factor": float(middle),
            "factor_range": [float(low), float(high)],
        }


def frontier(cells: Sequence[GridCell]) -> Frontier | None:
    """Brackets over all cells and batches; None where the learning rate was not varied."""
    if "lr" not in cells[0].knobs:
        return None
    knob = cells[0].knobs.index("lr")
    other = 1 - knob if len(cells[0].knobs) > 1 else None
    rows, untouched = [], 0
    for index, cell in enumerate(cells):
        places = np.concatenate([cell.logs, cell.lost])
        lost = np.concatenate([cell.rise > WALL, np.ones(len(cell.lost), dtype=bool)])
        loss = np.concatenate([cell.loss, np.full(len(cell.lost), np.inf)])
        batches = np.unique(places[:, other].round(9)) if other is not None else np.array([np.nan])
        for batch in batches:
            mine = np.abs(places[:, other] - batch) < SAME if other is not None else np.ones(len(places), dtype=bool)
            if not (mine & ~lost).any():
                continue
            best = places[mine, knob][int(loss[mine].argmin())]
            above = places[mine & lost & (places[:, knob] > best), knob]
            if not len(above):
                untouched += 1
                continue
            kept = places[mine & ~lost & (places[:, knob] < above.min()), knob]
            rows.append((kept.max(), above.min(), cell.best[knob], batch, index))
    table = np.array(rows).reshape(-1, 5)
    below, above, best, batch = np.exp(table[:, :4]).T
    return Frontier(below, above, best, batch, table[:, 4], untouched)
