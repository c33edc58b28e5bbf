"""Studies whose runs are laid over processes: made, taken up again after a kill, and refused before the first run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scaling.config import RunConfig, RuntimeConfig
from scaling.config_file import load_config
from scaling.data import prepare
from scaling.parallel import Layout
from scaling.ranks import Team
from scaling.records import read_records
from scaling.train import train_run
from tests.sweeps.studies import write_study

ROOT = Path(__file__).parents[2]
CELL: Mapping[str, Any] = {
    "widths": [16],
    "log2_lr": {"low": -7, "high": -6, "step": 1},
    "parametrizations": {"mup": {}},
    "training": {"steps": 40, "batch_size": 4, "validation_sequences": 8},
}
SHARDED = {"processes": 2, "parallel": {"fsdp": 2}, "checkpoint_every_steps": 4, "log_every_steps": 1}


@pytest.mark.slow
def test_a_sharded_study_whose_driver_is_killed_goes_on_in_the_middle_of_a_run_and_has_the_losses_of_one_process(
    tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    config, study_dir = write_study(tmp_path, runtime=SHARDED, **CELL), tmp_path / "study"
    command = [sys.executable, "-m", "sweeps.cli", "run", str(config), "--out", str(study_dir), "--jobs", "1"]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_rows(study_dir, 6, driver)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert call("run", config, "--out", study_dir, "--jobs", "1")[0] == 0
    records = list(read_records(study_dir))
    assert len(records) == 2
    assert any(record.resumed_from_step >= 4 for record in records)
    for record in records:
        assert (record.processes, record.parallel) == (2, Layout(fsdp=2))
        assert record.loss == pytest.approx(loss_of_one_process(study_dir, record.run_id, tmp_path), abs=1e-5)


def wait_for_rows(study_dir: Path, rows: int, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 100
    while not any(path.read_bytes().count(b"\n") >= rows for path in study_dir.glob("runs/*/metrics.jsonl")):
        assert driver.poll() is None, "the driver ended"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def loss_of_one_process(study_dir: Path, run_id: str, folder: Path) -> float | None:
    run = load_config(study_dir / "runs" / run_id / "config.yaml", RunConfig)
    run = run.model_copy(update={"runtime": RuntimeConfig()})
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    return train_run(run, folder / run_id, corpus).loss


def test_a_layout_that_some_width_or_batch_cannot_have_is_refused_with_all_its_faults_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr(Team, "_assemble", lambda *_: pytest.fail("a process was started"))
    runtime = {"processes": 4, "parallel": {"fsdp": 4, "tp": 4}}
    config = write_study(tmp_path, runtime=runtime, axes={"batch_size": {"values": [2, 8]}})
    code, _, said = call("plan", config, "--out", tmp_path / "study")
    assert code == 2
    for part in (
        "fsdp 4 x tp 4 is 16 processes, and runtime.processes is 4",
        "2 attention heads (width 16) cannot be shared equally by 4",
        "training.batch_size 2 cannot be shared equally by 4",
    ):
        assert part in said
    assert "(width 32)" not in said
    assert f"{config}:" in said
    assert not (tmp_path / "study").exists()


def test_a_pipeline_that_some_depth_of_a_study_cannot_have_is_refused(
    tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    runtime = {"processes": 2, "parallel": {"pp": 2}}
    training = CELL["training"] | {"micro_batch_size": 2}
    config = write_study(tmp_path, runtime=runtime, training=training, axes={"depth": {"values": [2, 3]}})
    code, _, said = call("plan", config, "--out", tmp_path / "study")
    assert code == 2
    assert "model.depth 3 (blocks) cannot be shared equally by 2" in said


@pytest.mark.slow
def test_plan_times_the_steps_of_a_study_on_its_own_processes(tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    config = write_study(tmp_path, **(dict(CELL) | {"runtime": {"processes": 2, "parallel": {"tp": 2}}}))
    code, answer, _ = call("plan", config, "--out", tmp_path / "study", "--json")
    assert code == 0
    assert '"seconds": null' not in answer
