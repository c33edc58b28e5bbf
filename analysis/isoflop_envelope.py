"""The lower envelope of runs over compute (Hoffmann et al.'s approach 1): which size has the lowest loss at each FLOP.

Owns `envelope`. With training curves, every FLOP has a winner among the runs that pass through it; a run that wins counts once, at the
middle (in logs) of where it wins: runs are the units, not checkpoints. Without curves, the lowest run of each budget is taken, or, where
compute is scattered, every run that no cheaper one beats. A winner that is the smallest or largest size there was is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.fit_table import FitTable
from analysis.isoflop import group_rows
from analysis.isoflop_curve import SIZES
from analysis.isoflop_law import PowerLaw, fit_power
from analysis.laws import Array
from scaling.errors import DataError, Fault

GRID = 400
"""FLOP, evenly spaced in logs, at which curves are compared."""
NEAR = 3.0
"""Factor of FLOP, either way, within which scattered runs compete."""
POINTS = 3


@dataclass(frozen=True, eq=False)
class Envelope:
    """Points of the envelope (k,), and the laws through them by plain least squares of logs; flags: what casts doubt, in words."""

    flops: Array
    params: Array
    tokens: Array
    loss: Array
    params_law: PowerLaw
    tokens_law: PowerLaw
    ratio_law: PowerLaw
    detail: str
    flags: tuple[str, ...]


def envelope(rows: FitTable, tolerance: float, level: float, *, curves: bool) -> Envelope:
    """The envelope of a table; curves: its groups are runs with all their checkpoints. Raises DataError with fewer than three points."""
    found, edges, what = _of_curves(rows) if curves else _of_runs(rows, tolerance)
    if len(found) < POINTS:
        where = f"{len(found)} points and {edges} at an edge of the sizes: a law needs {POINTS}"
        raise DataError(Fault("approach 1", f"the envelope of {what} has {where}", "run more sizes at each FLOP"))
    flops, params, tokens, loss = np.exp(np.array(found)).T
    laws = [fit_power(flops, values, level=level) for values in (params, tokens, tokens / params)]
    if laws[0] is None or laws[1] is None or laws[2] is None:
        raise DataError(Fault("approach 1", "all points of the envelope have the same FLOP", "run several budgets"))
    detail = f"{len(found)} points of the envelope of {what}, {edges} more left out at an edge of the sizes"
    flags = []
    if (span := flops.max() / flops.min()) < 10:
        flags.append(f"the envelope spans a factor of {span:.3g} of FLOP, under a decade")
    return Envelope(flops, params, tokens, loss, laws[0], laws[1], laws[2], detail, tuple(flags))


Point = tuple[float, float, float, float]
"""Logs of FLOP, parameters, tokens and loss."""


def _of_runs(rows: FitTable, tolerance: float) -> tuple[list[Point], int, str]:
    params, flops = rows.columns["params"], rows.columns["flops"]
    groups = [group for group in group_rows(flops, tolerance) if len(np.unique(params[group])) >= SIZES]
    if len(groups) >= POINTS:
        winners = [(int(group[np.argmin(rows.loss[group])]), group) for group in groups]
        what = "the lowest run of each budget"
    else:
        winners = [(row, np.flatnonzero(np.abs(np.log(flops / flops[row])) <= np.log(NEAR))) for row in _records(rows)]
        what = "runs that no cheaper one beats"
    kept = [row for row, rivals in winners if _inner(params[row], params[rivals])]
    columns = [np.log(values) for values in (flops, params, rows.columns["tokens"], rows.loss)]
    points: list[Point] = [(*(float(column[row]) for column in columns),) for row in kept]  # type: ignore[misc]
    return points, len(winners) - len(kept), what


def _records(rows: FitTable) -> list[int]:
    """Rows with a lower loss than every cheaper row."""
    order = np.lexsort((rows.loss, rows.columns["flops"]))
    best = np.concatenate([[np.inf], np.minimum.accumulate(rows.loss[order])[:-1]])
    return [int(row) for row in order[rows.loss[order] < best]]


def _inner(size: float, rivals: Array) -> bool:
    return bool(len(np.unique(rivals)) >= SIZES and rivals.min() < size < rivals.max())


def _of_curves(rows: FitTable) -> tuple[list[Point], int, str]:
    assert rows.groups is not None, "curves are groups"
    flops = np.log(rows.columns["flops"])
    runs: list[NDArray[np.intp]] = [np.flatnonzero(rows.groups == name) for name in np.unique(rows.groups)]
    runs = [run[np.argsort(flops[run], kind="stable")] for run in runs]
    grid = np.linspace(flops.min(), flops.max(), GRID)
    losses = np.array([np.interp(grid, flops[run], np.log(rows.loss[run]), left=np.inf, right=np.inf) for run in runs])
    params = np.array([np.log(rows.columns["params"][run[0]]) for run in runs])
    winners = np.argmin(losses, axis=0)
    inner = np.array([_inner(params[best], params[np.isfinite(losses[:, at])]) for at, best in enumerate(winners)])
    points: list[Point] = []
    for index in np.unique(winners[inner]):
        won, run = grid[inner & (winners == index)], runs[int(index)]
        middle = float((won[0] + won[-1]) / 2)
        tokens = float(np.interp(middle, flops[run], np.log(rows.columns["tokens"][run])))
        loss = float(np.interp(middle, flops[run], np.log(rows.loss[run])))
        points.append((middle, float(params[index]), tokens, loss))
    return (
        points,
        len(np.unique(winners)) - len(points),
        f"{len(runs)} training curves, taken as if each checkpoint had ended there",
    )
