"""What a study varies beside width and LR: other hyperparameters with an optimum of their own, and depths, batches and tokens.

Owns AxisFit, and its two makers, `line_transfer` and `level_transfer`. A line is runs of one size at one LR that differ in one
hyperparameter; its log2 takes the place of log2 LR, and everything that holds for LR curves (fit, interval, censoring, equivalence test,
regret) holds for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from analysis.optimum import cell_optima
from analysis.results import Interval, json_safe
from analysis.table import CELL_COLUMNS, RunTable, at_own
from analysis.transfer import REGRET_TOLERANCE, SLOPE_TOLERANCE, TransferFit, transfer, transfer_of_optima
from scaling.errors import DataError, Fault
from scaling.hyperparameters import HYPERPARAMETERS

if TYPE_CHECKING:
    import pandas as pd

LEVEL_COLUMNS = CELL_COLUMNS[2:]


@dataclass(frozen=True)
class AxisFit:
    """One axis of one parametrization: a hyperparameter over widths, or the LR over depths, batches or tokens."""

    name: str
    """A hyperparameter's, or the column of the table that tells levels apart."""
    transfer: TransferFit
    log2_lrs: Mapping[int, float] = field(default_factory=dict)
    """lines: width -> the LR that is held."""

    @property
    def is_line(self) -> bool:
        return self.name in HYPERPARAMETERS

    def best(self, width: int) -> tuple[float, Interval] | None:
        """The best value at `width` with its 90 % interval, in the hyperparameter's own unit; None unless it is interior."""
        found = next((item for item in self.transfer.optima if item.width == width and item.usable), None)
        if found is None:
            return None
        hyperparameter = HYPERPARAMETERS[self.name]
        ends = sorted(hyperparameter.value(end) for end in found.interval)
        return hyperparameter.value(found.log2_lr), (ends[0], ends[1])

    def to_dict(self) -> dict[str, Any]:
        """TransferFit's; lines: with each optimum's value in the hyperparameter's own unit and the LR that was held."""
        document = self.transfer.to_dict()
        if not self.is_line:
            return document
        for row, item in zip(document["optima"], self.transfer.optima, strict=True):
            best = self.best(item.width)
            row |= {
                "log2_value": row.pop("log2_lr"),
                "value": None if best is None else best[0],
                "value_interval": None if best is None else list(best[1]),
                "at_log2_lr": self.log2_lrs[item.width],
            }
        document["regret"]["log2_value"] = document["regret"].pop("log2_lr")
        return dict(json_safe(document))

    def __str__(self) -> str:
        return str(self.transfer)


def varied(table: RunTable) -> tuple[str, ...]:
    """The hyperparameters that a table has lines of."""
    return tuple(table.own)


def line_table(table: RunTable, name: str) -> RunTable:
    """The lines of one hyperparameter: of every size, the runs at the LR at which it takes most values, all else as `table.own` says.

    Raises DataError when the table has none.
    """
    import pandas as pd

    if table.whole is None or name not in table.own:
        known = ", ".join(table.own) or "nothing beside sizes and learning rates"
        raise DataError(Fault(f"axis {name!r}", "was not varied at the same size and learning rate", f"varied: {known}"))
    rows = table.whole[at_own(table.whole, {other: values for other, values in table.own.items() if other != name})]
    rows = rows.assign(**{name: rows[name].fillna(rows["parametrization"].map(table.own[name]))})
    lines = [_line(cell, name) for _, cell in rows.groupby(list(CELL_COLUMNS), dropna=False, sort=True)]
    frame = pd.concat([line for line in lines if line is not None], ignore_index=True)
    hyperparameter = HYPERPARAMETERS[name]
    positions = frame[name].map(hyperparameter.coordinate)
    return RunTable(frame.assign(log2_lr=positions.round(9)), table.notes, quantity=hyperparameter.words)


def _line(cell: pd.DataFrame, name: str) -> pd.DataFrame | None:
    """The runs of a cell at the LR at which `name` takes most values, the LR with the lower loss where two do; None with one value."""
    by_rate = cell.groupby("log2_lr").agg(values=(name, "nunique"), loss=("loss", "min"))
    best = by_rate.sort_values(["values", "loss"], ascending=[False, True]).iloc[0]
    return cell[cell["log2_lr"] == best.name] if best["values"] > 1 else None


def line_transfer(
    table: RunTable, name: str, *, slope_tolerance: float = SLOPE_TOLERANCE, regret_tolerance: float = REGRET_TOLERANCE
) -> dict[str, AxisFit]:
    """Judge one hyperparameter over the widths of every parametrization; slope_tolerance: octaves of it a doubling of the width."""
    lines = line_table(table, name)
    fits = transfer(lines, slope_tolerance=slope_tolerance, regret_tolerance=regret_tolerance)
    held: dict[str, dict[int, float]] = {}
    for kind, width, lr in zip(*(lines.frame[column] for column in ("parametrization", "width", "lr")), strict=True):
        held.setdefault(str(kind), {})[round(float(width))] = math.log2(lr)
    return {kind: AxisFit(name, fit, held[kind]) for kind, fit in fits.items()}


def levels(table: RunTable) -> tuple[str, ...]:
    """The columns beside width in which cells differ: depth, batch_tokens, tokens."""
    return tuple(name for name in LEVEL_COLUMNS if table.frame[name].nunique() > 1)


def level_transfer(
    table: RunTable, column: str, *, at: Mapping[str, float] | None = None, slope_tolerance: float = SLOPE_TOLERANCE,
    regret_tolerance: float = REGRET_TOLERANCE,
) -> dict[str, AxisFit]:  # fmt: skip
    """Whether the best LR stays over depths, batches or tokens, at one level of all else (see `analysis.transfer.transfer`)."""
    at = {name: value for name, value in (at or {}).items() if name != column}
    tolerances = {"slope_tolerance": slope_tolerance, "regret_tolerance": regret_tolerance}
    fits = transfer_of_optima(cell_optima(table), axis=column, at=at, **tolerances)
    return {kind: AxisFit(column, fit) for kind, fit in fits.items()}


def fit_axes(
    table: RunTable, at: Mapping[str, float] | None = None, *, slope_tolerance: float = SLOPE_TOLERANCE,
    regret_tolerance: float = REGRET_TOLERANCE,
) -> dict[str, dict[str, AxisFit]]:  # fmt: skip
    """{axis: {parametrization: fit}} of every axis that a table has beside width."""
    found = {
        name: line_transfer(table, name, slope_tolerance=slope_tolerance, regret_tolerance=regret_tolerance)
        for name in varied(table)
    }
    for column in levels(table):
        found[column] = level_transfer(table, column, at=at, slope_tolerance=slope_tolerance, regret_tolerance=regret_tolerance)
    return found
