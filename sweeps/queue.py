"""The plan's runs as trials of one Optuna study: enqueued by run_id, claimed, told.

Owns every call to Optuna. A run is a WAITING trial with its point fixed (`enqueue_trial`), RUNNING once claimed, COMPLETE with its
loss (infinite when it diverged), PRUNED, or FAIL. The truth about a finished run is its record on disk; the trial follows it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, get_args

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from scaling.config import ParametrizationKind
from scaling.errors import Fault, StudyError
from scaling.locks import acquire
from scaling.records import RunRecord
from sweeps.journal import AGAIN, INTERRUPTED, JOURNAL_NAME, NO_FAILURES, TrialLine, failures, without_record
from sweeps.plan import PlannedRun
from sweeps.study import StudyConfig

# No trial number is sampled: distributions only tell dashboards what an axis is.
LOG2_LR_BOUNDS = (-60.0, 30.0)


class _KernelLock:
    """Optuna's journal lock as an flock: a killed holder blocks nobody (its own lock files do, for 30 s)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        self._file = acquire(self._path)
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def open_storage(study_dir: Path) -> BaseStorage:
    """The journal file in `study_dir`."""
    journal = study_dir / JOURNAL_NAME
    try:
        _drop_torn_line(journal)
        lock = _KernelLock(journal.with_suffix(".lock"))
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))  # type: ignore[arg-type]  # its base class is private
    except (ValueError, KeyError, IsADirectoryError):
        cure = f"delete {journal} and type the same command again: finished runs are kept in {study_dir / 'runs'}"
        raise StudyError(Fault(str(journal), "is damaged", cure)) from None


def _drop_torn_line(journal: Path) -> None:
    """A process killed in the middle of a write leaves half a line, onto which the next writer would append."""
    if not journal.exists():
        return
    file = acquire(journal.with_suffix(".lock"))
    try:
        with journal.open("r+b") as log:
            content = log.read()
            whole = content.rfind(b"\n") + 1
            if whole != len(content):
                log.truncate(whole)
    finally:
        file.close()


@dataclass(frozen=True)
class Claim:
    """A run taken from the queue: nobody else can take it while its trial is RUNNING."""

    run_id: str
    trial: Trial


def optuna_trial(record: RunRecord) -> FrozenTrial:
    """A finished run as a trial, for a study that only shows what was made (`sweeps.fleet`)."""
    point = {"parametrization": record.parametrization, "width": record.width, "log2_lr": record.log2_lr, "seed": record.seed}
    distributions = {
        "parametrization": optuna.distributions.CategoricalDistribution(sorted(get_args(ParametrizationKind))),
        "width": optuna.distributions.IntDistribution(1, 2**20),
        "log2_lr": optuna.distributions.FloatDistribution(*LOG2_LR_BOUNDS),
        "seed": optuna.distributions.IntDistribution(0, 1_000_000),
    }
    attributes: dict[str, object] = {"run_id": record.run_id, "status": record.status}
    if record.pruned is not None:
        attributes["pruned"] = record.pruned.model_dump()
        state = TrialState.PRUNED
        return optuna.trial.create_trial(params=point, distributions=distributions, state=state, user_attrs=attributes)
    value = float("inf") if record.loss is None else record.loss
    return optuna.trial.create_trial(params=point, distributions=distributions, value=value, user_attrs=attributes)


class Queue:
    """The runs of one study in Optuna's journal, for the one driver of this machine."""

    def __init__(self, study_dir: Path, config: StudyConfig) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = open_storage(study_dir)
        self._config = config
        self._study = optuna.create_study(
            study_name=config.name,
            storage=self._storage,
            sampler=optuna.samplers.RandomSampler(seed=0),
            direction="minimize",
            load_if_exists=True,
        )

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def attempts(self) -> Counter[str]:
        """Failed trials a run_id since the user last asked for a retry; a run that was cut off is not an attempt that failed."""
        counts: Counter[str] = Counter()
        for trial in self.trials():
            run_id = trial.user_attrs["run_id"]
            if trial.user_attrs.get("retry"):
                counts[run_id] = 0
            counts[run_id] += trial.state == TrialState.FAIL and trial.user_attrs.get("failure") not in NO_FAILURES
        return counts

    def failures(self, finished: Container[str]) -> dict[str, str]:
        """run_id -> reason of its last failure, for runs that are neither queued, running nor `finished` (have a record)."""
        return failures(self._lines(), finished)

    def without_record(self, finished: Container[str]) -> list[str]:
        """Runs that ended and have no record any more: they are made again."""
        return without_record(self._lines(), finished)

    def _lines(self) -> list[TrialLine]:
        return [
            TrialLine(trial.user_attrs["run_id"], trial.state.value, trial.user_attrs.get("failure", ""))
            for trial in self.trials()
        ]

    def deaths(self, run_id: str) -> int:
        """How often this run was cut off."""
        failed = self.trials(TrialState.FAIL)
        return sum(trial.user_attrs["run_id"] == run_id and trial.user_attrs.get("failure") == INTERRUPTED for trial in failed)

    def waiting(self, order: Mapping[str, int]) -> int:
        """How many runs of `order` wait to be claimed."""
        return sum(trial.user_attrs["run_id"] in order for trial in self.trials(TrialState.WAITING))

    def running(self) -> set[str]:
        return {trial.user_attrs["run_id"] for trial in self.trials(TrialState.RUNNING)}

    def enqueue(self, runs: Iterable[PlannedRun], *, max_attempts: int) -> int:
        """Enqueue those of `runs` (which have no record) that are not queued, running or out of attempts; return how many were.

        A complete trial does not count: the record of its run is gone, deleted by hand.
        """
        alive = {trial.user_attrs["run_id"] for trial in self.trials(TrialState.WAITING, TrialState.RUNNING)}
        attempts, added = self.attempts(), 0
        for planned in runs:
            if planned.run_id in alive or attempts[planned.run_id] >= max_attempts:
                continue
            point = {name: getattr(planned, name) for name in ("parametrization", "width", "log2_lr", "seed")}
            self._study.enqueue_trial(point, user_attrs={"run_id": planned.run_id, "reason": planned.reason})
            added += 1
        return added

    def forget_failures(self, finished: Container[str]) -> int:
        """Queue every failed run that has no record once more, with all its attempts; return how many."""
        last = {trial.user_attrs["run_id"]: trial for trial in self.trials(TrialState.FAIL)}
        failed = self.failures(finished)
        for run_id in failed:
            attributes = {"run_id": run_id, "reason": last[run_id].user_attrs["reason"], "retry": True}
            self._study.enqueue_trial(last[run_id].system_attrs["fixed_params"], user_attrs=attributes)
        return len(failed)

    def claim(self, order: Mapping[str, int]) -> Claim | None:
        """Take the waiting run that comes first in `order` (run_id -> rank), or None when none waits.

        `study.ask()` would sample a new point when the queue is empty; a storage's own change of state is atomic and does not.
        """
        waiting = [trial for trial in self.trials(TrialState.WAITING) if trial.user_attrs["run_id"] in order]
        for frozen in sorted(waiting, key=lambda trial: order[trial.user_attrs["run_id"]]):
            if self._storage.set_trial_state_values(frozen._trial_id, TrialState.RUNNING):
                trial = Trial(self._study, frozen._trial_id)
                trial.suggest_categorical("parametrization", sorted(self._config.parametrizations))
                trial.suggest_int("width", min(self._config.widths), max(self._config.widths))
                trial.suggest_float("log2_lr", *LOG2_LR_BOUNDS)
                trial.suggest_int("seed", 0, 1_000_000)
                return Claim(frozen.user_attrs["run_id"], trial)
        return None

    def finish(self, claim: Claim, record: RunRecord) -> None:
        """Tell Optuna the result of a claimed run; one that it has had before, and whose record was deleted, is not counted twice."""
        if any(trial.user_attrs["run_id"] == claim.run_id for trial in self.trials(TrialState.COMPLETE, TrialState.PRUNED)):
            self.fail(claim, AGAIN)
            return
        claim.trial.set_user_attr("status", record.status)
        if record.pruned is not None:
            claim.trial.set_user_attr("pruned", record.pruned.model_dump())
            self._study.tell(claim.trial, state=TrialState.PRUNED)
            return
        self._study.tell(claim.trial, float("inf") if record.loss is None else record.loss)

    def give_back(self, claim: Claim) -> None:
        """Give a claimed run back as cut off: it is made again, and has not failed."""
        self.fail(claim, INTERRUPTED)

    def fail(self, claim: Claim, reason: str) -> None:
        """Give a claimed run back as failed for `reason`."""
        claim.trial.set_user_attr("failure", reason)
        self._study.tell(claim.trial, state=TrialState.FAIL)

    def adopt(self, plan: Iterable[PlannedRun], results: Mapping[str, RunRecord]) -> int:
        """Enter runs whose records are there and whose trials are not: finished as their driver was stopped, or brought from elsewhere."""
        told = {trial.user_attrs["run_id"] for trial in self.trials(TrialState.COMPLETE, TrialState.PRUNED)}
        missing = [planned for planned in plan if planned.run_id in results and planned.run_id not in told]
        self.enqueue(missing, max_attempts=sys.maxsize)
        order = {planned.run_id: rank for rank, planned in enumerate(missing)}
        while (claim := self.claim(order)) is not None:
            self.finish(claim, results[claim.run_id])
        return len(missing)

    def recover(self, results: Mapping[str, RunRecord]) -> int:
        """Settle trials left RUNNING by a driver that died: told from the record when it exists, given back when not.

        Only for the one driver of a study, which holds the study's lock. Returns how many were given back.
        """
        given_back = 0
        for frozen in self.trials(TrialState.RUNNING):
            claim = Claim(frozen.user_attrs["run_id"], Trial(self._study, frozen._trial_id))
            record = results.get(claim.run_id)
            if record is not None:
                self.finish(claim, record)
            else:
                self.give_back(claim)
                given_back += 1
        return given_back
