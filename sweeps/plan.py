"""Study -> the explicit list of runs, each named by its content hash; grows by rule as results come in. Torch-free.

Owns the question "which runs": a pure function of the study and of the finished runs, so that any driver, restarted at any moment,
plans the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scaling.config import RunConfig
from scaling.records import RunRecord
from sweeps.family import RunFamily
from sweeps.study import Kind, StudyConfig

if TYPE_CHECKING:
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

    @cached_property
    def run(self) -> RunConfig:
        """Built where it is asked for: a plan of 20,000 runs is mostly read for its names."""
        return self.family.run(self.log2_lr, self.seed)

    @property
    def flops(self) -> float:
        return self.family.flops

    @classmethod
    def of(cls, family: RunFamily, log2_lr: float, seed: int, reason: Reason) -> PlannedRun:
        return cls(family, family.run_id(log2_lr, seed), family.kind, family.width, log2_lr, seed, reason)


Results = Mapping[str, RunRecord]


def memory_of(study: StudyConfig, directory: Path) -> SearchMemory | None:
    """What the search has answered in this study's directory; None for a grid, which asks nothing."""
    if study.search.kind == "grid":
        return None
    from sweeps.search_memory import SearchMemory

    return SearchMemory(directory)


def make_plan(study: StudyConfig, results: Results, memory: SearchMemory | None = None) -> list[PlannedRun]:
    """All runs known to be needed given `results` (run_id -> record), most expensive first. memory: see `sweeps.search_memory`.

    The most expensive first lets two workers end together, and shows a width that does not fit in memory at once.
    """
    if study.search.kind == "grid":
        runs = [run for kind in study.parametrizations for width in study.widths for run in _cell(study, kind, width, results)]
    else:
        runs = [run for kind in study.parametrizations for run in _searched(study, kind, results, memory)]
    return sorted(runs, key=lambda planned: -planned.flops)


def _searched(study: StudyConfig, kind: Kind, results: Results, memory: SearchMemory | None) -> list[PlannedRun]:
    # Imported here: the search needs scipy, and a grid does not.
    from sweeps.search import searched_runs

    planned = []
    for cell in searched_runs(study, kind, results, memory):
        family = RunFamily(study, kind, cell.width)
        planned += [PlannedRun.of(family, ask.log2_lr, ask.seed, ask.reason) for ask in cell.asks]
    return planned


def _cell(study: StudyConfig, kind: Kind, width: int, results: Results) -> list[PlannedRun]:
    """The runs of one cell: the grid; extensions once the grid is done; more seeds once the bracket is."""
    planned: dict[tuple[float, int], PlannedRun] = {}
    family = RunFamily(study, kind, width)
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
