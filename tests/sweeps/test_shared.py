"""A study in a real PostgreSQL, its workers and the server itself killed: each planned run once, its losses those of a quiet study."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaling.records import read_records
from sweeps.board import Board
from sweeps.fleet import work
from sweeps.plan import make_plan
from sweeps.study_dir import find_study, open_study
from tests.sweeps.databases import Postgres, postgres
from tests.sweeps.studies import write_study

ROOT = Path(__file__).parents[2]
TRAINING = {"steps": 150, "batch_size": 4, "validation_sequences": 8}
SEARCH = {
    "search": {"kind": "adaptive", "precision": 0.3, "max_runs": 4},
    "log2_lr": {"low": -9, "high": -5},
    "parametrizations": {"mup": {}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with postgres(tmp_path_factory.mktemp("postgres")) as running:
        yield running


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "sweeps.cli", *map(str, arguments)]


def mutransfer(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


def losses(directory: Path) -> dict[str, float | None]:
    return {record.run_id: record.loss for record in read_records(directory)}


class Machine:
    """One worker with a directory of its own, started again whenever it is killed."""

    def __init__(self, url: str, directory: Path) -> None:
        self._command = command("worker", url, "--out", directory, "--grace", "4")
        self._log = directory.with_suffix(".log").open("a")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._log.close()


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("changes", [{}, SEARCH], ids=["grid", "adaptive"])
def test_three_workers_and_a_server_that_are_killed_make_each_run_once(
    server: Postgres, tmp_path: Path, changes: dict[str, object]
) -> None:
    url = server.new_database(f"shared_{tmp_path.name}")
    config = write_study(tmp_path, training=TRAINING, storage=url, **changes)
    # The study goes onto the board by its first worker; the others know the database alone.
    first = subprocess.Popen(
        command("worker", config, "--out", tmp_path / "first", "--grace", "4"), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    board = Board(url, "small")
    deadline = time.monotonic() + 540
    while board.config() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.kill()
    first.wait()
    machines = [Machine(url, tmp_path / f"machine{index}") for index in range(3)]
    chance, kills, server_killed = random.Random(os.environ.get("KILL_SEED", "0")), 0, False
    try:
        while any(machine.process.poll() is None for machine in machines):
            assert time.monotonic() < deadline, [(tmp_path / f"machine{i}.log").read_text()[-2000:] for i in range(3)]
            time.sleep(chance.uniform(0.5, 2.5))
            counts = board.counts()
            if not server_killed and counts.done >= 2:
                server.kill()
                time.sleep(1.0)
                server.start()
                server_killed = True
            victim = chance.choice(machines)
            if kills < 6 and victim.process.poll() is None and not counts.over:
                victim.kill()
                kills += 1
                victim.start()
    finally:
        for machine in machines:
            machine.close()
    assert kills >= 3
    assert server_killed
    assert [machine.process.returncode for machine in machines] == [0, 0, 0]
    _require_exact(board, url, tmp_path)
    board.close()


def _require_exact(board: Board, url: str, tmp_path: Path) -> None:
    """Board, directories, and the Optuna study have each planned run once, with the losses of a study that nobody disturbed."""
    import optuna

    from sweeps.board import with_driver

    assert mutransfer("fetch", url, "--out", tmp_path / "fetched").returncode == 0
    fetched = losses(tmp_path / "fetched")
    study = find_study(tmp_path / "fetched")
    planned = Counter(
        item.run_id for item in make_plan(study.config, {record.run_id: record for record in read_records(study.directory)})
    )
    assert Counter(list(board.states())) == planned == Counter(list(fetched))
    assert set(board.states().values()) == {"done"}
    storage = optuna.storages.RDBStorage(with_driver(url))
    trials = optuna.load_study(study_name="small", storage=storage).get_trials()
    storage.remove_session()
    storage.engine.dispose()
    assert Counter(trial.user_attrs["run_id"] for trial in trials) == planned
    quiet = mutransfer("run", tmp_path / "small.yaml", "--out", tmp_path / "quiet", "--jobs", "2", "--set", "storage=null")
    assert quiet.returncode == 0, quiet.stderr
    assert losses(tmp_path / "quiet") == fetched
    status = mutransfer("status", tmp_path / "fetched")
    assert f"{len(fetched)} of {len(fetched)} runs done" in status.stdout
    assert (next((tmp_path / "fetched" / "runs").iterdir()) / "metrics.jsonl").read_text().count("\n") > 10


def test_run_makes_a_pool_of_workers_and_another_study_of_that_name_is_refused(server: Postgres, tmp_path: Path) -> None:
    url = server.new_database(f"pool_{tmp_path.name}")
    config = write_study(tmp_path, storage=url, parametrizations={"mup": {}}, widths=[16])
    first = mutransfer("run", config, "--out", tmp_path / "here", "--jobs", "2", "--json")
    assert first.returncode == 0, first.stderr
    assert '"complete": 3' in first.stdout
    again = mutransfer("run", config, "--out", tmp_path / "here", "--jobs", "2")
    assert "Nothing left to do" in again.stdout
    other = mutransfer("worker", config, "--out", tmp_path / "there", "--set", "training.steps=9")
    assert other.returncode == 2
    assert "holds another study named 'small'" in other.stderr
    assert "training.steps" in other.stderr


def test_an_exception_in_a_run_is_reported_with_what_to_type(server: Postgres, tmp_path: Path) -> None:
    url = server.new_database(f"fails_{tmp_path.name}")
    config = write_study(tmp_path, storage=url, parametrizations={"mup": {}}, widths=[16])
    board = Board(url, "small")
    broken = make_plan(find_study_config(config), {})[0]
    directory = tmp_path / "here" / "runs" / broken.run_id
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").mkdir()  # the run cannot write its metrics
    result = mutransfer("run", config, "--out", tmp_path / "here", "--jobs", "1")
    assert result.returncode == 1, result.stderr
    assert broken.run_id in result.stdout
    assert "mutransfer retry" in result.stdout
    (directory / "metrics.jsonl").rmdir()
    assert mutransfer("retry", tmp_path / "here", "--jobs", "1").returncode == 0
    assert board.failures() == {}
    board.close()


def test_a_worker_that_starts_while_the_database_is_away_waits_for_it(server: Postgres, tmp_path: Path) -> None:
    url = server.new_database(f"away_{tmp_path.name}")
    study = open_study(write_study(tmp_path, storage=url, parametrizations={"mup": {}}, widths=[16]), tmp_path / "here")
    server.kill()
    again = threading.Timer(1.0, server.start)
    again.start()
    said: list[str] = []
    assert work(study, said.append) == 3
    again.join()
    assert "the database does not answer, trying again for 60 s" in said[0]


def test_a_command_that_loses_its_database_says_what_to_type(server: Postgres, tmp_path: Path) -> None:
    url = server.new_database(f"lost_{tmp_path.name}")
    study = open_study(write_study(tmp_path, storage=url), tmp_path / "here")
    server.kill()
    try:
        asked = mutransfer("status", study.directory)
    finally:
        server.start()
    assert asked.returncode == 2
    assert "cannot be opened" in asked.stderr
    assert "Traceback" not in asked.stderr


def find_study_config(path: Path):  # type: ignore[no-untyped-def]
    return open_study(path, path.parent / "here").config


def test_a_worker_without_a_database_says_what_to_give(tmp_path: Path) -> None:
    result = mutransfer("worker", write_study(tmp_path), "--out", tmp_path / "here")
    assert result.returncode == 2
    assert "--set storage=postgresql://" in result.stderr
    assert not (tmp_path / "here").exists(), "nothing is left behind"
