"""A study's searched cells: a replay of the search on the results there are. Torch-free.

Owns `searched_runs`, cells whose learning rates are searched for, and `line_runs`, the searches along other axes at a cell's best LR. A
search goes in rounds; each round is a pure function of the rounds before it, so that any driver, restarted at any moment, finds the
same runs planned. A cell starts once those that it learns from are done: smaller widths, and levels of an axis nearer to the study's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from analysis.search import Ask, CellRuns, Done, SearchSettings, next_points, optimum_of
from scaling.records import RunRecord
from sweeps.axes import LEVELS, At, AxisName
from sweeps.family import RunFamily
from sweeps.search_memory import SearchMemory
from sweeps.study import Kind, StudyConfig

CHEAPER = 3.0
"""How many times the runs of the largest width a small one gets at most."""
LINE_BATCH = 2


@dataclass(frozen=True)
class SearchedCell:
    """What a search has asked for in one cell so far."""

    width: int
    asks: tuple[Ask, ...]
    runs: CellRuns
    """Of the rounds that are complete."""
    done: Done | None
    at: At = ()
    """A level of an axis; nothing at the study's own settings."""
    line: AxisName | None = None
    """The axis that is searched instead of the LR; then positions on its line stand for log2 LRs."""
    log2_lr: float = math.nan
    """lines: the LR that is held."""


Namer = Callable[[float, int], str]
"""run_id of the run at a position (log2 LR, or a line's) and a seed."""


def searched_runs(
    study: StudyConfig, kind: Kind, results: Mapping[str, RunRecord], memory: SearchMemory | None = None
) -> list[SearchedCell]:
    """The cells of one parametrization as far as the results allow: its widths, smallest first, and the levels of its axes at each.

    memory: what searches have answered before; it is saved with what is new.
    """
    memory = memory or SearchMemory()
    own: list[SearchedCell] = []
    for width in study.widths:
        own.append(_lr_cell(study, kind, width, (), results, [cell.runs for cell in own], memory))
        if own[-1].done is None:
            break
    cells = list(own)
    for cell in own:
        if cell.done is not None:
            for name in LEVELS:
                cells += _levels(study, kind, name, cell, results, memory)
    memory.save()
    return cells


def _levels(
    study: StudyConfig, kind: Kind, name: AxisName, own: SearchedCell, results: Mapping[str, RunRecord], memory: SearchMemory
) -> Iterator[SearchedCell]:
    """The cells at one axis' levels beside a width's own cell, nearest first."""
    found: list[CellRuns] = [replace(own.runs, size=math.log2(own_level(study, name)))]
    for at in level_places(study, name, own.width):
        cell = _lr_cell(study, kind, own.width, at, results, found, memory, size=math.log2(at[0][1]))
        yield cell
        if cell.done is None:
            return
        found.append(cell.runs)


def own_level(study: StudyConfig, name: AxisName) -> int:
    """The study's own value of a LEVELS axis."""
    return {"depth": study.model.depth, "batch_size": study.training.batch_size, "steps": study.training.steps}[name]


def level_places(study: StudyConfig, name: AxisName, width: int) -> list[At]:
    """Where an axis of levels is off the study's own, nearest first."""
    axis = study.axes.get(name)
    if axis is None or axis.values is None or width not in study.axis_widths(name):
        return []
    own = own_level(study, name)
    values = sorted((value for value in axis.values if value != own), key=lambda value: (abs(math.log2(value / own)), value))
    return [((name, value),) for value in values]


def run_limit(study: StudyConfig, width: int) -> int:
    """Runs of a cell at most: small models cost little, and what their curves look like is known at the large ones."""
    return round(study.search.max_runs * _cheaper(study, width))


def _cheaper(study: StudyConfig, width: int) -> float:
    return min(CHEAPER, math.sqrt(max(study.widths) / width))


def _lr_cell(
    study: StudyConfig,
    kind: Kind,
    width: int,
    at: At,
    results: Mapping[str, RunRecord],
    others: Sequence[CellRuns],
    memory: SearchMemory,
    size: float | None = None,
) -> SearchedCell:
    search = study.search
    settings = SearchSettings(
        low=study.log2_lr.low,
        high=study.log2_lr.high,
        precision=search.precision,
        max_runs=run_limit(study, width),
        lattice=search.lattice,
    )
    start = CellRuns(math.log2(width) if size is None else size)
    family = RunFamily(study, kind, width, at)

    def ask(runs: CellRuns) -> list[Ask] | Done:
        return memory.recall(
            (search.kind, runs, list(others), settings, search.batch),
            partial(_next, search.kind, runs, others, settings, search.batch),
        )

    return replace(_replay(width, start, ask, family.run_id, results), at=at)


def line_runs(
    study: StudyConfig,
    kind: Kind,
    bases: Sequence[tuple[int, CellRuns]],
    results: Mapping[str, RunRecord],
    memory: SearchMemory | None = None,
) -> list[SearchedCell]:
    """The searches along lines. bases: (width, its runs) of the cells, smallest first, whose LR search or grid is complete."""
    lines = [name for name in study.axes if name not in LEVELS]
    if not lines:
        return []
    memory = memory or SearchMemory()
    best = {
        width: rate
        for at, (width, _) in enumerate(bases)
        if (rate := best_rate([runs for _, runs in bases[: at + 1]])) is not None
    }
    cells: list[SearchedCell] = []
    for name in lines:
        found: list[CellRuns] = []
        for width in study.axis_widths(name):
            if width not in best:
                break
            cell = _line_cell(study, kind, name, width, best[width], results, found, memory)
            cells.append(cell)
            if cell.done is None:
                break
            found.append(cell.runs)
    memory.save()
    return cells


def best_rate(cells: Sequence[CellRuns]) -> float | None:
    """The sampled log2 LR nearest to the optimum of the last of `cells`, those before it the smaller ones; None when all diverged."""
    cell = cells[-1]
    optimum = optimum_of(cell, cells[:-1])
    sampled = [rate for rate, loss in zip(cell.log2_lr, cell.loss, strict=True) if math.isfinite(loss)]
    if optimum is None or not sampled:
        return None
    if not math.isfinite(optimum.log2_lr):
        return min(zip(cell.loss, cell.log2_lr, strict=True))[1]
    return min(sampled, key=lambda rate: (abs(rate - optimum.log2_lr), rate))


def _line_cell(
    study: StudyConfig,
    kind: Kind,
    name: AxisName,
    width: int,
    log2_lr: float,
    results: Mapping[str, RunRecord],
    others: Sequence[CellRuns],
    memory: SearchMemory,
) -> SearchedCell:
    axis, line = study.axes[name], study.line(kind, name)
    unit, floor, ceiling = line.hyperparameter.octaves, line.low, line.high
    limit = round(axis.max_runs * _cheaper(study, width))
    settings = SearchSettings(
        floor, ceiling, axis.precision, limit, line.lattice, floor=floor, ceiling=ceiling, start=0.0, unit=unit
    )

    def name_of(position: float, seed: int) -> str:
        return study.run(kind, width, log2_lr, seed, place_on(study, kind, name, position)).run_id

    def ask(runs: CellRuns) -> list[Ask] | Done:
        return memory.recall(
            ("line", runs, list(others), settings, LINE_BATCH), partial(next_points, runs, others, settings, LINE_BATCH)
        )

    found = _replay(width, CellRuns(math.log2(width)), ask, name_of, results)
    return replace(found, line=name, log2_lr=log2_lr)


def place_on(study: StudyConfig, kind: Kind, name: AxisName, position: float) -> At:
    """A position on a line as a place; the study's own value is no place of its own, since its run is the LR cell's."""
    return ((name, study.line(kind, name).value(position)),) if position else ()


def _replay(
    width: int, runs: CellRuns, ask: Callable[[CellRuns], list[Ask] | Done], name: Namer, results: Mapping[str, RunRecord]
) -> SearchedCell:
    """Ask, look the runs up, ask again, until a run has no result yet or the search is done."""
    asks: list[Ask] = []
    while True:
        step = ask(runs)
        if isinstance(step, Done):
            return SearchedCell(width, tuple(asks), runs, step)
        assert step, "nothing is under way in a replay: a search asks or is done"
        asks += step
        records = [results.get(name(item.log2_lr, item.seed)) for item in step]
        known = [record for record in records if record is not None]
        if len(known) < len(records):
            return SearchedCell(width, tuple(asks), runs, None)
        runs = extended(runs, step, known)


def extended(runs: CellRuns, asks: Sequence[Ask], records: Sequence[RunRecord]) -> CellRuns:
    """A cell with the results of `asks`; a diverged run's loss is infinite, and a pruned one's too, with its bound."""
    before = runs.bound or (-math.inf,) * len(runs.log2_lr)
    pruned = [None if record.pruned is None else record.pruned.bound for record in records]
    bounds = (*before, *(-math.inf if bound is None else bound for bound in pruned))
    return replace(
        runs,
        log2_lr=(*runs.log2_lr, *(ask.log2_lr for ask in asks)),
        loss=(*runs.loss, *(math.inf if record.loss is None else record.loss for record in records)),
        seed=(*runs.seed, *(ask.seed for ask in asks)),
        bound=bounds if any(map(math.isfinite, bounds)) else (),
    )


def _next(kind: str, runs: CellRuns, others: Sequence[CellRuns], settings: SearchSettings, batch: int) -> list[Ask] | Done:
    if kind == "adaptive":
        return next_points(runs, others, settings, batch)
    from sweeps.optuna_search import next_by_optuna

    return next_by_optuna(kind, runs, settings, batch)
