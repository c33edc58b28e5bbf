"""Wrong use as users do it: one screen, file, line and cure, exit code 2, no traceback, nothing finished is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sweeps.studies import SMALL, write_study

CLI = [sys.executable, "-m", "sweeps.cli"]


def call(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], cwd=folder, capture_output=True, text=True, env=os.environ | (env or {}))


def refused(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """The message of a command that must end with exit code 2, on one screen and without a traceback."""
    result = call(folder, *arguments, env=env)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) < 25
    return result.stderr


def plan(folder: Path, config: Path) -> str:
    return refused(folder, "plan", str(config), "--no-timing")


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), start=1) if text in line)


def test_unknown_key_wrong_type_and_bad_width_come_together(tmp_path: Path) -> None:
    config = write_study(tmp_path, widths=[16, 30], optimiser={"beta1": 0.9}, training=SMALL["training"] | {"steps": "many"})
    message = plan(tmp_path, config)
    assert f"small.yaml:{line_of(config, 'optimiser')}: optimiser: unknown key" in message
    assert "did you mean 'optimizer'?" in message
    assert f"small.yaml:{line_of(config, 'steps')}: training.steps" in message
    config = write_study(tmp_path, widths=[16, 30])
    assert "width 30 is not divisible by head_dim 8; nearest widths that are: 24 or 32" in plan(tmp_path, config)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"source": "text", "paths": ["none/*.txt"]}, ("none/*.txt: no file matches", "cure:")),
        ({"source": "text", "paths": ["empty.txt"]}, ("the corpus is empty", "cure:")),
        ({"source": "text", "paths": ["one.txt"]}, ("is one document", "cure:")),
        ({"source": "text", "paths": ["short-*.txt"]}, ("the training part has", "a context of 16 needs 17", "cure:")),
        ({"source": "text", "paths": []}, ("is empty, and source text reads files",)),
        ({"source": "jsonl", "paths": ["rows.jsonl"]}, ("rows.jsonl:2: has no key 'text'; its keys: body", "data.field")),
        ({"source": "jsonl", "paths": ["torn.jsonl"], "field": "body"}, ("torn.jsonl:2: is not JSON",)),
    ],
)
def test_a_corpus_that_cannot_be_used(tmp_path: Path, data: dict[str, Any], expected: tuple[str, ...]) -> None:
    files = {
        "empty.txt": "",
        "one.txt": "a" * 500,
        "short-a.txt": "ab",
        "short-b.txt": "cd",
        "rows.jsonl": '{"text": "a"}\n{"body": "b"}\n',
        "torn.jsonl": '{"body": "a"}\n{"bo',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    message = plan(tmp_path, write_study(tmp_path, data=data))
    for part in expected:
        assert part in message


def test_vocabulary_over_the_dtype_and_tokens_over_the_vocabulary(tmp_path: Path) -> None:
    for name in ("train.bin", "validation.bin"):
        np.arange(1000, dtype=np.uint16).tofile(tmp_path / name)
    data = {"source": "bin", "train_bin": "train.bin", "validation_bin": "validation.bin"}
    message = plan(tmp_path, write_study(tmp_path, data=data, model=SMALL["model"] | {"vocab_size": 70_000}))
    assert "model.vocab_size: 70000 tokens do not fit in data.dtype uint16" in message
    message = plan(tmp_path, write_study(tmp_path, data=data, model=SMALL["model"] | {"vocab_size": 900}))
    assert "data.train_bin: holds token 999, the vocabulary has 900" in message
    assert "model.vocab_size: is needed" in plan(tmp_path, write_study(tmp_path, data=data))
    assert (
        call(
            tmp_path, "plan", str(write_study(tmp_path, data=data, model=SMALL["model"] | {"vocab_size": 1000})), "--no-timing"
        ).returncode
        == 0
    )


def test_a_directory_made_by_another_config_is_refused_key_by_key(tmp_path: Path) -> None:
    config = write_study(tmp_path)
    assert call(tmp_path, "plan", str(config), "--no-timing").returncode == 0
    write_study(tmp_path, training=SMALL["training"] | {"steps": 9}, seeds=2)
    message = plan(tmp_path, config)
    assert "study.yaml: training.steps: the study was made with 8" in message
    assert "study.yaml: seeds: the study was made with 1" in message
    assert "--out DIR" in message
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    assert "is not empty and holds no study.yaml" in refused(tmp_path, "plan", str(config), "--out", "other", "--no-timing")


def test_a_changed_corpus_is_noticed(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(name * 300)
    config = write_study(tmp_path, data={"source": "text", "paths": ["*.txt"]})
    assert call(tmp_path, "plan", str(config), "--no-timing").returncode == 0
    (tmp_path / "c.txt").write_text("changed" * 50)
    assert "data.sha256: the study was made with" in plan(tmp_path, config)


def test_options_and_commands_that_do_not_exist(tmp_path: Path) -> None:
    config = write_study(tmp_path)
    assert "no such file" in refused(tmp_path, "study", "nowhere.yaml")
    assert "--wdiths" in refused(tmp_path, "plan", str(config), "--wdiths", "3")
    assert "is no study directory" in refused(tmp_path, "study", str(tmp_path), "--jobs", "1")
    assert "No such command" in refused(tmp_path, "stduy", str(config))
    assert "no study here yet" in refused(tmp_path, "status", str(config))
    assert "start it: mutransfer study" in refused(tmp_path, "status", str(config))


def test_dotted_options_are_overrides(tmp_path: Path) -> None:
    config = write_study(tmp_path)
    result = call(tmp_path, "plan", str(config), "--no-timing", "--log2_lr.low", "-9", "--training.steps=5", "--out", "s")
    assert result.returncode == 0, result.stderr
    assert "16 runs, 0 done" in result.stdout
    assert "steps: 5" in (tmp_path / "s" / "study.yaml").read_text()


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="a small file system needs root to mount")
def test_full_disk_keeps_what_is_done_and_goes_on_after(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let root mount a file system")
    try:
        config = write_study(tmp_path, training=SMALL["training"] | {"steps": 60}, runtime={"log_every_steps": 1})
        message = refused(tmp_path, "run", str(config), "--out", str(disk / "study"))
        assert "no space left on the disk" in message
        assert "cure: free some space" in message
        done = len(list((disk / "study" / "runs").glob("*/record.json")))
        assert done < 12
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        result = call(tmp_path, "run", str(config), "--out", str(disk / "study"))
        assert result.returncode == 0, result.stderr
        assert f"Made {12 - done} runs" in result.stdout
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
