"""What `mutransfer status` takes on a large study: 20,800 runs of a grid, and some hundred of an adaptive search; the whole command."""

from __future__ import annotations

import hashlib
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scaling.config_file import load_config
from scaling.records import RunRecord, run_directory
from sweeps.plan import PlannedRun, make_plan
from sweeps.queue import Queue
from sweeps.search_memory import MEMORY_FILE
from sweeps.study import StudyConfig
from sweeps.study_dir import write_study as make_directory
from tests.bench.board import LARGE
from tests.sweeps.studies import write_study
from tests.sweeps.test_plan import record_of

ROOT = Path(__file__).parents[2]
SEARCHED = {
    "widths": [16, 32, 64, 128],
    "search": {"kind": "adaptive", "precision": 0.1, "max_runs": 40},
    "log2_lr": {"low": -10, "high": -3},
    "model": {"depth": 1, "head_dim": 8, "context": 16, "vocab_size": 32},
}
ROUNDS = 3


def report() -> None:
    """Print the time of the command on both, the least of some; its processor time beside it."""
    with tempfile.TemporaryDirectory() as folder:
        grid = _made(Path(folder) / "grid", LARGE, of_each=2)
        print(
            f"\nmutransfer status, a grid of {_runs(grid):,} runs, half of them made, all in the journal: {_timed(grid)} (target 2 s)"
        )
        searched = _made(Path(folder) / "searched", SEARCHED)
        (searched / MEMORY_FILE).unlink(missing_ok=True)
        first = _timed(searched, rounds=1)
        print(f"mutransfer status, an adaptive search of {_runs(searched)} runs: {_timed(searched)} (target 2 s)")
        print(f"  without what its driver remembered of the search: {first}")


def _loss(planned: PlannedRun) -> float:
    """A bowl, with noise of 0.01 nats that depends on the run alone."""
    noise = int(hashlib.sha256(planned.run_id.encode()).hexdigest()[:8], 16) / 2**32 - 0.5
    best = -7.0 if planned.parametrization == "mup" else -5.0 - math.log2(planned.width / 16)
    return 2 + 0.04 * (planned.log2_lr - best) ** 2 + 0.035 * noise


def _made(folder: Path, changes: dict[str, Any], of_each: int = 1) -> Path:
    """A study's directory with the records of every `of_each`-th run of its plan, and its journal."""
    folder.mkdir()
    study = load_config(write_study(folder, **changes), StudyConfig)
    directory = make_directory(folder / "study", study).directory
    results: dict[str, RunRecord] = {}
    while todo := [run for run in make_plan(study, results)[::of_each] if run.run_id not in results]:
        results |= {run.run_id: record_of(run, _loss(run)) for run in todo}
    for run_id, record in results.items():
        run_directory(directory, run_id).mkdir(parents=True)
        (run_directory(directory, run_id) / "record.json").write_text(record.model_dump_json(indent=1) + "\n")
    queue = Queue(directory, study)
    queue.enqueue(make_plan(study, results), max_attempts=2)
    return directory


def _runs(directory: Path) -> int:
    study = load_config(directory / "study.yaml", StudyConfig)
    return len(make_plan(study, {})) if study.search.kind == "grid" else len(list((directory / "runs").iterdir()))


def _timed(directory: Path, rounds: int = ROUNDS) -> str:
    walls, processors = [], []
    for _ in range(rounds):
        before, started = _children_s(), time.perf_counter()
        subprocess.run([sys.executable, "-m", "sweeps.cli", "status", directory], cwd=ROOT, capture_output=True, check=False)
        walls.append(time.perf_counter() - started)
        processors.append(_children_s() - before)
    return f"{min(walls):.2f} s, {min(processors):.2f} s of a processor"


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
