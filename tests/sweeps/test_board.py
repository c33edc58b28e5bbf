"""The board on SQLite, on a real PostgreSQL, and on MySQL where MUTRANSFER_MYSQL_URL names one: every run is taken and finished once."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from scaling.errors import StudyError
from sweeps.board import MAX_ATTEMPTS, MAX_DEATHS, Board
from sweeps.fleet import mirror
from sweeps.plan import PlannedRun, make_plan
from tests.sweeps.databases import Postgres, postgres
from tests.sweeps.test_plan import bowl, record_of, study_of

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with postgres(tmp_path_factory.mktemp("postgres")) as running:
        yield running


def mysql_database(name: str) -> str:
    """URL of an empty database on the server at MUTRANSFER_MYSQL_URL (mysql+pymysql://user:password@host:port)."""
    given = os.environ["MUTRANSFER_MYSQL_URL"]
    engine = sa.create_engine(given)
    with engine.begin() as connection:
        connection.execute(sa.text(f"DROP DATABASE IF EXISTS {name}"))
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{given.rstrip('/')}/{name}"


@pytest.fixture(params=["sqlite", "postgresql", *(["mysql"] if "MUTRANSFER_MYSQL_URL" in os.environ else [])])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Board]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'board.db'}"
    elif request.param == "mysql":
        url = mysql_database(f"mutransfer_test{next(NUMBERS)}")
    else:
        url = request.getfixturevalue("server").new_database(f"board{next(NUMBERS)}")
    made = Board(url, "small")
    yield made
    made.close()


def planned(folder: Path, **changes: Any) -> list[PlannedRun]:
    return make_plan(study_of(folder, **changes), {})


def test_a_run_is_planned_once_and_the_most_expensive_come_first(board: Board, tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert board.add(plan) == len(plan) == 12
    assert board.add(plan) == 0
    assert board.counts().waiting == 12
    claimed = board.claim("me")
    assert claimed is not None
    assert claimed.run == next(item.run for item in plan if item.run_id == claimed.run_id)
    assert board.states()[claimed.run_id] == "running"


def test_many_workers_never_take_the_same_run(board: Board, tmp_path: Path) -> None:
    plan = planned(tmp_path, seeds=10)
    board.add(plan)

    def worker(name: int) -> list[str]:
        own = Board(board.url, board.study)
        taken = []
        while (claimed := own.claim(f"worker {name}")) is not None:
            taken.append(claimed.run_id)
        own.close()
        return taken

    with ThreadPoolExecutor(8) as pool:
        taken = Counter(run_id for names in pool.map(worker, range(8)) for run_id in names)
    assert taken == Counter(item.run_id for item in plan)


def test_only_one_worker_plans(board: Board) -> None:
    other = Board(board.url, board.study)
    with board.planning() as mine:
        assert mine
        with other.planning() as theirs:
            assert not theirs
    with other.planning() as theirs:
        assert theirs
    other.close()


def test_a_silent_workers_run_is_given_to_another_and_the_first_result_counts(board: Board, tmp_path: Path) -> None:
    plan = planned(tmp_path)[:1]
    board.add(plan)
    assert board.claim("first") is not None
    assert board.requeue_silent(grace_s=60) == []
    assert board.beat("first") == 1
    assert board.requeue_silent(grace_s=-1) == [plan[0].run_id]
    assert board.beat("first") == 0, "it is not the first one's any more"
    assert board.claim("second") is not None
    record = record_of(plan[0], 2.5)
    assert board.finish(record, "metrics")
    assert not board.finish(record.model_copy(update={"loss": 9.0}), "later")
    stored, metrics = board.results()[plan[0].run_id]
    assert (stored.loss, metrics) == (2.5, "metrics")
    assert board.counts().over


def test_a_heartbeat_is_known_to_the_tenth_of_a_second(board: Board, tmp_path: Path) -> None:
    plan = planned(tmp_path)[:1]
    board.add(plan)
    assert board.claim("me") is not None
    assert board.requeue_silent(grace_s=5.0) == []
    time.sleep(0.3)
    assert board.requeue_silent(grace_s=0.1) == [plan[0].run_id]


def test_a_workers_clock_does_not_matter(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers whose clocks are two days apart, each in the other's past or future."""
    plan = planned(tmp_path)[:2]
    board.add(plan)
    for off_s in (-2 * 86_400.0, 2 * 86_400.0):
        real = time.time
        with monkeypatch.context() as clock:
            clock.setattr(time, "time", lambda real=real, off_s=off_s: real() + off_s)
            assert board.claim(f"{off_s:+}") is not None
            assert board.beat(f"{off_s:+}") == 1
            assert board.requeue_silent(grace_s=30.0) == []
    assert board.counts().running == 2


def test_long_metrics_come_back_whole(board: Board, tmp_path: Path) -> None:
    plan = planned(tmp_path)[:1]
    board.add(plan)
    metrics = '{"step": 0, "loss": 2.5}\n' * 10_000
    assert board.finish(record_of(plan[0], 2.5), metrics)
    assert board.results()[plan[0].run_id][1] == metrics


def test_a_run_that_fails_is_tried_again_and_then_left(board: Board, tmp_path: Path) -> None:
    plan = planned(tmp_path)[:1]
    board.add(plan)
    for attempt in range(MAX_ATTEMPTS):
        claimed = board.claim("me")
        assert claimed is not None, attempt
        board.fail(claimed.run_id, "somebody else", "not mine")
        board.fail(claimed.run_id, "me", f"ValueError {attempt}")
    assert board.claim("me") is None
    assert board.failures() == {plan[0].run_id: f"ValueError {MAX_ATTEMPTS - 1}"}
    assert board.retry_failed() == 1
    assert board.claim("me") is not None


def test_a_run_that_kills_its_workers_is_left(board: Board, tmp_path: Path) -> None:
    plan = planned(tmp_path)[:1]
    board.add(plan)
    for pid in range(MAX_DEATHS):
        assert board.claim(f"host_a:{pid}:x") is not None
        assert board.release_of("host%a", pid) == 0, "no pattern"
        assert board.release_of("host_a", pid) == 1
    assert board.claim("me") is None
    assert "died" in board.failures()[plan[0].run_id]


def test_what_is_given_back_has_not_failed(board: Board, tmp_path: Path) -> None:
    board.add(planned(tmp_path)[:1])
    for _ in range(MAX_ATTEMPTS + MAX_DEATHS):
        assert board.claim("me") is not None
        board.give_back("me")
    assert board.counts().waiting == 1


def test_finished_runs_are_trials_of_the_optuna_study_once(board: Board, tmp_path: Path) -> None:
    import optuna

    from sweeps.board import with_driver

    plan = planned(tmp_path)
    board.add(plan)
    for item in plan:
        board.finish(record_of(item, bowl(item)), "")
    board.mark_mirrored([])
    assert mirror(board) == len(plan)
    assert mirror(board) == 0
    storage = optuna.storages.RDBStorage(with_driver(board.url))
    study = optuna.load_study(study_name="small", storage=storage)
    assert Counter(trial.user_attrs["run_id"] for trial in study.trials) == Counter(item.run_id for item in plan)
    assert study.best_value == pytest.approx(2.0)
    storage.remove_session()
    storage.engine.dispose()


def test_studies_of_one_database_keep_apart(board: Board, tmp_path: Path) -> None:
    other = Board(board.url, "other")
    board.add(planned(tmp_path))
    assert other.claim("me") is None
    board.put_config({"name": "small"})
    other.put_config({"name": "other"})
    board.put_config({"name": "small", "widths": [1]})
    assert board.names() == ["other", "small"]
    assert board.config() == {"name": "small", "widths": [1]}
    other.close()


def test_a_database_that_is_not_there_is_an_error_with_its_cure() -> None:
    with pytest.raises(StudyError, match="cannot be opened"):
        Board("postgresql://nobody@127.0.0.1:1/none", "small")
    with pytest.raises(StudyError, match="cannot be opened"):
        Board("garbage", "small")
