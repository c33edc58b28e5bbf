"""The three rooms: imports go one way, analysis stays free of torch and optuna, `--help` is fast, the names are ours."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {"scaling": {"scaling"}, "analysis": {"scaling", "analysis"}, "sweeps": {"scaling", "analysis", "sweeps"}}
TORCH_FREE = (
    "accounting",
    "batch_rules",
    "config",
    "config_base",
    "model_config",
    "config_file",
    "coordinate_rows",
    "errors",
    "exports",
    "hyperparameters",
    "locks",
    "parallel",
    "parametrization",
    "records",
    "schedule",
    "shapes",
    "torchrun",
)


def imports_of(path: Path) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        rooms = {name.split(".")[0] for name in imports_of(path)} & set(ALLOWED)
        assert rooms <= ALLOWED[room], path


def test_analysis_uses_only_the_torch_free_half_of_scaling() -> None:
    for path in sorted((ROOT / "analysis").rglob("*.py")):
        names = imports_of(path)
        assert not {name.split(".")[0] for name in names} & {"torch", "optuna", "mup"}, path
        parts = {name.split(".")[1] for name in names if name.startswith("scaling.")}
        assert parts <= set(TORCH_FREE), path


@pytest.mark.parametrize(
    "statement",
    [
        "import analysis.transfer, analysis.recommend, analysis.report, analysis.plots",
        "import sweeps.cli, sweeps.pinning, sweeps.plan, sweeps.study_dir, sweeps.worker, sweeps.progress",
        *(f"import scaling.{name}" for name in TORCH_FREE),
    ],
)
def test_neither_torch_nor_optuna_is_loaded(statement: str) -> None:
    code = f"import sys; {statement}; sys.exit(bool({{'torch', 'optuna', 'mup'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_help_is_fast() -> None:
    """Best of several, against the bare interpreter in the same moment, so that a busy machine does not decide."""

    def seconds(*arguments: str) -> float:
        times = []
        for _ in range(4):
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=True)
            times.append(time.perf_counter() - started)
        return min(times)

    bare, asked = seconds("-c", "pass"), seconds("-m", "sweeps.cli", "--help")
    assert asked - bare < 0.3 * max(1.0, bare / 0.02)


@pytest.mark.parametrize("room", ALLOWED)
def test_the_packages_are_ours(room: str) -> None:
    """PyPI has a `sweeps`, a `scaling` and an `analysis`; `wandb[sweeps]` installs one of them over ours."""
    code = f"import {room}; print({room}.__file__)"
    where = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(where).parent == ROOT / room


def test_files_are_of_a_size_to_read() -> None:
    for room in ALLOWED:
        for path in (ROOT / room).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path
