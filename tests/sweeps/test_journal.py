"""The journal read as text says what Optuna says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling.errors import StudyError
from sweeps.journal import JOURNAL_NAME, failures, read_journal, running
from sweeps.plan import PlannedRun, make_plan
from sweeps.queue import Queue
from sweeps.status import status_document
from sweeps.study_dir import write_study
from tests.sweeps.test_plan import record_of, study_of


def eventful(folder: Path) -> tuple[Queue, list[PlannedRun]]:
    """A queue in which runs are waiting, running, done, cut off, failed, retried, and failed again."""
    study = study_of(folder)
    plan = make_plan(study, {})
    queue = Queue(folder, study)
    queue.enqueue(plan, max_attempts=2)
    order = {planned.run_id: rank for rank, planned in enumerate(plan)}
    by_name = {planned.run_id: planned for planned in plan}
    for deed in ("finish", "fail", "give back", "fail", "retry and fail", "retry", "keep", "keep"):
        claim = queue.claim(order)
        assert claim is not None
        if deed == "finish":
            queue.finish(claim, record_of(by_name[claim.run_id], 2.0))
        elif deed == "give back":
            queue.give_back(claim)
        elif deed != "keep":
            queue.fail(claim, f"ValueError: {claim.run_id} in “{deed}”")
            del order[claim.run_id]
        if deed.startswith("retry"):
            assert queue.forget_failures(set()) > 0
    return queue, plan


def test_running_and_failed_runs_are_those_that_optuna_knows(tmp_path: Path) -> None:
    queue, plan = eventful(tmp_path)
    trials = read_journal(tmp_path / JOURNAL_NAME)
    assert [(trial.run_id, trial.state) for trial in trials] == [
        (trial.user_attrs["run_id"], trial.state.value) for trial in queue.trials()
    ]
    assert running(trials) == queue.running()
    assert len(running(trials)) == 2
    for finished in (set(), {plan[0].run_id}):
        assert failures(trials, finished) == queue.failures(finished)


def test_a_finished_trial_changes_no_more(tmp_path: Path) -> None:
    eventful(tmp_path)
    journal = tmp_path / JOURNAL_NAME
    with journal.open("a") as log:
        log.write('{"op_code":6,"worker_id":"x","trial_id":0,"state":3,"values":null}\n{"op_code":6,"worker_id":"x","tri')
    trials = read_journal(journal)
    assert trials[0].state == 1
    assert running(trials) == Queue(tmp_path, study_of(tmp_path)).running()


def test_no_journal_has_no_trials_and_status_makes_none(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", study_of(tmp_path))
    assert read_journal(study.directory / JOURNAL_NAME) == []
    assert status_document(study)["missing"] == 12
    assert {path.name for path in study.directory.iterdir()} <= {"study.yaml", ".driver.lock"}


def test_a_journal_of_another_form_is_left_to_optuna(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", study_of(tmp_path))
    queue = Queue(study.directory, study.config)
    queue.enqueue(make_plan(study.config, {}), max_attempts=2)
    journal = study.directory / JOURNAL_NAME
    journal.write_text(journal.read_text().replace('{"op_code":', '{"op_code": '))
    with pytest.raises(ValueError, match="not known here"):
        read_journal(journal)
    assert status_document(study)["missing"] == 12
    journal.write_text("garbage\n" + journal.read_text())
    with pytest.raises(StudyError, match="is damaged"):
        status_document(study)
