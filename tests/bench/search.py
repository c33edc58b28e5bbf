"""The adaptive search on simulated studies with a known truth, beside a full grid, and Optuna's TPE and GP at equal compute.

A surface has one of `analysis.simulation`'s curves at every width, its steepness and its optimum scattered about their line, a cliff above
which runs diverge, seeds with levels of their own, and bumps that no curve of the fit has. Compute is in runs of the largest width,
a run's cost going with the square of its width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.optimum import cell_optima
from analysis.results import text_table
from analysis.search import CellRuns, Done, SearchSettings, next_points
from analysis.simulation import BEST_LOSS, SEED_SD, TRUTHS
from analysis.table import load_table
from sweeps.optuna_search import next_by_optuna

WIDTHS = (64, 128, 256, 512)
NOISES = (0.001, 0.005, 0.01, 0.02)
DRIFTS = (0.0, -0.5, -1.0)
GRID = tuple(float(rate) for rate in np.arange(-12.5, -1.0, 1.0))
START = (-12.0, -4.0)
MAX_RUNS = 6
PRECISION = 0.1
BUMPS = 0.3
"""Amplitude of the bumps over the noise of a run."""


class Outcome(NamedTuple):
    """One cell: error of log2 LR*, whether the interval held the truth, half the interval, what it cost."""

    error: float
    held: bool
    half_width: float
    runs: int
    compute: float


@dataclass
class Surface:
    """Losses of one simulated study; a run made again gives the same loss."""

    truth: str
    drift: float
    noise: float
    random: np.random.Generator
    _losses: dict[tuple[int, float, int], float] = field(default_factory=dict)
    _levels: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = self.random
        place = draw.uniform(-9, -6)
        self.optimum = {width: place + self.drift * math.log2(width / 64) + 0.1 * draw.standard_normal() for width in WIDTHS}
        self._steepness = {width: math.exp(0.2 * draw.standard_normal()) for width in WIDTHS}
        self._phase = {width: draw.uniform(0, 2 * math.pi) for width in WIDTHS}
        self._cliff = draw.uniform(1.8, 4.0)

    def loss(self, width: int, log2_lr: float, seed: int) -> float:
        key = (width, round(log2_lr, 9), seed)
        if key not in self._losses:
            self._losses[key] = self._run(width, log2_lr, seed)
        return self._losses[key]

    def _run(self, width: int, log2_lr: float, seed: int) -> float:
        u = log2_lr - self.optimum[width]
        if u > self._cliff:
            return math.inf
        level = self._levels.setdefault((width, seed), SEED_SD * self.random.standard_normal())
        bump = BUMPS * self.noise * math.sin(2 * math.pi * u / 1.7 + self._phase[width])
        rise = self._steepness[width] * float(TRUTHS[self.truth](np.array([u]))[0])
        return BEST_LOSS - 0.1 * math.log2(width / 64) + level + rise + bump + self.noise * self.random.standard_normal()


def cost(width: int) -> float:
    return (width / WIDTHS[-1]) ** 2


def limits(max_runs: int) -> dict[int, int]:
    return {width: round(max_runs * min(3.0, math.sqrt(WIDTHS[-1] / width))) for width in WIDTHS}


def by_search(surface: Surface, precision: float = PRECISION, max_runs: int = MAX_RUNS) -> tuple[list[Outcome], dict[int, int]]:
    """Our search, as a study runs it, and the report's analysis; and how many runs each width took."""
    cells: dict[int, CellRuns] = {}
    for width in WIDTHS:
        settings = SearchSettings(*START, precision=precision, max_runs=limits(max_runs)[width])
        smaller = tuple(cells.values())
        cells[width] = _searched(
            surface, width, lambda cell, smaller=smaller, settings=settings: next_points(cell, smaller, settings, 2)
        )
    runs = {width: list(zip(cell.log2_lr, cell.loss, cell.seed, strict=True)) for width, cell in cells.items()}
    return _analysed(surface, runs), {width: len(cell) for width, cell in cells.items()}


def _searched(surface: Surface, width: int, choose: Callable[[CellRuns], object]) -> CellRuns:
    cell = CellRuns(math.log2(width))
    while not isinstance(step := choose(cell), Done):
        assert isinstance(step, list), "a search asks or is done"
        assert step, "nothing is under way here"
        cell = replace(
            cell,
            log2_lr=(*cell.log2_lr, *(ask.log2_lr for ask in step)),
            loss=(*cell.loss, *(surface.loss(width, ask.log2_lr, ask.seed) for ask in step)),
            seed=(*cell.seed, *(ask.seed for ask in step)),
        )
    return cell


Runs = dict[int, list[tuple[float, float, int]]]
"""Width -> (log2 LR, loss, seed) of its runs."""


def by_grid(surface: Surface) -> list[Outcome]:
    """12 learning rates x 3 seeds at every width, and the report's analysis."""
    runs = {width: [(rate, surface.loss(width, rate, seed), seed) for rate in GRID for seed in range(3)] for width in WIDTHS}
    return _analysed(surface, runs)


def by_optuna(surface: Surface, kind: str, counts: dict[int, int]) -> tuple[list[Outcome], list[Outcome]]:
    """Optuna's sampler within the grid's range, as many runs as our search took: its best trial, and its runs as the report fits them."""
    runs: Runs = {}
    best = []
    for width in WIDTHS:
        settings = SearchSettings(GRID[0], GRID[-1], max_runs=counts[width])
        cell = _searched(surface, width, lambda cell, settings=settings: next_by_optuna(kind, cell, settings, 1))
        runs[width] = list(zip(cell.log2_lr, cell.loss, cell.seed, strict=True))
        error = min((loss, rate) for rate, loss, _ in runs[width])[1] - surface.optimum[width]
        best.append(Outcome(error, False, math.nan, len(cell), len(cell) * cost(width)))
    return best, _analysed(surface, runs)


def _analysed(surface: Surface, runs: Runs) -> list[Outcome]:
    rows = [
        {"width": width, "log2_lr": rate, "loss": loss, "seed": seed}
        for width, items in runs.items()
        for rate, loss, seed in items
    ]
    outcomes = []
    for optimum in cell_optima(load_table(pd.DataFrame(rows).assign(parametrization="mup"))):
        true, count = surface.optimum[optimum.width], len(runs[optimum.width])
        low, high = optimum.interval
        held = low <= true <= high
        outcomes.append(Outcome(optimum.log2_lr - true, held, optimum.half_width, count, count * cost(optimum.width)))
    return outcomes


def surfaces(noise: float, repeats: int, seed: int = 5) -> Iterator[Surface]:
    random = np.random.default_rng(seed)
    for _ in range(repeats):
        for truth in TRUTHS:
            for drift in DRIFTS:
                yield Surface(truth, drift, noise, np.random.default_rng(random.integers(2**63)))


def rms(outcomes: Sequence[Outcome]) -> float:
    """Of the errors of log2 LR*, octaves; cells whose optimum was not found are left out."""
    return math.sqrt(float(np.nanmean([item.error**2 for item in outcomes])))


def report(repeats: int = 1, gp_surfaces: int = 6) -> None:
    """Print the table, a noise after the other."""
    for noise in NOISES:
        started = time.perf_counter()
        found: dict[str, list[Outcome]] = {}
        everyone = list(surfaces(noise, repeats))
        for at, surface in enumerate(everyone):
            outcomes, counts = by_search(surface)
            found.setdefault("adaptive", []).extend(outcomes)
            found.setdefault("grid, 12 LRs x 3 seeds", []).extend(by_grid(surface))
            for kind in ("tpe", *(("gp",) if at % max(1, len(everyone) // gp_surfaces) == 0 else ())):
                best, fitted = by_optuna(surface, kind, counts)
                found.setdefault(f"{kind}, its best trial", []).extend(best)
                found.setdefault(f"{kind}, fitted as the report does", []).extend(fitted)
        print(f"\nnoise {noise:g} nats, {len(everyone)} studies of {len(WIDTHS)} cells ({time.perf_counter() - started:.0f} s)")
        print(_table(found), flush=True)


def _table(found: dict[str, list[Outcome]]) -> str:
    head = ("method", "cells", "rms error", "median", "coverage", "half interval", "runs a cell", "compute a study", "not found")
    rows = []
    for name, outcomes in found.items():
        errors = np.array([item.error for item in outcomes])
        intervals = not all(math.isnan(item.half_width) for item in outcomes)
        rows.append(
            (
                name,
                str(len(outcomes)),
                f"{rms(outcomes):.3f}",
                f"{np.nanmedian(np.abs(errors)):.3f}",
                f"{100 * np.mean([item.held for item in outcomes]):.0f} %" if intervals else "-",
                f"{np.nanmedian([item.half_width for item in outcomes]):.2f}" if intervals else "-",
                f"{np.mean([item.runs for item in outcomes]):.1f}",
                f"{len(WIDTHS) * np.mean([item.compute for item in outcomes]):.1f}",
                str(int((~np.isfinite(errors)).sum())),
            )
        )
    return text_table(head, rows)
