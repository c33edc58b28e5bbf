"""Study -> the explicit list of runs, each named by its content hash; grows by rule as results come in. Torch-free.

Owns the question "which runs": a pure function of the study and of the finished runs, so that any driver, restarted at any moment,
plans the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scaling.config import RunConfig
from scaling.records import RunRecord
from sweeps.axes import LEVELS, At, AxisName, describe
from sweeps.family import RunFamily
from sweeps.study import Kind, StudyConfig

if TYPE_CHECKING:
    from analysis.search import CellRuns
    from sweeps.search import SearchedCell
    from sweeps.search_memory import SearchMemory

Reason = Literal["grid", "extend", "seed", "start", "bracket", "refine", "sampled"]


@dataclass(frozen=True)
class PlannedRun:
    """One run of the plan and why it is in it."""

    family: RunFamily = field(repr=False, compare=False)
    run_id: str
    parametrization: str
    width: int
    log2_lr: float
    seed: int
    reason: Reason
    line: AxisName | None = None
    """The axis along which it was asked for, at the LR that is held."""

    @cached_property
    def run(self) -> RunConfig:
        """Built where it is asked for: a plan of 20,000 runs is mostly read for its names."""
        return self.family.run(self.log2_lr, self.seed)

    @property
    def place(self) -> str:
        """Which of a width's cells it belongs to, in words; empty for the one at the study's own settings."""
        return f"{self.line} line" if self.line else describe(self.at)

    @property
    def at(self) -> At:
        """Axes that are not at the study's own value."""
        return self.family.at

    @property
    def flops(self) -> float:
        return self.family.flops

    @classmethod
    def of(cls, family: RunFamily, log2_lr: float, seed: int, reason: Reason) -> PlannedRun:
        return cls(family, family.run_id(log2_lr, seed), family.kind, family.width, log2_lr, seed, reason)


Results = Mapping[str, RunRecord]


def memory_of(study: StudyConfig, directory: Path) -> SearchMemory | None:
    """What searches have answered in this study's directory; None for a grid without other axes, which asks nothing."""
    if study.search.kind == "grid" and not study.axes:
        return None
    from sweeps.search_memory import SearchMemory

    return SearchMemory(directory)


def make_plan(study: StudyConfig, results: Results, memory: SearchMemory | None = None) -> list[PlannedRun]:
    """All runs known to be needed given `results` (run_id -> record), most expensive first. memory: see `sweeps.search_memory`.

    The most expensive first lets two workers end together, and shows a width that does not fit in memory at once.
    """
    # A run that two cells need, as where a line crosses its LR curve, is one run.
    runs: dict[str, PlannedRun] = {}
    for kind in study.parametrizations:
        for run in _of_kind(study, kind, results, memory):
            runs.setdefault(run.run_id, run)
    planned = sorted(runs.values(), key=lambda planned: -planned.flops)
    if study.pruning.kind == "none":
        return planned
    # The middle first: what lies far out is ended by comparison with it.
    middle = (study.log2_lr.low + study.log2_lr.high) / 2
    return sorted(planned, key=lambda planned: (-planned.flops, abs(planned.log2_lr - middle)))


def _of_kind(study: StudyConfig, kind: Kind, results: Results, memory: SearchMemory | None) -> list[PlannedRun]:
    """The runs of one parametrization, in the order of its cells."""
    if study.search.kind == "grid":
        planned = [run for runs in _grids(study, kind, results).values() for run in runs]
        return planned if not study.axes else planned + _asked(study, kind, searched_cells(study, kind, results, memory))
    return _asked(study, kind, searched_cells(study, kind, results, memory))


def _grids(study: StudyConfig, kind: Kind, results: Results) -> dict[tuple[int, At], list[PlannedRun]]:
    places = [(width, at) for width in study.widths for at in _places(study, width)]
    return {(width, at): _cell(study, kind, width, results, at) for width, at in places}


def searched_cells(study: StudyConfig, kind: Kind, results: Results, memory: SearchMemory | None) -> list[SearchedCell]:
    """The cells of one parametrization whose runs are searched for: none in a grid without other axes."""
    if study.search.kind == "grid" and not study.axes:
        return []
    # Imported here: the search needs scipy, and a grid does not.
    from sweeps.search import line_runs, searched_runs

    if study.search.kind == "grid":
        grids = _grids(study, kind, results)
        bases = _complete([(width, grids[width, ()]) for width in study.widths], results)
        return line_runs(study, kind, bases, results, memory)
    cells = searched_runs(study, kind, results, memory)
    done = [(cell.width, cell.runs) for cell in cells if cell.done is not None and not cell.at]
    return cells + line_runs(study, kind, done, results, memory)


def _asked(study: StudyConfig, kind: Kind, cells: Sequence[SearchedCell]) -> list[PlannedRun]:
    """The runs that searches have asked for."""
    from sweeps.search import place_on

    planned = []
    for cell in cells:
        if cell.line is None:
            family = RunFamily(study, kind, cell.width, cell.at)
            planned += [PlannedRun.of(family, ask.log2_lr, ask.seed, ask.reason) for ask in cell.asks]
            continue
        for ask in cell.asks:
            family = RunFamily(study, kind, cell.width, place_on(study, kind, cell.line, ask.log2_lr))
            planned.append(replace(PlannedRun.of(family, cell.log2_lr, ask.seed, ask.reason), line=cell.line))
    return planned


def _places(study: StudyConfig, width: int) -> list[At]:
    """The study's own settings, and every level of its axes."""
    if not study.axes:
        return [()]
    from sweeps.search import level_places

    return [(), *(at for name in LEVELS for at in level_places(study, name, width))]


def _complete(grids: Sequence[tuple[int, list[PlannedRun]]], results: Results) -> list[tuple[int, CellRuns]]:
    """(width, runs) of the cells, smallest first, up to the first that misses a run."""
    from analysis.search import Ask, CellRuns
    from sweeps.search import extended

    found = []
    for width, runs in grids:
        records = [results[run.run_id] for run in runs if run.run_id in results]
        if len(records) < len(runs):
            break
        asks = [Ask(run.log2_lr, run.seed, "sampled") for run in runs]
        found.append((width, extended(CellRuns(math.log2(width)), asks, records)))
    return found


def _cell(study: StudyConfig, kind: Kind, width: int, results: Results, at: At = ()) -> list[PlannedRun]:
    """The runs of one cell: the grid; extensions once the grid is done; more seeds once the bracket is."""
    planned: dict[tuple[float, int], PlannedRun] = {}
    family = RunFamily(study, kind, width, at)
    near_seeds = study.parametrizations[kind].near_seeds(study.follow_up)

    def add(log2_lr: float, seed: int, reason: Reason) -> None:
        if (log2_lr, seed) not in planned:
            planned[log2_lr, seed] = PlannedRun.of(family, log2_lr, seed, reason)

    def losses() -> dict[float, float] | None:
        """Mean loss per LR over the grid's seeds, infinite where one diverged; None while any is missing."""
        means = {}
        for log2_lr in sorted({log2_lr for log2_lr, _ in planned}):
            records = [results.get(planned[log2_lr, seed].run_id) for seed in range(study.seeds)]
            if None in records:
                return None
            values = [math.inf if record is None or record.loss is None else record.loss for record in records]
            means[log2_lr] = sum(values) / len(values)
        return means

    for log2_lr in study.log2_lr.values():
        for seed in range(study.seeds):
            add(log2_lr, seed, "grid")
    while (means := losses()) is not None and (extension := _extension(study, means)) is not None:
        for seed in range(study.seeds):
            add(extension, seed, "extend")
    if means is not None and not all(map(math.isinf, means.values())):
        best = min(means, key=lambda log2_lr: means[log2_lr])
        for log2_lr in means:
            if abs(log2_lr - best) <= study.follow_up.near_octaves:
                for seed in range(study.seeds, near_seeds):
                    add(log2_lr, seed, "seed")
    return list(planned.values())


def _extension(study: StudyConfig, means: Mapping[float, float]) -> float | None:
    """The next LR that the cell needs so that its best run has runs on both sides, or None."""
    lrs = sorted(means)
    follow_up, step = study.follow_up, study.log2_lr.step
    grid = study.log2_lr.values()
    below = sum(log2_lr < grid[0] for log2_lr in lrs)
    above = sum(log2_lr > grid[-1] for log2_lr in lrs)
    if all(math.isinf(mean) for mean in means.values()):
        # All diverged: what can be learned lies lower.
        return lrs[0] - step if follow_up.margin_points and below < follow_up.max_extensions else None
    place = lrs.index(min(lrs, key=lambda log2_lr: means[log2_lr]))
    if place < follow_up.margin_points and below < follow_up.max_extensions:
        return lrs[0] - step
    if len(lrs) - 1 - place < follow_up.margin_points and above < follow_up.max_extensions:
        return lrs[-1] + step
    return None
