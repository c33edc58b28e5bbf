"""Where to look next for a cell's best learning rate: the point that shrinks its interval most, or that it is known well enough.

Owns `next_points`. Pure: the same runs give the same points, so that any driver, restarted at any moment, asks for the same ones. The
statistics are those of the report (`analysis.optimum`), with the curve's shape and steepness shared between sizes (`analysis.kin`).

A cell goes through three stages. It starts with three learning rates around where smaller (or other) cells have their optimum, or
spread over the range when there are none. While it has no curve, it is bracketed: beyond an edge, or between the best and its
wider neighbour. Then draws of the curve (`analysis.draws`) say what a loss at x would tell about the optimum: for draws of
optimum o and loss f(x), an observation with error variance v lowers the variance of o by cov(o, f)^2 / (var f + v).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from analysis import noise as noises
from analysis.draws import CellDraws
from analysis.kin import rise_of, shapes_of
from analysis.optimum import CellOptimum, Prepared, bracketed, conclude, prepare
from analysis.posterior import DISCREPANCY, UNKNOWN_RISE, Likelihood, Rise, likelihood, sigma_grid
from analysis.shapes import Array, library
from analysis.table import Cell

Reason = Literal["start", "bracket", "extend", "refine", "seed", "sampled"]
Stop = Literal["precise", "budget", "diverged", "edge"]
SPREAD = 1.25
"""Octaves from the expected optimum to the two outer learning rates of a cell's start."""
DRIFT_SD = 0.35
"""Octaves per doubling of size by which an optimum may move without its cells having said so; 1/2 is theory's smallest step."""
STRIDE = 1.5
"""Octaves beyond an edge."""
REACH = 1.5
"""Octaves beyond the sampled learning rates within which a new one is considered."""
BOTTOM = 1.75
"""Octaves from the optimum within which a learning rate tells of it: further out a curve's own error grows faster than its slope."""
TINY = 1e-18


@dataclass(frozen=True)
class SearchSettings:
    """What is asked of the search."""

    low: float
    high: float
    """log2 LRs within which a first cell starts."""
    precision: float = 0.15
    """Octaves: half the 90 % interval of log2 LR* at which a cell is done."""
    max_runs: int = 16
    """Runs of a cell at most."""
    lattice: float = 0.25
    """Octaves: learning rates are multiples of it, so that seeds meet."""
    max_seeds: int = 1000
    """Runs of one learning rate at most; 1 where a run cannot be given a seed."""
    floor: float = -40.0
    ceiling: float = 10.0
    """log2 LRs never left."""
    start: float | None = None
    """Where a first cell starts instead."""
    unit: float = 1.0
    """Octaves over which a loss changes as it does over one of the LR: how far apart the search looks."""


@dataclass(frozen=True)
class CellRuns:
    """The runs of one cell. size: log2 of its width (or of what tells cells apart); a loss that is not finite is a divergence."""

    size: float
    log2_lr: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()
    seed: tuple[int, ...] = ()
    bound: tuple[float, ...] = ()
    """Where a run was pruned, what its loss would at least have been; -inf at the others; empty when none was pruned."""
    pending: tuple[tuple[float, int], ...] = ()
    """(log2_lr, seed) of runs that are under way."""

    def __len__(self) -> int:
        return len(self.log2_lr) + len(self.pending)


@dataclass(frozen=True)
class Ask:
    """One run to make."""

    log2_lr: float
    seed: int
    reason: Reason


@dataclass(frozen=True)
class Done:
    """Why a cell gets no more runs; edge: its optimum lies at the end of what may be searched."""

    stop: Stop
    half_width: float
    """Of the 90 % interval, octaves; NaN when it is open."""


def next_points(cell: CellRuns, others: Sequence[CellRuns], settings: SearchSettings, count: int = 1) -> list[Ask] | Done:
    """Up to `count` runs that `cell` needs next, or why it needs none. others: cells of the same kind at other sizes."""
    if len(cell) >= settings.max_runs and not cell.pending:
        optimum = optimum_of(cell, others)
        precise = optimum is not None and optimum.half_width <= settings.precision
        return Done("precise" if precise else "budget", math.nan if optimum is None else optimum.half_width)
    room = min(count, settings.max_runs - len(cell))
    start = [ask for ask in _start(cell, others, settings) if (ask.log2_lr, ask.seed) not in _taken(cell)]
    if start:
        return start[:room]
    if not any(map(math.isfinite, cell.loss)):
        return _all_diverged(cell, settings)
    optimum = optimum_of(cell, others)
    if optimum is not None and optimum.censored is None and optimum.half_width <= settings.precision and not cell.pending:
        return Done("precise", optimum.half_width)
    if optimum is not None and not cell.pending and (ended := _at_end(cell, optimum, settings)) is not None:
        return ended
    if optimum is None or optimum.draws is None or optimum.noise is None:
        asks = _bracket(cell, settings, room)
        return asks if asks or cell.pending else Done("budget", math.nan)
    asks = _refine(cell, optimum.draws, settings, room)
    # Every learning rate near the bottom has had all its seeds.
    return asks if asks or cell.pending else Done("budget", optimum.half_width)


def _at_end(cell: CellRuns, optimum: CellOptimum, settings: SearchSettings) -> list[Ask] | Done | None:
    """Where the best value lies at the end of what may be searched: runs nearer and nearer to it, until one of them is worse."""
    tried = sorted(set(cell.log2_lr))
    ends = {
        "low": (tried[0], tried[1], tried[0] <= settings.floor),
        "high": (tried[-1], tried[-2], tried[-1] >= settings.ceiling),
    }
    end, neighbour, reached = ends.get(optimum.censored or "", (0.0, 0.0, False))
    if not reached:
        return None
    middle = _on_lattice((end + neighbour) / 2, settings)
    if abs(end - neighbour) <= 0.5 * settings.unit or middle in tried:
        return Done("edge", math.nan)
    return [Ask(middle, 0, "bracket")]


def _taken(cell: CellRuns) -> set[tuple[float, int]]:
    return {*zip(cell.log2_lr, cell.seed, strict=True), *cell.pending}


def _on_lattice(log2_lr: float, settings: SearchSettings) -> float:
    return float(np.clip(round(log2_lr / settings.lattice) * settings.lattice, settings.floor, settings.ceiling))


def _start(cell: CellRuns, others: Sequence[CellRuns], settings: SearchSettings) -> list[Ask]:
    """The first learning rates of a cell; a cell that has runs keeps the start that it was given."""
    if cell.log2_lr and len(set(cell.log2_lr)) + len({lr for lr, _ in cell.pending}) >= 3:
        return []
    known = [
        (other.size, found) for other in others if (found := optimum_of(other, [])) is not None and math.isfinite(found.log2_lr)
    ]
    if known:
        centre, spread = _expected(cell.size, known, settings.unit)
        rates = [centre, centre - spread, centre + spread]
    elif settings.start is not None:
        rates = [settings.start, settings.start - SPREAD * settings.unit, settings.start + SPREAD * settings.unit]
    else:
        span = settings.high - settings.low
        rates = [settings.low + share * span for share in (0.5, 0.2, 0.8)]
    return [Ask(rate, 0, "start") for rate in dict.fromkeys(_on_lattice(rate, settings) for rate in rates)]


def _expected(size: float, known: Sequence[tuple[float, CellOptimum]], unit: float) -> tuple[float, float]:
    """Where other cells let expect the optimum, and how far out to look: a line through theirs, with a prior of no drift."""
    sizes = np.array([at - size for at, _ in known])
    optima = np.array([found.log2_lr for _, found in known])
    errors = np.array([found.half_width if math.isfinite(found.half_width) else 1.0 for _, found in known])
    weights = 1 / (errors**2 + 0.1**2)
    design = np.stack([np.ones_like(sizes), sizes], axis=1)
    precision = design.T @ (weights[:, None] * design) + np.diag([1e-6, (DRIFT_SD * unit) ** -2])
    covariance = np.linalg.inv(precision)
    centre = float(covariance[0] @ (design.T @ (weights * optima)))
    return centre, max(SPREAD * unit, 1.6 * math.sqrt(covariance[0, 0]))


def _all_diverged(cell: CellRuns, settings: SearchSettings) -> list[Ask] | Done:
    lowest = min([*cell.log2_lr, *(lr for lr, _ in cell.pending)])
    lower = _on_lattice(lowest - 2 * STRIDE * settings.unit, settings)
    if cell.pending:
        return []
    return [Ask(lower, 0, "extend")] if lower < lowest else Done("diverged", math.nan)


def _bracket(cell: CellRuns, settings: SearchSettings, room: int) -> list[Ask]:
    """Too few points near the bottom for a curve: beyond an edge, or in the middle of the wider gap next to the best."""
    if cell.pending:
        return []
    finite = [(loss, lr) for lr, loss in zip(cell.log2_lr, cell.loss, strict=True) if math.isfinite(loss)]
    best = min(finite)[1]
    tried = sorted(set(cell.log2_lr))
    below = [lr for lr in tried if lr < best]
    above = [lr for lr in tried if lr > best]
    asks: list[Ask] = []
    if not below:
        asks.append(Ask(_on_lattice(best - STRIDE * settings.unit, settings), 0, "extend"))
    if not above:
        asks.append(Ask(_on_lattice(best + STRIDE * settings.unit, settings), 0, "extend"))
    if below and above:
        gaps = sorted([(best - below[-1], (best + below[-1]) / 2), (above[0] - best, (best + above[0]) / 2)], reverse=True)
        asks += [Ask(_on_lattice(middle, settings), 0, "bracket") for _, middle in gaps]
    taken = _taken(cell)
    fresh = [ask for ask in asks if (ask.log2_lr, ask.seed) not in taken]
    if fresh:
        return fresh[:room]
    if settings.max_seeds == 1:
        return []
    # The lattice is used up around the best: what is missing is another seed.
    seed = 1 + max(cell.seed)
    return [Ask(lr, seed, "seed") for lr in (best, *below[-1:], *above[:1])][:room]


def _refine(cell: CellRuns, draws: CellDraws, settings: SearchSettings, room: int) -> list[Ask]:
    """The runs that lower the variance of the optimum most, one after the other, those under way taken as made."""
    grid = _candidates(draws, settings)
    curves = _curves(draws, grid)
    # Second moments of (optimum, f(grid)): observing f at one point conditions all of them.
    joint = np.column_stack([draws.optimum - draws.optimum.mean(), curves - curves.mean(axis=0)])
    covariance = joint.T @ joint / len(joint)
    noise = float(np.mean(draws.sigma**2))
    rise = np.maximum(0.0, np.median(curves, axis=0) - float(np.median(draws.level)))
    bias = (DISCREPANCY * rise) ** 2
    taken = _taken(cell)
    runs = np.array([sum(lr == rate for lr, _ in taken) for rate in grid], dtype=float)
    for log2_lr, _ in cell.pending:
        at = int(np.abs(grid - log2_lr).argmin())
        runs[at] -= 1
        covariance = _observed(covariance, at, _error(noise, bias, runs)[at])
        runs[at] += 1
    asks: list[Ask] = []
    while len(asks) < room:
        error = _error(noise, bias, runs)
        gain = covariance[0, 1:] ** 2 / np.maximum(np.diag(covariance)[1:] + error, TINY)
        gain[runs >= settings.max_seeds] = -1.0
        at = int(gain.argmax())
        if gain[at] < 0:
            break
        seed = next(seed for seed in range(len(taken) + 1) if (float(grid[at]), seed) not in taken)
        asks.append(Ask(float(grid[at]), seed, "refine" if seed == 0 else "seed"))
        covariance = _observed(covariance, at, error[at])
        taken.add((float(grid[at]), seed))
        runs[at] += 1
    return asks


def _error(noise: float, bias: Array, runs: Array) -> Array:
    """Error variance of one more run where `runs` have been made: the curve's own error there is shared by all of them.

    n runs know the curve to noise / n + bias; one more is worth the difference of the precisions.
    """
    before = np.where(runs > 0, 1 / (noise / np.maximum(runs, 1) + bias + TINY), 0.0)
    return np.asarray(1 / np.maximum(1 / (noise / (runs + 1) + bias + TINY) - before, TINY))


def _observed(covariance: Array, at: int, error: float) -> Array:
    column = covariance[:, at + 1]
    return np.asarray(covariance - np.outer(column, column) / max(column[at + 1] + error, TINY))


def _candidates(draws: CellDraws, settings: SearchSettings) -> Array:
    """The lattice around the optimum's draws, where a run will belong to the bottom of the curve."""
    low, high = np.quantile(draws.optimum, (0.05, 0.95))
    bottom, reach = BOTTOM * settings.unit, REACH * settings.unit
    low = max(float(low) - bottom, float(draws.sampled_lr.min()) - reach, settings.floor)
    high = min(float(high) + bottom, float(draws.sampled_lr.max()) + reach, settings.ceiling)
    if math.isfinite(draws.first_diverged):
        high = min(high, draws.first_diverged - settings.lattice)
    first, last = math.ceil(low / settings.lattice), math.floor(high / settings.lattice)
    return np.asarray(np.arange(first, max(last, first) + 1) * settings.lattice)


def _curves(draws: CellDraws, grid: Array) -> Array:
    """Loss of every draw at every candidate, shape (draws, candidates)."""
    values = np.empty((len(draws.optimum), len(grid)))
    u = grid - draws.optimum[:, None]
    for index in np.unique(draws.shape):
        chosen = draws.shape == index
        values[chosen] = library()[0][int(index)](u[chosen])
    return np.asarray(draws.level[:, None] + draws.scale[:, None] * values)


def optimum_of(cell: CellRuns, others: Sequence[CellRuns]) -> CellOptimum | None:
    """The cell's optimum, what `others` say of noise and curve taken into account; None without a finite loss.

    others: cells of the same kind at other sizes, each known by those before it. Only its curve is shared, never the place of its optimum.
    """
    return _optimum_of(cell, tuple(others))


@lru_cache(maxsize=1024)
def _optimum_of(cell: CellRuns, others: tuple[CellRuns, ...]) -> CellOptimum | None:
    finite = [loss for loss in cell.loss if math.isfinite(loss)]
    if not finite:
        return None
    # One scale of noise values for all cells, the nearest power of two: it only says where they are weighed.
    scale = 2.0 ** round(math.log2(max(abs(min(finite)), 1e-9)))
    known = [(other, found) for at, other in enumerate(others) if (found := _optimum_of(other, others[:at])) is not None]
    prepared, own = _fit(cell, scale, rise_of([draws for _, found in known if (draws := found.steepness) is not None]))
    if own is None:
        return bracketed(prepared)
    fits = [fit for other, _ in known if (fit := _fit(other, scale, UNKNOWN_RISE)[1]) is not None]
    predicted, _ = noises.pool([noises.evidence(fit) for fit in (own, *fits)], own.sigmas, scale)
    log_sigma = np.log(predicted[0] + 1e-300)
    log_shape = shapes_of([fit.shapes(log_sigma) for fit in fits])
    return conclude(prepared, own, log_sigma, "the scatter about the curves of these cells, pooled", log_shape)


def _bounds(cell: CellRuns) -> Array | None:
    return np.array(cell.bound) if cell.bound else None


@lru_cache(maxsize=64)
def _fit(cell: CellRuns, scale: float, rise: Rise) -> tuple[Prepared, Likelihood | None]:
    prepared = prepare(Cell(), np.array(cell.log2_lr), np.array(cell.loss), np.array(cell.seed, dtype=np.int64), _bounds(cell))
    return prepared, None if prepared.data is None else likelihood(prepared.data, sigma_grid(scale), rise)


__all__ = ["Ask", "CellRuns", "Done", "SearchSettings", "next_points", "optimum_of"]
