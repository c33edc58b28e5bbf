"""Real processes killed for real: nothing that was finished is lost, nothing is made twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from scaling.config_file import load_config
from scaling.records import read_metrics, read_records
from sweeps.plan import make_plan
from sweeps.queue import Queue
from sweeps.study import StudyConfig
from sweeps.study_dir import STUDY_FILE
from tests.sweeps.studies import write_study

# Two hundred small steps: a run takes about half a second, so that kills fall into runs.
TRAINING = {"steps": 200, "batch_size": 4, "validation_sequences": 8}
CLI = [sys.executable, "-m", "sweeps.cli"]


def _heed_ctrl_c() -> None:
    """A shell starts background jobs with SIGINT ignored, and their children inherit it: the tests may run in one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLI, *arguments], cwd=folder, preexec_fn=_heed_ctrl_c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def workers_of(driver: int) -> list[int]:
    """Process ids of the driver's worker processes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.search(r"^PPid:\s*(\d+)", (entry / "status").read_text(), re.M)[1])  # type: ignore[index]
            command = (entry / "cmdline").read_text()
        except (OSError, TypeError):
            continue
        if parent == driver and "spawn_main" in command:
            found.append(int(entry.name))
    return found


def check_exact(study_dir: Path) -> None:
    """Exactly the planned runs, each once: on disk, in Optuna, and in the steps of each metrics file."""
    study = load_config(study_dir / STUDY_FILE, StudyConfig)
    records = {record.run_id: record for record in read_records(study_dir)}
    planned = {run.run_id for run in make_plan(study, records)}
    assert set(records) == planned
    assert {path.name for path in (study_dir / "runs").iterdir()} == planned
    trials = Queue(study_dir, study).trials()
    complete = Counter(trial.user_attrs["run_id"] for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE)
    assert complete == Counter(dict.fromkeys(planned, 1))
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}
    for run_id in planned:
        steps = [row["step"] for row in read_metrics(study_dir / "runs" / run_id / "metrics.jsonl") if "loss" in row]
        assert steps == sorted(set(steps))
        assert steps[-1] == study.training.steps - 1


def finish(config: Path, study_dir: Path, folder: Path) -> dict[str, Any]:
    result = subprocess.run(
        [*CLI, "run", str(config), "--out", str(study_dir), "--json"], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_sigkill_five_times_at_random_moments(tmp_path: Path, victim: str) -> None:
    rng = random.Random(victim)
    config, study_dir = write_study(tmp_path, training=TRAINING), tmp_path / "study"
    kills = 0
    while kills < 5:
        driver = start(["run", str(config), "--out", str(study_dir)], tmp_path)
        before = len(list((study_dir / "runs").glob("*/record.json")))
        while driver.poll() is None and len(list((study_dir / "runs").glob("*"))) <= before:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 1.5))
        if victim == "driver":
            driver.send_signal(signal.SIGKILL)
            kills += 1
        else:
            while driver.poll() is None and kills < 5:
                if workers := workers_of(driver.pid):
                    os.kill(rng.choice(workers), signal.SIGKILL)
                    kills += 1
                time.sleep(rng.uniform(0.5, 4))
        driver.communicate(timeout=200)
        if driver.returncode == 0:
            break
    assert kills >= (5 if victim == "driver" else 3)
    finish(config, study_dir, tmp_path)
    check_exact(study_dir)
    assert finish(config, study_dir, tmp_path)["made"] == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_says_what_to_type_and_keeps_what_is_done(tmp_path: Path, sent: signal.Signals) -> None:
    config, study_dir = write_study(tmp_path, training=TRAINING), tmp_path / "study"
    driver = start(["run", str(config), "--out", str(study_dir)], tmp_path)
    while driver.poll() is None and not list((study_dir / "runs").glob("*/record.json")):
        time.sleep(0.02)
    driver.send_signal(sent)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == 1, err
    assert "Traceback" not in err
    done = len(list((study_dir / "runs").glob("*/record.json")))
    assert f"interrupted: {done} of 12 runs are done and kept" in err
    assert f"to continue, type: mutransfer run {config} --out {study_dir}" in err
    assert finish(config, study_dir, tmp_path)["made"] == 12 - done
    check_exact(study_dir)


def test_ctrl_c_inside_of_an_exec_ends_with_1_too(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(
        "import sweeps.cli as cli\n"
        "def app(standalone_mode):\n"
        "    cli.messages().print('begun')\n"
        "    exec('raise KeyboardInterrupt')\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    result = subprocess.run([sys.executable, "-m", "typed"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "stopped; nothing finished is lost" in result.stderr


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    config, study_dir = write_study(tmp_path, training=TRAINING), tmp_path / "study"
    first = start(["run", str(config), "--out", str(study_dir)], tmp_path)
    while first.poll() is None and not list((study_dir / "runs").glob("*")):
        time.sleep(0.02)
    second = start(["run", str(config), "--out", str(study_dir)], tmp_path)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert "another driver works on this study" in err
    first.communicate(timeout=200)
    assert first.returncode == 0
    check_exact(study_dir)
