"""Runs spread over two real processes: the losses of one process, one record a run, reasons of ranks that die, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scaling.config import OptimizerConfig, RunConfig, RuntimeConfig, TrainingConfig
from scaling.data import prepare
from scaling.errors import ConfigError
from scaling.parallel import Layout
from scaling.ranks import RankDied, Team
from scaling.records import Pruned, read_metrics, read_records
from scaling.torchrun import follows, started_by_torchrun
from scaling.train import Progress, train_run
from sweeps.board import Board
from tests.conftest import tiny_run
from tests.sweeps.studies import write_study

ROOT = Path(__file__).parents[2]
TRAINING = {"steps": 400, "batch_size": 4, "validation_sequences": 8}


def spread(processes: int = 2, checkpoint: int | None = None, **changes: Any) -> RunConfig:
    runtime = RuntimeConfig(processes=processes, log_every_steps=1, checkpoint_every_steps=checkpoint)
    return tiny_run(**changes).model_copy(update={"runtime": runtime})


def corpus_of(run: RunConfig) -> Any:
    return prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)


def curve(directory: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl") if "loss" in row]


def ranks_of(leader: int) -> list[int]:
    """Process ids of the ranks that a process has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if int(fields[1]) == leader and fields[0] != "Z" and "scaling.ranks" in command:
            found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def end_at_step_4(row: Mapping[str, Any]) -> Pruned | None:
    return Pruned(rule="test", step=5, smoothed_loss=row["loss"]) if row["step"] == 4 else None


@pytest.mark.slow
def test_two_processes_train_as_one_does_run_after_run_and_a_rank_that_dies_fails_the_attempt(tmp_path: Path) -> None:
    """Accumulation, clipping, validation, a run ended early, and one that loses a rank and is taken up by new ones."""
    training = TrainingConfig(steps=12, batch_size=8, micro_batch_size=2, validation_sequences=70, validate_every_steps=5)
    changes = {"training": training, "optimizer": OptimizerConfig(lr=0.01, weight_decay=0.1, clip_norm=0.5)}
    one, two = spread(1, **changes), spread(2, checkpoint=3, **changes)
    assert one.run_id == two.run_id
    corpus = corpus_of(one)
    alone = train_run(one, tmp_path / "alone", corpus)

    def shoot(progress: Progress) -> None:
        if progress.step == 8:
            os.kill(ranks_of(os.getpid())[0], signal.SIGKILL)

    with Team() as team:
        whole = train_run(two, tmp_path / "whole", corpus, team=team)
        first = ranks_of(os.getpid())
        pruned = train_run(two, tmp_path / "pruned", corpus, watch=end_at_step_4, team=team)
        assert ranks_of(os.getpid()) == first
        assert len(first) == 1
        with pytest.raises(RankDied, match=r"rank 1 of 2 died \(exit code -9\)"):
            train_run(two, tmp_path / "cut", corpus, shoot, team=team)
        resumed = train_run(two, tmp_path / "cut", corpus, team=team)
        second = ranks_of(os.getpid())
    assert gone([*first, *second])
    assert whole.loss == pytest.approx(alone.loss, rel=1e-5)
    assert curve(tmp_path / "whole") == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)
    norms = [[row["grad_norm"] for row in read_metrics(tmp_path / name / "metrics.jsonl")[:12]] for name in ("whole", "alone")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert (pruned.status, pruned.steps_done) == ("pruned", 5)
    assert resumed.resumed_from_step == 6
    assert curve(tmp_path / "cut") == pytest.approx(curve(tmp_path / "whole"), rel=1e-6)


def test_a_rank_that_cannot_start_is_no_riddle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: an interpreter that ends at once."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankDied, match=r"rank 1 of 2 died \(exit code 1\)"), Team() as team, team.run(spread()):
        pass


def test_batches_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be shared equally by 3 processes"), Team() as team, team.run(spread(3)):
        pass
    with pytest.raises(ValueError, match="processes 3 does not divide"):
        RunConfig.model_validate(spread(3).model_dump())


@pytest.mark.slow
def test_a_killed_worker_leaves_no_rank_behind(tmp_path: Path) -> None:
    """A pool whose runs have two processes each: its worker is killed in a run."""
    config = write_study(tmp_path, training=TRAINING, widths=[16], parametrizations={"mup": {}}, runtime={"processes": 2})
    study_dir = tmp_path / "study"
    command = [sys.executable, "-m", "sweeps.cli", "run", str(config), "--out", str(study_dir), "--jobs", "1"]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        worker, ranks = _wait_for_ranks(driver, study_dir)
        os.kill(worker, signal.SIGKILL)
        assert gone([worker, *ranks])
    finally:
        driver.kill()
        driver.wait()


def _wait_for_ranks(driver: subprocess.Popen[bytes], study_dir: Path) -> tuple[int, list[int]]:
    """The worker of a driver and the ranks that it has started, once they train."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and driver.poll() is None:
        for child in _children(driver.pid):
            ranks = ranks_of(child)
            if ranks and any(path.stat().st_size for path in study_dir.glob("runs/*/metrics.jsonl")):
                return child, ranks
        time.sleep(0.02)
    raise AssertionError("no ranks were started")


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_worker_that_torchrun_starts_twice_makes_each_run_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'board.db'}"
    sharded = {"processes": 2, "parallel": {"fsdp": 2}}
    config = write_study(tmp_path, storage=url, widths=[16], parametrizations={"mup": {}}, runtime=sharded)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "sweeps.cli", "worker", str(config), "--out", str(tmp_path / "study")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("made 3 runs") == 1
    assert [record.parallel for record in read_records(tmp_path / "study")] == [Layout(fsdp=2)] * 3
    board = Board(url, "small")
    assert board.counts().done == 3
    board.close()


def test_a_pool_under_torchrun_is_refused(tmp_path: Path) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert started_by_torchrun(environment)
    assert follows(environment)
    assert not follows(environment | {"RANK": "0"})
    assert not started_by_torchrun(environment | {"WORLD_SIZE": "1"})
    command = [sys.executable, "-m", "sweeps.cli", "run", str(write_study(tmp_path)), "--out", str(tmp_path / "study")]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "once for each rank" in result.stderr
