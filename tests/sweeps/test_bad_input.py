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
import yaml

from sweeps.study_dir import open_study
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
    assert "small.yaml:5: data.train_bin: " in message
    assert "holds token id 999; a vocabulary of 900 ends at 899" in message
    assert "model.vocab_size: is needed" in plan(tmp_path, write_study(tmp_path, data=data))
    assert (
        call(
            tmp_path, "plan", str(write_study(tmp_path, data=data, model=SMALL["model"] | {"vocab_size": 1000})), "--no-timing"
        ).returncode
        == 0
    )


def test_a_directory_made_by_another_config_is_refused_key_by_key(tmp_path: Path) -> None:
    config = write_study(tmp_path)
    open_study(config, tmp_path / "studies" / "small")
    write_study(tmp_path, training=SMALL["training"] | {"steps": 9}, optimizer={"beta1": 0.8})
    message = plan(tmp_path, config)
    assert "study.yaml: training.steps: the study was made with 8" in message
    assert "study.yaml: optimizer.beta1: the study was made with 0.9" in message
    assert "--out DIR" in message
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    assert "is not empty and holds no study.yaml" in refused(tmp_path, "plan", str(config), "--out", "other", "--no-timing")


def test_a_changed_corpus_is_noticed(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(name * 300)
    config = write_study(tmp_path, data={"source": "text", "paths": ["*.txt"]})
    open_study(config, tmp_path / "studies" / "small")
    (tmp_path / "c.txt").write_text("changed" * 50)
    assert "data.sha256: the study was made with" in plan(tmp_path, config)


def test_options_and_commands_that_do_not_exist(tmp_path: Path) -> None:
    config = write_study(tmp_path)
    assert "no such file" in refused(tmp_path, "study", "nowhere.yaml")
    assert "--wdiths" in refused(tmp_path, "plan", str(config), "--wdiths", "3")
    assert "is no study: it holds no study.yaml" in refused(tmp_path, "study", str(tmp_path), "--jobs", "1")
    assert "No such command" in refused(tmp_path, "stduy", str(config))
    assert "is no study: it holds no study.yaml" in refused(tmp_path, "status", str(config))
    assert "start it: mutransfer study" in refused(tmp_path, "status", str(config))


def test_dotted_options_are_overrides(tmp_path: Path) -> None:
    config = write_study(tmp_path)
    result = call(tmp_path, "plan", str(config), "--no-timing", "--log2_lr.low", "-9", "--training.steps=5", "--out", "s")
    assert result.returncode == 0, result.stderr
    assert "16 runs, 0 done" in result.stdout
    assert result.stdout.count(" 320 ") == 16, "every run of 5 steps of 4 sequences of 16 tokens"
    assert not (tmp_path / "s").exists(), "a plan leaves nothing behind"


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="a small file system needs root to mount")
def test_full_disk_keeps_what_is_done_and_goes_on_after(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let root mount a file system")
    try:
        config = write_study(tmp_path, training=SMALL["training"] | {"steps": 60}, runtime={"log_every_steps": 1})
        stopped = call(tmp_path, "run", str(config), "--out", str(disk / "study"))
        assert stopped.returncode == 1, "nothing was used wrongly"
        assert "Traceback" not in stopped.stderr
        assert "no space left on the disk" in stopped.stderr
        assert "cure: free some space" in stopped.stderr
        done = len(list((disk / "study" / "runs").glob("*/record.json")))
        assert done < 12
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        result = call(tmp_path, "run", str(config), "--out", str(disk / "study"))
        assert result.returncode == 0, result.stderr
        assert f"Made {12 - done} runs" in result.stdout
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_target_is_checked_before_anything_is_trained(tmp_path: Path) -> None:
    message = plan(tmp_path, write_study(tmp_path, target="nowhere.yaml"))
    assert "target: " in message
    assert "nowhere.yaml: no such file" in message
    (tmp_path / "tiny.yaml").write_text("width: 8\ntokens: 10240\n")
    message = refused(tmp_path, "study", str(write_study(tmp_path, target="tiny.yaml")), "--jobs", "1")
    assert "tiny.yaml:1: width: target width 8 is smaller than the base width 16" in message
    assert not (tmp_path / "studies").exists()


def test_a_file_of_another_kind_is_named_as_such(tmp_path: Path) -> None:
    config = str(write_study(tmp_path))
    assert "holds a study" in refused(tmp_path, "train", config)
    (tmp_path / "target.yaml").write_text("width: 64\ntokens: 10240\n")
    assert "holds a target" in refused(tmp_path, "study", "target.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("description: 2020-13-45\n", "is not YAML"),
        ("seeds: !!int abc\n", "is not YAML"),
        (f"seeds: {'9' * 5000}\n", "is not YAML"),
        ("x: &a {b: *a}\n", "nested too deeply, or holds itself"),
        ("x: " + "[" * 3000 + "\n", "nested too deeply, or holds itself"),
        ("5: 1\n", "is no key"),
        ("\n".join(f"unknown{index}: 1" for index in range(200)), "more"),
    ],
)
def test_files_that_break_a_yaml_reader(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    assert expected in refused(tmp_path, "plan", "broken.yaml")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seeds": True}, "small.yaml:"),
        ({"widths": [16, 10**400]}, "small.yaml:"),
        ({"widths": [16, 17]}, "widths: width 17 is not divisible by head_dim 8; nearest widths that are: 16 or 24"),
        ({"log2_lr": {"low": -8, "high": -6, "step": 1e-9}}, "log2_lr.step: step 1e-09 gives more than 1000 learning rates"),
        ({"log2_lr": {"low": -6, "high": -8}}, "log2_lr.low: low -6 lies above high -8"),
        ({"model": {"depth": 200_000}}, "model.depth"),
        ({"parametrizations": {"mup": None}}, "parametrizations.mup: needs keys below it"),
        ({"data": {"source": "zipf-markov", "paths": ["a.txt"]}}, "data.paths: source 'zipf-markov' reads no paths"),
        (
            {"optimizer": {"kind": "sgd"}, "parametrizations": {"mup-simple": {}}},
            "parametrizations: mup-simple: mup-simple has no known rule",
        ),
        (
            {"model": SMALL["model"] | {"tied_embeddings": True}, "parametrizations": {"mup": {"form": "table3"}}},
            "parametrizations: mup: table3 gives embedding and readout different rules",
        ),
        ({"training": {"batch_size": 4, "micro_batch_size": 3}}, "training.micro_batch_size: batch_size 4 is not a multiple"),
    ],
)
def test_values_out_of_bounds_stand_at_their_line(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert expected in plan(tmp_path, write_study(tmp_path, **changes))


def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    config = str(write_study(tmp_path))
    assert "is a file, and a study's folder is wanted" in refused(tmp_path, "run", config, "--out", "small.yaml", "--jobs", "1")
    assert "not a directory" in refused(tmp_path, "run", config, "--out", "small.yaml/x", "--jobs", "1")
    assert "cannot be opened" in refused(tmp_path, "run", config, "--set", "storage=garbage", "--jobs", "1")


def test_a_run_directory_holds_one_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"model": SMALL["model"] | {"width": 16}, "data": SMALL["data"], "training": SMALL["training"]})
    )
    arguments = ("train", "run.yaml", "--base.width=16", "--out", "run")
    assert call(tmp_path, *arguments).returncode == 0
    assert "holds another run" in refused(tmp_path, *arguments, "--set", "training.steps=9")
