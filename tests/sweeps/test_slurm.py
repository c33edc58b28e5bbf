"""Workers through submitit: the script against a golden file, and a real array by submitit's local executor, one worker pre-empted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scaling.records import read_records
from sweeps.board import Board
from tests.sweeps.studies import write_study

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "fixtures" / "slurm.sbatch"


def mutransfer(*arguments: str | Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
    command = [sys.executable, "-m", "sweeps.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """A folder with an srun in it: submitit takes that for a cluster."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text("#!/bin/sh\n")
    (folder / "srun").chmod(0o755)
    return str(folder)


def test_the_script_is_the_golden_one(tmp_path: Path, cluster: str) -> None:
    config = write_study(tmp_path, storage=f"sqlite:///{tmp_path / 'board.db'}", runtime={"threads": 4})
    arguments = ("--workers", "32", "--gpus", "1", "--cpus", "4", "--param", "slurm_partition=gpu", "--dry-run")
    result = mutransfer("submit", config, "--out", tmp_path / "here", *arguments, path=cluster)
    assert result.returncode == 0, result.stderr
    text = result.stdout.replace(str(tmp_path), "FOLDER").replace(sys.executable, "PYTHON")
    assert text.strip() == GOLDEN.read_text().strip()


def test_what_cannot_be_submitted_is_explained(tmp_path: Path, cluster: str) -> None:
    config = write_study(tmp_path, storage=f"sqlite:///{tmp_path / 'board.db'}")
    here = ("--out", tmp_path / "here")
    nowhere = mutransfer("submit", config, *here)
    assert nowhere.returncode == 2
    assert "no SLURM here" in nowhere.stderr
    wrong = mutransfer("submit", config, *here, "--param", "slurm_partitoin=gpu", "--dry-run", path=cluster)
    assert wrong.returncode == 2
    assert "slurm_partitoin" in wrong.stderr
    alone = mutransfer("submit", config, *here, "--set", "storage=null", path=cluster)
    assert alone.returncode == 2
    assert "has no database" in alone.stderr


@pytest.mark.slow
def test_a_local_array_makes_the_study_although_a_worker_is_preempted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'board.db'}"
    training = {"steps": 300, "batch_size": 4, "validation_sequences": 8}
    config = write_study(tmp_path, storage=url, parametrizations={"mup": {}}, training=training)
    here = tmp_path / "here"
    # Not into a pipe: submitit's controllers inherit it and live on.
    arguments = ("--out", here, "--workers", "2", "--cluster", "local", "--minutes", "3")
    command = [sys.executable, "-m", "sweeps.cli", "submit", str(config), *map(str, arguments)]
    with (tmp_path / "submit.log").open("w") as log:
        assert subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode == 0
    board = Board(url, "small")
    deadline, told = time.monotonic() + 150, 0
    while not (counts := board.counts()).over or counts.done < 6:
        assert time.monotonic() < deadline, [path.read_text()[-1500:] for path in here.glob("slurm/*_log.*")]
        # One alone: a worker that has just come again is deaf until it has loaded.
        if counts.running and told < 1 and _requeued(here / "slurm") == told:
            told += _preempt(here / "slurm")
        time.sleep(0.2)
    assert told == 1
    assert _requeued(here / "slurm") == 1
    assert mutransfer("fetch", url, "--out", here).returncode == 0
    assert len(list(read_records(here))) == 6
    assert board.failures() == {}
    board.close()


def _requeued(folder: Path) -> int:
    return sum(path.read_text().count("Requeued job") for path in folder.glob("*_log.*"))


def _preempt(folder: Path) -> int:
    """Send what SLURM sends to a job that must go, to one worker: USR2. Returns how many were told."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if "submitit.core._submit" in command and str(folder) in command:
            os.kill(int(process.name), 12)
            time.sleep(2)
            return 1
    return 0
