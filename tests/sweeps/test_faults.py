"""Faults done for real, in seconds: what is finished stays, each planned run is made once, and the message says what to type.

Kills are in `test_kills` and `test_shared`; the same faults on whole commands, many times, are `python -m tests.bench --only faults`.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from scaling.data import prepare
from scaling.errors import Interrupted
from scaling.records import read_metrics, read_records, write_record
from scaling.train import train_run
from sweeps.board import Board
from sweeps.driver import MAX_DEATHS, drive
from sweeps.fleet import Worker, pull, work
from sweeps.plan import make_plan
from sweeps.progress import Watcher
from sweeps.queue import Queue
from sweeps.status import status_document, status_text
from sweeps.study_dir import Study, open_study
from tests.bench.faults import small_disk
from tests.conftest import SYNTHETIC, tiny_run
from tests.sweeps.faulty import Victim, wait_for
from tests.sweeps.studies import write_study
from tests.sweeps.test_plan import bowl, record_of

ONE_CELL = {"parametrizations": {"mup": {}}, "widths": [16]}
DAY_S = 86_400.0


def opened(folder: Path, **changes: object) -> Study:
    return open_study(write_study(folder, **ONE_CELL | changes), folder / "study")


def driven(study: Study) -> None:
    drive(study.directory, study.config, 1, Watcher(1), study.data_arguments(), "mutransfer run")


def complete_trials(study: Study) -> Counter[str]:
    trials = Queue(study.directory, study.config).trials(TrialState.COMPLETE)
    return Counter(trial.user_attrs["run_id"] for trial in trials)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process and its children grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_journal_that_cannot_grow_stops_the_driver_and_loses_nothing(tmp_path: Path) -> None:
    study = opened(tmp_path)
    with largest_file(3000), pytest.raises(Interrupted, match="no space left on the disk") as stopped:
        driven(study)
    assert "type the same command again: finished runs are kept" in str(stopped.value)
    journal = (study.directory / "optuna-journal.log").read_bytes()
    assert not journal.endswith(b"\n"), "it was stopped in the middle of a line"
    done = {record.run_id: record for record in read_records(study.directory)}
    driven(study)
    assert {record.run_id: record for record in read_records(study.directory)}.items() >= done.items()
    assert complete_trials(study) == Counter(item.run_id for item in make_plan(study.config, {}))


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="a small file system needs root to mount")
def test_a_board_worker_whose_disk_is_full_stops_and_the_next_goes_on(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    with small_disk(tmp_path / "study", "20k") as grow:
        study = opened(tmp_path, storage=f"sqlite:///{tmp_path / 'board.db'}")
        with pytest.raises(Interrupted, match="no space left on the disk"):
            work(study, lambda _: None)
        board = Board(str(study.config.storage), study.config.name)
        done = set(board.results())
        assert board.counts().running == 0, "its run was given back"
        grow()
        assert work(study, lambda _: None) == 3 - len(done)
        assert board.counts().done == 3
        board.close()


def test_a_worker_waits_for_a_database_whose_disk_is_full(tmp_path: Path) -> None:
    study = opened(tmp_path, storage=f"sqlite:///{tmp_path / 'board.db'}")
    board = Board(str(study.config.storage), study.config.name)
    plan = make_plan(study.config, {})
    board.add(plan)
    pages = [1_000_000]
    sa.event.listen(board._engine, "begin", lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {pages[0]}"))
    said: list[str] = []
    worker = Worker(study, board, said.append)
    pages[0] = 1  # SQLite takes the least that holds what is there: it is full now.
    threading.Timer(0.5, lambda: pages.__setitem__(0, 1_000_000)).start()
    assert worker.patiently(lambda: board.finish(record_of(plan[0], 2.0), "x" * 100_000))
    assert "trying again" in said[0]
    assert "full" in said[0]
    assert set(board.results()) == {plan[0].run_id}
    board.close()


def test_ctrl_c_on_a_pool_of_a_board_says_what_to_type_and_gives_the_run_back(tmp_path: Path) -> None:
    victim = Victim(
        tmp_path, url=f"sqlite:///{tmp_path / 'board.db'}", changes=ONE_CELL | {"training": {"steps": 400, "batch_size": 4}}
    )
    pool = victim.start(*victim.run("--jobs", "1"))
    wait_for(lambda: pool.poll() is not None or list(victim.directory.glob("runs/*/metrics.jsonl")))
    pool.send_signal(signal.SIGINT)
    stopped = victim.end(pool)
    assert stopped.returncode == 1, stopped.stderr
    assert "Traceback" not in stopped.stderr
    board = Board(str(victim.url), "small")
    assert f"interrupted: {board.counts().done} of 3 runs are done and kept" in stopped.stderr
    assert f"to continue, type: mutransfer run {victim.config} --out {victim.directory}" in stopped.stderr
    assert board.counts().running == 0
    board.close()


def test_two_that_start_at_once_on_a_board_make_each_run_once(tmp_path: Path) -> None:
    study = opened(tmp_path, widths=[16, 32], storage=f"sqlite:///{tmp_path / 'board.db'}")
    places = [Study(tmp_path / name, study.config) for name in ("one", "other")]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda place: work(place, lambda _: None), places))
    names = [record.run_id for place in places for record in read_records(place.directory)]
    assert sum(made) == len(names) == 6
    assert Counter(names) == Counter(item.run_id for item in make_plan(study.config, {}))


def test_a_driver_with_another_clock_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first driver dies two days ahead; the second lives two days behind. The journal orders by place, not by time."""
    study = opened(tmp_path)
    plan = make_plan(study.config, {})
    order = {item.run_id: rank for rank, item in enumerate(plan)}
    results = {plan[0].run_id: record_of(plan[0], 2.0)}
    real = time.time
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: real() + 2 * DAY_S)
        ahead = Queue(study.directory, study.config)
        ahead.enqueue(plan, max_attempts=2)
        for _ in range(2):
            assert ahead.claim(order) is not None
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: real() - 2 * DAY_S)
        behind = Queue(study.directory, study.config)
        assert behind.recover(results) == 1
        behind.enqueue(plan[1:], max_attempts=2)
        while (claim := behind.claim(order)) is not None:
            behind.finish(claim, record_of(plan[order[claim.run_id]], 2.0))
    assert complete_trials(study) == Counter(list(order))


def test_a_study_that_was_moved_is_the_same_study(tmp_path: Path) -> None:
    study = opened(tmp_path)
    plan = make_plan(study.config, {})
    queue = Queue(study.directory, study.config)
    queue.enqueue(plan, max_attempts=2)
    claim = queue.claim({plan[0].run_id: 0})
    assert claim is not None
    write_record(study.directory / "runs" / plan[0].run_id, record_of(plan[0], 2.0))
    queue.finish(claim, record_of(plan[0], 2.0))
    before = status_document(study)
    moved = open_study(study.directory.rename(tmp_path / "elsewhere"))
    after = status_document(moved)
    assert after["study"] == str(tmp_path / "elsewhere")
    assert str(tmp_path / "elsewhere") in after["next"]
    assert {key: after[key] for key in after if key not in ("study", "next")} == {
        key: before[key] for key in before if key not in ("study", "next")
    }
    assert Queue(moved.directory, moved.config).waiting({item.run_id: 0 for item in plan}) == len(plan) - 1


def make_all(study: Study) -> None:
    """What a driver does, without training."""
    plan = make_plan(study.config, {})
    order = {item.run_id: rank for rank, item in enumerate(plan)}
    done = {record.run_id for record in read_records(study.directory)}
    queue = Queue(study.directory, study.config)
    queue.enqueue([item for item in plan if item.run_id not in done], max_attempts=2)
    while (claim := queue.claim(order)) is not None:
        record = record_of(plan[order[claim.run_id]], 2.0)
        write_record(study.directory / "runs" / claim.run_id, record)
        queue.finish(claim, record)


def test_a_record_deleted_by_hand_is_said_and_its_run_counted_once_however_often(tmp_path: Path) -> None:
    study = opened(tmp_path)
    make_all(study)
    lost = make_plan(study.config, {})[0].run_id
    for _ in range(MAX_DEATHS + 1):
        shutil.rmtree(study.directory / "runs" / lost)
        document = status_document(study)
        assert document["record_gone"] == [lost]
        assert (document["missing"], document["failed"]) == (1, [])
        assert f"without a record now (deleted?), to be made again: {lost}" in status_text(document)
        make_all(study)
        document = status_document(study)
        assert (document["record_gone"], document["missing"], document["failed"]) == ([], 0, [])
    assert complete_trials(study) == Counter(item.run_id for item in make_plan(study.config, {}))


def test_a_record_deleted_by_hand_comes_back_from_the_board(tmp_path: Path) -> None:
    study = opened(tmp_path, storage=f"sqlite:///{tmp_path / 'board.db'}")
    board = Board(str(study.config.storage), study.config.name)
    plan = make_plan(study.config, {})
    board.add(plan)
    for item in plan:
        board.finish(record_of(item, bowl(item)), '{"step": 0}\n')
    board.close()
    assert pull(study) == 3
    before = sorted(read_records(study.directory), key=lambda record: record.run_id)
    shutil.rmtree(study.directory / "runs" / plan[0].run_id)
    assert status_document(study)["missing"] == 0
    assert sorted(read_records(study.directory), key=lambda record: record.run_id) == before


def test_nan_at_step_0_is_a_result(tmp_path: Path) -> None:
    run = tiny_run(kind="sp", init={"hidden_std": 1e30})
    record = train_run(run, tmp_path, prepare(SYNTHETIC, context=16, vocab_size=32))
    assert (record.status, record.loss, record.steps_done, record.last_finite_loss) == ("diverged", None, 0, None)
    assert read_metrics(tmp_path / "metrics.jsonl")[0] | {"grad_norm": None} == {"step": 0, "loss": None, "grad_norm": None}


def test_a_torn_last_line_of_metrics_costs_that_line_alone(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    train_run(tiny_run(), tmp_path, prepare(SYNTHETIC, context=16, vocab_size=32))
    whole = read_metrics(metrics)
    metrics.write_bytes(metrics.read_bytes()[:-9])
    assert read_metrics(metrics) == whole[:-1]
    assert train_run(tiny_run(), tmp_path, prepare(SYNTHETIC, context=16, vocab_size=32)).loss == whole[-1]["validation_loss"]
