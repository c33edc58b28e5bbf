"""What a study measured beside the run that a recommendation starts from: levels of tokens, batch and depth, and best losses of cells.

Owns Measured, `measured_of` and `extrapolation`. Levels are tokens, tokens a step, and layers; losses are nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.axes import AxisFit
from analysis.optimum import CellOptimum
from analysis.transfer import TransferFit
from scaling.config import RunConfig

FAR = 10.0
"""Extrapolation beyond this factor is warned about."""
COLUMNS: Mapping[str, str] = {"depth": "depth", "tokens": "tokens", "batch": "batch_tokens"}
"""What an axis is called in words, and the column that tells its levels apart."""


@dataclass(frozen=True)
class Measured:
    """levels: of "depth", "tokens" and "batch", smallest first, the study's own among them; widths: those with an interior best LR."""

    levels: Mapping[str, tuple[float, ...]]
    widths: tuple[int, ...]
    cells: tuple[CellOptimum, ...]

    def at(self, width: int, depth: int, batch_tokens: float, tokens: float) -> CellOptimum | None:
        """The cell of these sizes with a finite best loss, where there is one."""
        wanted = {"width": width, "depth": depth, "batch_tokens": batch_tokens, "tokens": tokens}
        for item in self.cells:
            if math.isfinite(item.best_loss) and all(item.cell.size(name) == value for name, value in wanted.items()):
                return item
        return None

    def several(self, axis: str) -> bool:
        return len(self.levels[axis]) > 1

    def words(self, axis: str) -> str:
        """The levels of an axis, for a message."""
        levels = self.levels[axis]
        ends = f"{levels[0]:,.0f}" if len(levels) == 1 else f"{levels[0]:,.0f} to {levels[-1]:,.0f}"
        return f"measured at {ends}" if len(levels) > 1 else f"measured at {ends} alone"


def measured_of(template: RunConfig, fit: TransferFit, axes: Sequence[AxisFit]) -> Measured:
    """What `fit` over widths and every other axis of a study measured, with the study's own run `template`."""
    own = {"depth": template.model.depth, "tokens": template.tokens, "batch": template.batch_tokens}
    levels = {name: {float(value)} for name, value in own.items()}
    optima = list(fit.optima)
    for axis in axes:
        if not axis.is_line:
            optima += axis.transfer.optima
    for item in optima:
        for name, column in COLUMNS.items():
            levels[name] |= {size for size in [item.cell.size(column)] if math.isfinite(size)}
    widths = sorted({item.width for item in fit.optima if item.usable})
    return Measured({name: tuple(sorted(found)) for name, found in levels.items()}, tuple(widths), tuple(optima))


def factor_beyond(value: float, levels: Sequence[float]) -> float:
    """`value` over the largest of `levels`, or over the smallest where it lies below; 1 in between."""
    low, high = min(levels), max(levels)
    return value / high if value > high else value / low if value < low else 1.0


def extrapolation(measured: Measured, width: int, depth: int, tokens: float, batch_tokens: float) -> dict[str, float]:
    """How far a run lies beyond what was measured, an axis each: see `factor_beyond`."""
    sizes: dict[str, float] = {"depth": depth, "tokens": tokens, "batch": batch_tokens}
    found = {"width": factor_beyond(width, measured.widths)}
    return found | {name: factor_beyond(size, measured.levels[name]) for name, size in sizes.items()}


def far_warnings(factors: Mapping[str, float]) -> list[str]:
    """A sentence for every axis that is extrapolated beyond FAR."""
    return [
        f"{axis} {'lie' if axis == 'tokens' else 'lies'} x{factor_text(factor)} from what was measured, beyond x{FAR:g}"
        for axis, factor in factors.items()
        if factor > FAR or factor < 1 / FAR
    ]


def factor_text(ratio: float) -> str:
    """A ratio in three or four digits, without an exponent of ten."""
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.4g}"
