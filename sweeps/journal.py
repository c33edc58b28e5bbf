"""What Optuna's journal says of a study's runs, read as text: what `status` needs, without loading Optuna and replaying every parameter.

Owns the reading only; `sweeps.queue` writes it, through Optuna. The rules are Optuna's: a trial is created waiting, a finished one changes
no more. A journal in another form than the one known here is left to Optuna.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

JOURNAL_NAME = "optuna-journal.log"
INTERRUPTED = "interrupted"
"""Reason of a trial whose process was killed: not the run's fault."""
AGAIN = "made again: its record was gone"
"""Reason of a trial whose run is complete in an earlier trial: the study counts it once."""
NO_FAILURES = (INTERRUPTED, AGAIN)
RUNNING, COMPLETE, PRUNED, FAIL, WAITING = range(5)
"""Optuna's TrialState."""
_HEAD = b'{"op_code":'


@dataclass
class TrialLine:
    """One trial: which run it is, how it stands, and why it failed."""

    run_id: str
    state: int
    failure: str = ""


def read_journal(path: Path) -> list[TrialLine]:
    """The journal's trials in their order; none without a journal. Raises ValueError or KeyError for what is not known here."""
    trials: list[TrialLine] = []
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    for line in content.split(b"\n")[:-1]:  # What follows the last line break is a line torn by a kill.
        if not line.startswith(_HEAD):
            raise ValueError("a journal of another form")
        match line[len(_HEAD) : len(_HEAD) + 1]:
            case b"4":
                log = json.loads(line)
                trials.append(TrialLine(log["user_attrs"]["run_id"], log["state"]))
            case b"6":
                log = json.loads(line)
                _change(trials, log["trial_id"], state=log["state"])
            case b"8":
                log = json.loads(line)
                _change(trials, log["trial_id"], failure=log["user_attr"].get("failure"))
            case b"0" | b"5" | b"7" | b"9":
                pass
            case _:
                raise ValueError("an operation that is not known here")
    return trials


def _change(trials: list[TrialLine], number: int, *, state: int | None = None, failure: str | None = None) -> None:
    if number >= len(trials) or trials[number].state not in (RUNNING, WAITING):
        return
    if state is not None:
        trials[number].state = state
    if failure is not None:
        trials[number].failure = failure


def without_record(trials: Iterable[TrialLine], finished: Container[str]) -> list[str]:
    """Runs that ended and have no record any more: somebody deleted it."""
    return sorted({trial.run_id for trial in trials if trial.state in (COMPLETE, PRUNED) and trial.run_id not in finished})


def running(trials: Iterable[TrialLine]) -> set[str]:
    return {trial.run_id for trial in trials if trial.state == RUNNING}


def failures(trials: Iterable[TrialLine], finished: Container[str]) -> dict[str, str]:
    """run_id -> reason of its last failure, for runs that are neither queued, running nor `finished` (have a record).

    A run that was only cut off, or made again, has not failed.
    """
    lines = list(trials)
    alive = {trial.run_id for trial in lines if trial.state in (RUNNING, WAITING)}
    return {
        trial.run_id: trial.failure
        for trial in lines
        if trial.state == FAIL and trial.run_id not in alive and trial.run_id not in finished and trial.failure not in NO_FAILURES
    }
