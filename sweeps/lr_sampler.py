"""LRSampler: the adaptive search of learning rates as an Optuna sampler, for any Optuna study.

    space = {"lr": FloatDistribution(1e-4, 1.0, log=True), "width": CategoricalDistribution([64, 128, 256])}
    study = optuna.create_study(sampler=LRSampler(space))

Model size is context, not something to be optimized: sizes are served from small to large, each until half the 90 % interval of its best
log2 learning rate is within `precision`, or it has its runs; then the study is stopped. A loss that is infinite, and a trial that was
pruned, are taken as divergences. Owns the translation between Optuna's trials and `analysis.search`, which decides.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from analysis.optimum import CellOptimum
from analysis.search import Ask, CellRuns, Done, SearchSettings, next_points, optimum_of

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


class LRSampler(BaseSampler):
    """Chooses learning rate, size and seed of the next trial.

    search_space: the learning rate's distribution under `lr` (a float; log: in units of the LR, else log2 of it) and, if the objective
    suggests them, the size's under `size` (categorical, of numbers) and the seed's under `seed` (an int). Everything else that
    the objective suggests is sampled at random. max_runs: of the largest size; smaller ones get up to `cheaper` times as many.
    """

    def __init__(
        self, search_space: Mapping[str, BaseDistribution], *, lr: str = "lr", size: str = "width", seed: str = "seed",
        precision: float = 0.15, max_runs: int = 6, cheaper: float = 3.0, lattice: float = 0.25,
    ) -> None:  # fmt: skip
        rates = search_space.get(lr)
        if not isinstance(rates, FloatDistribution):
            raise ValueError(
                f"search_space needs {lr!r}, a FloatDistribution; it has {', '.join(map(repr, search_space)) or 'nothing'}"
            )
        unknown = set(search_space) - {lr, size, seed}
        if unknown:
            raise ValueError(f"search_space has {sorted(unknown)}: this sampler chooses {lr!r}, {size!r} and {seed!r} alone")
        sizes = search_space.get(size)
        if seed in search_space and not isinstance(search_space[seed], IntDistribution):
            raise ValueError(f"{seed!r} must be an IntDistribution")
        self._space = dict(search_space)
        self._names = (lr, size, seed)
        self._rates = rates
        self._sizes = [1.0] if sizes is None else _sizes(size, sizes)
        self._limits = (precision, max_runs, cheaper, lattice)
        self._other = RandomSampler(seed=0)

    def reseed_rng(self) -> None:
        self._other.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        return dict(self._space)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """The point of the next trial; stops the study when no size needs one."""
        if study.direction is not StudyDirection.MINIMIZE:
            raise ValueError("LRSampler minimizes a loss: create_study(direction='minimize')")
        cells = self._cells(study, trial)
        for at, cell in enumerate(cells):
            step = next_points(cell, [other for other in cells[:at] if other.log2_lr], self._settings(at), 1)
            if isinstance(step, list) and step:
                return self._point(at, step[0], search_space)
        # Nothing is asked for while others are under way: a seed more at the largest size's best.
        cell = cells[-1]
        best = min(
            zip(cell.loss, cell.log2_lr, strict=True), default=(0.0, (self._settings(0).low + self._settings(0).high) / 2)
        )[1]
        seed = 1 + max((*cell.seed, *(seed for _, seed in cell.pending)), default=-1)
        return self._point(len(cells) - 1, Ask(best, seed, "seed"), search_space)

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        return self._other.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Stop the study when every size has what it needs, the trial that ends now counted."""
        if state in FINISHED:
            ended = copy.copy(trial)
            ended.state, ended.values = state, list(values) if values is not None else None
            if self._done(self._cells(study, None, ended)):
                # Only a study that runs its own loop can be stopped; with ask and tell, `done` says so.
                with contextlib.suppress(RuntimeError):
                    study.stop()

    def done(self, study: Study) -> bool:
        """Whether every size has what it needs."""
        return self._done(self._cells(study, None))

    def _done(self, cells: Sequence[CellRuns]) -> bool:
        steps = [next_points(cell, cells[:at], self._settings(at), 1) for at, cell in enumerate(cells)]
        return all(isinstance(step, Done) for step in steps)

    def optima(self, study: Study) -> dict[float, CellOptimum | None]:
        """Size -> its best learning rate with interval, from the trials so far; None without a finite loss."""
        cells = self._cells(study, None)
        return {size: optimum_of(cell, cells[:at]) for at, (size, cell) in enumerate(zip(self._sizes, cells, strict=True))}

    def _settings(self, at: int) -> SearchSettings:
        precision, max_runs, cheaper, lattice = self._limits
        low, high = self._log2(self._rates.low), self._log2(self._rates.high)
        limit = round(max_runs * min(cheaper, math.sqrt(self._sizes[-1] / self._sizes[at])))
        seeds = self._space.get(self._names[2])
        max_seeds = seeds.high - seeds.low + 1 if isinstance(seeds, IntDistribution) else 1
        return SearchSettings(
            low, high, precision=precision, max_runs=limit, lattice=lattice, max_seeds=max_seeds, floor=low, ceiling=high
        )

    def _cells(self, study: Study, own: FrozenTrial | None, ended: FrozenTrial | None = None) -> list[CellRuns]:
        """The runs of every size, from the study's trials but `own`; `ended` is one whose end the study does not know yet."""
        lr, size, seed = self._names
        cells = {at: CellRuns(math.log2(at)) for at in self._sizes}
        for known in study.get_trials(deepcopy=False):
            trial = ended if ended is not None and known.number == ended.number else known
            if lr not in trial.params or (own is not None and trial.number == own.number):
                continue
            at, log2_lr = float(trial.params.get(size, self._sizes[0])), self._log2(trial.params[lr])
            if at not in cells:
                continue
            cell, own_seed = cells[at], int(trial.params.get(seed, 0))
            if trial.state is TrialState.RUNNING:
                cells[at] = replace(cell, pending=(*cell.pending, (log2_lr, own_seed)))
            elif trial.state in FINISHED:
                value = trial.value if trial.state is TrialState.COMPLETE and trial.value is not None else math.inf
                cells[at] = replace(cell, log2_lr=(*cell.log2_lr, log2_lr), loss=(*cell.loss, value), seed=(*cell.seed, own_seed))
        return list(cells.values())

    def _log2(self, value: float) -> float:
        # Rounded: a learning rate that went through exp2 comes back to its place on the lattice.
        return round(math.log2(value), 9) if self._rates.log else float(value)

    def _point(self, at: int, ask: Ask, search_space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
        lr, size, seed = self._names
        value = 2.0**ask.log2_lr if self._rates.log else ask.log2_lr
        point: dict[str, Any] = {lr: min(max(value, self._rates.low), self._rates.high)}
        if size in search_space:
            sizes = self._space[size]
            assert isinstance(sizes, CategoricalDistribution), "checked when the sampler was made"
            point[size] = next(choice for choice in sizes.choices if float(choice) == self._sizes[at])  # type: ignore[arg-type]
        if seed in search_space:
            seeds = self._space[seed]
            assert isinstance(seeds, IntDistribution), "checked when the sampler was made"
            point[seed] = min(max(ask.seed, seeds.low), seeds.high)
        return point


def _sizes(name: str, distribution: BaseDistribution) -> list[float]:
    choices = distribution.choices if isinstance(distribution, CategoricalDistribution) else ()
    sizes = [float(item) for item in choices if isinstance(item, int | float) and not isinstance(item, bool) and item > 0]
    if not sizes or len(sizes) != len(choices):
        raise ValueError(f"{name!r} must be a CategoricalDistribution of positive numbers")
    return sorted(sizes)
