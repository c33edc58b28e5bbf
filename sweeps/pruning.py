"""Runs ended before their last step: the rules of `pruning.kind`, from the curves of the cell's finished runs. Torch-free.

Owns `watch_for`. `safe` ends a run that is sure to end on a wall of its cell (`analysis.optimum.WALL`): such a run only bounds the
search and enters no fit, so that ending it changes no optimum. Runs of one seed see the same batches at every learning rate: over the
same steps the noise of the batches cancels between two of them. Curves cross, so a gap in mid-run is no gap at the end; how much of a
gap is left at the end is read off the cell's own finished runs on the same side of the best one. `median`, `hyperband` and `asha` are
Optuna's pruners: they take a gap in mid-run for what it is and end high learning rates too early (docs/early-stopping.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaling.records import Pruned, RunRecord, Watch, read_metrics, run_directory
from sweeps.study import PruningConfig

if TYPE_CHECKING:
    import optuna

    from scaling.config import RunConfig

WINDOW = 0.1
"""Share of the steps over which training losses are averaged."""
CHECKS = 20
"""How often a run is looked at, at most."""
CARRY = 0.6
"""What is counted on of the smallest share of a gap that was left at the end."""
MARGIN = 0.02
"""How far beyond a wall the bound must lie, relative to the best loss: other seeds' levels move the best a little."""
BEYOND = 1.5
"""A gap counts up to this many times the largest one that a finished run had at the step: a loss that has blown up can come far down."""
TELLING = 0.02
"""A gap in mid-run smaller than this, relative to the best loss, says nothing of what becomes of gaps."""


@dataclass(frozen=True)
class Curve:
    """One finished run of the cell."""

    run_id: str
    log2_lr: float
    seed: int
    loss: float | None
    """Final validation loss, nats per token; None when the run diverged or was pruned."""
    training: Mapping[int, float]
    """Step -> loss of its batch, nats per token, at the steps that were logged."""
    status: str = "complete"


def curve_of(record: RunRecord, rows: Iterable[Mapping[str, Any]]) -> Curve:
    """A record with its metrics."""
    training = {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}
    return Curve(record.run_id, record.log2_lr, record.seed, record.loss, training, record.status)


def curves_in(study_dir: Path, records: Iterable[RunRecord]) -> list[Curve]:
    """Curves of finished runs from a study's directory."""
    return [curve_of(item, read_metrics(run_directory(study_dir, item.run_id) / "metrics.jsonl")) for item in records]


def siblings(pruning: PruningConfig, run: RunConfig, records: Iterable[RunRecord]) -> list[RunRecord]:
    """The finished runs that `run`'s rule looks at, in the order in which they were started; none where nothing is pruned.

    They differ from `run` in their learning rate alone, or for Optuna's rules in their seed as well.
    """
    if pruning.kind == "none":
        return []
    shape = (run.model.width, run.batch_tokens, run.training.steps)
    found = [
        item
        for item in records
        if (item.width, item.batch_tokens, item.steps) == shape
        and (pruning.kind != "safe" or (item.status == "complete" and item.seed == run.training.seed))
        and _moved(run, item).run_id == item.run_id
    ]
    return sorted(found, key=lambda item: (item.started_at, item.run_id))


def _moved(run: RunConfig, record: RunRecord) -> RunConfig:
    """`run` at the record's learning rate and seed."""
    optimizer = run.optimizer.model_copy(update={"lr": record.lr})
    training = run.training.model_copy(update={"seed": record.seed, "data_seed": record.data_seed})
    return run.model_copy(update={"optimizer": optimizer, "training": training})


def watch_for(pruning: PruningConfig, run: RunConfig, finished: Sequence[Curve]) -> Watch | None:
    """What looks at a run as it goes and may end it; None where nothing can."""
    if pruning.kind == "none" or len(finished) < pruning.min_finished:
        return None
    if pruning.kind == "safe":
        return _Safe(pruning, run, finished)
    return _Optuna(pruning, run, finished)


@dataclass
class _Watching:
    """The run's own losses so far, and when to look at them."""

    pruning: PruningConfig
    run: RunConfig
    finished: Sequence[Curve]
    own: dict[int, float] = field(default_factory=dict)
    _next: int = 0

    @property
    def steps(self) -> int:
        return self.run.training.steps

    @property
    def window(self) -> int:
        return max(1, round(WINDOW * self.steps))

    def seen(self, row: Mapping[str, Any]) -> int | None:
        """Take a row of the run's metrics; the updates done where the run is to be looked at, else None."""
        if row.get("loss") is None:
            return None
        self.own[row["step"]] = row["loss"]
        done = int(row["step"]) + 1
        return done if self.due(done) else None

    def due(self, done: int) -> bool:
        """Whether the run is looked at after `done` updates: at regular intervals from `min_share` on."""
        if done < max(self._next, self.pruning.min_share * self.steps):
            return False
        self._next = done + math.ceil(self.steps / CHECKS)
        return True

    def smoothed(self, losses: Mapping[int, float], done: int, beside: Mapping[int, float] | None = None) -> float | None:
        """Mean loss over the window that ends with update `done`, at steps that `beside` has too; None when there are none."""
        last = range(done - self.window, done)
        chosen = [losses[step] for step in last if step in losses and (beside is None or step in beside)]
        return sum(chosen) / len(chosen) if chosen else None

    def gap(self, losses: Mapping[int, float], reference: Mapping[int, float], done: int) -> float | None:
        """How much higher `losses` lie than `reference` over the window, nats."""
        mine, theirs = self.smoothed(losses, done, reference), self.smoothed(reference, done, losses)
        return None if mine is None or theirs is None else mine - theirs


class _Safe(_Watching):
    """Ends a run that is sure to end on a wall."""

    def __call__(self, row: Mapping[str, Any]) -> Pruned | None:
        done = self.seen(row)
        return None if done is None else self._judge(done)

    def _judge(self, done: int) -> Pruned | None:
        from analysis.optimum import WALL

        best = min((item for item in self.finished if item.loss is not None), key=lambda item: item.loss or 0.0)
        assert best.loss is not None, "siblings of a safe rule are complete"
        wall = (1.0 + WALL + MARGIN) * best.loss
        gap = self.gap(self.own, best.training, done)
        left = self._left(best, done)
        if gap is None or left is None or best.loss <= 0 or best.loss + CARRY * left(gap) < wall:
            return None
        mine, theirs = self.smoothed(self.own, done, best.training), self.smoothed(best.training, done, self.own)
        assert mine is not None, "there is a gap"
        return Pruned(rule="safe", step=done, smoothed_loss=mine, reference=best.run_id, reference_loss=theirs, bound=wall)

    def _left(self, best: Curve, done: int) -> Callable[[float], float] | None:
        """What of a gap to the best run after `done` updates is left at the end, by the finished runs on its side; None if unknown."""
        assert best.loss is not None, "it is complete"
        side = math.copysign(1.0, self.run.log2_lr - best.log2_lr)
        pairs = []
        for item in self.finished:
            gap = self.gap(item.training, best.training, done)
            beside = (item.log2_lr - best.log2_lr) * side > 0
            if beside and item.loss is not None and gap is not None and gap > TELLING * best.loss:
                pairs.append((gap, item.loss - best.loss))
        # Two, since with one nothing says whether it was typical.
        if len(pairs) < 2 or self.run.log2_lr == best.log2_lr:
            return None
        share, largest = min(1.0, *(end / gap for gap, end in pairs)), max(gap for gap, _ in pairs)
        return lambda gap: share * min(gap, BEYOND * largest)


class _Optuna(_Watching):
    """Asks one of Optuna's pruners, in a study in memory in which the cell's finished runs are told step by step, as they went."""

    _study: optuna.Study | None = None

    def __call__(self, row: Mapping[str, Any]) -> Pruned | None:
        done = self.seen(row)
        return None if done is None else self._judge(done)

    def _judge(self, done: int) -> Pruned | None:
        if self._study is None:
            self._study = self._told()
            self._trial = self._study.ask()
        loss = self.smoothed(self.own, done)
        if loss is None:
            return None
        self._trial.report(loss, done)
        return Pruned(rule=self.pruning.kind, step=done, smoothed_loss=loss) if self._trial.should_prune() else None

    def _told(self) -> optuna.Study:
        """The finished runs as trials."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        name = f"{self.run.parametrization.kind} {self.run.model.width}"
        study = optuna.create_study(study_name=name, pruner=_pruner(self.pruning, self.steps))
        for item in self.finished:
            trial, clock = study.ask(), _Watching(self.pruning, self.run, ())
            for step in sorted(item.training):
                loss = self.smoothed(item.training, step + 1)
                if clock.due(step + 1) and loss is not None:
                    trial.report(loss, step + 1)
                    # Its answer is known; Optuna enters a trial on its rungs only when it is asked.
                    trial.should_prune()
            if item.status == "pruned":
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(trial, math.inf if item.loss is None else item.loss)
        return study


def _pruner(pruning: PruningConfig, steps: int) -> optuna.pruners.BasePruner:
    import optuna

    first = max(1, math.ceil(pruning.min_share * steps))
    match pruning.kind:
        case "median":
            return optuna.pruners.MedianPruner(n_startup_trials=pruning.min_finished, n_warmup_steps=first - 1)
        case "hyperband":
            return optuna.pruners.HyperbandPruner(min_resource=first, max_resource=steps, reduction_factor=pruning.reduction or 3)
        case "asha":
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=pruning.reduction or 4)
        case _:
            raise AssertionError(pruning.kind)
