"""A cell's runs when its learning rates are searched for instead of gridded: a replay of the search on the results there are. Torch-free.

Owns `searched_runs`. The search goes in rounds of `search.batch` runs; each round is a pure function of the rounds before it, so that
any driver, restarted at any moment, finds the same runs planned. A width starts once all smaller ones of its parametrization are done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from analysis.search import Ask, CellRuns, Done, SearchSettings, next_points
from scaling.records import RunRecord
from sweeps.family import RunFamily
from sweeps.search_memory import SearchMemory
from sweeps.study import Kind, SearchConfig, StudyConfig

CHEAPER = 3.0
"""How many times the runs of the largest width a small one gets at most."""


@dataclass(frozen=True)
class SearchedCell:
    """What the search has asked for in one cell so far."""

    width: int
    asks: tuple[Ask, ...]
    runs: CellRuns
    """Of the rounds that are complete."""
    done: Done | None


def searched_runs(
    study: StudyConfig, kind: Kind, results: Mapping[str, RunRecord], memory: SearchMemory | None = None
) -> list[SearchedCell]:
    """The cells of one parametrization, smallest width first, as far as the results allow; the last may be incomplete.

    memory: what the search has answered before; it is saved with what is new.
    """
    memory = memory or SearchMemory()
    cells: list[SearchedCell] = []
    for width in study.widths:
        found = _replay(study, kind, width, results, [cell.runs for cell in cells], memory)
        cells.append(found)
        if found.done is None:
            break
    memory.save()
    return cells


def run_limit(study: StudyConfig, width: int) -> int:
    """Runs of a cell at most: small models cost little, and what their curves look like is known at the large ones."""
    return round(study.search.max_runs * min(CHEAPER, math.sqrt(max(study.widths) / width)))


def _replay(
    study: StudyConfig,
    kind: Kind,
    width: int,
    results: Mapping[str, RunRecord],
    smaller: list[CellRuns],
    memory: SearchMemory,
) -> SearchedCell:
    search, family = study.search, RunFamily(study, kind, width)
    settings = SearchSettings(
        low=study.log2_lr.low,
        high=study.log2_lr.high,
        precision=search.precision,
        max_runs=run_limit(study, width),
        lattice=search.lattice,
    )
    runs = CellRuns(math.log2(width))
    asks: list[Ask] = []
    while True:
        step = memory.recall(
            (search.kind, runs, smaller, settings, search.batch), partial(_next, search, runs, smaller, settings)
        )
        if isinstance(step, Done):
            return SearchedCell(width, tuple(asks), runs, step)
        assert step, "nothing is under way in a replay: a search asks or is done"
        asks += step
        records = [results.get(family.run_id(ask.log2_lr, ask.seed)) for ask in step]
        if None in records:
            return SearchedCell(width, tuple(asks), runs, None)
        losses = [math.inf if record is None or record.loss is None else record.loss for record in records]
        runs = replace(
            runs,
            log2_lr=(*runs.log2_lr, *(ask.log2_lr for ask in step)),
            loss=(*runs.loss, *losses),
            seed=(*runs.seed, *(ask.seed for ask in step)),
            bound=_bounds(runs, records),
        )


def _bounds(runs: CellRuns, records: Sequence[RunRecord | None]) -> tuple[float, ...]:
    """CellRuns.bound with those of the next `records`."""
    before = runs.bound or (-math.inf,) * len(runs.log2_lr)
    found = [None if record is None or record.pruned is None else record.pruned.bound for record in records]
    bounds = (*before, *(-math.inf if bound is None else bound for bound in found))
    return bounds if any(map(math.isfinite, bounds)) else ()


def _next(search: SearchConfig, runs: CellRuns, smaller: list[CellRuns], settings: SearchSettings) -> list[Ask] | Done:
    if search.kind == "adaptive":
        return next_points(runs, smaller, settings, search.batch)
    from sweeps.optuna_search import next_by_optuna

    return next_by_optuna(search.kind, runs, settings, search.batch)
