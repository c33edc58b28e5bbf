"""What a large study costs: planning and status of 20,000 runs, and a board's overhead with eight workers on one PostgreSQL."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path

from scaling.config_file import load_config
from scaling.records import RunRecord
from sweeps.board import Board
from sweeps.plan import PlannedRun, make_plan
from sweeps.study import StudyConfig
from tests.sweeps.databases import postgres
from tests.sweeps.studies import write_study
from tests.sweeps.test_plan import record_of

LARGE = {
    "widths": [16 * size for size in range(1, 21)],
    "log2_lr": {"low": -14, "high": -1.5, "step": 0.5},
    "seeds": 20,
    "model": {"depth": 1, "head_dim": 16, "context": 16, "vocab_size": 32},
}
WORKERS, TRIALS = 8, 2000


def report() -> None:
    """Print both measurements."""
    with tempfile.TemporaryDirectory() as folder:
        study = load_config(write_study(Path(folder), **LARGE), StudyConfig)
        started = time.perf_counter()
        plan = make_plan(study, {})
        planning = time.perf_counter() - started
        results = {item.run_id: record_of(item, 2.0) for item in plan}
        started = time.perf_counter()
        make_plan(study, results)
        again = time.perf_counter() - started
    print(f"\na study of {len(plan):,} runs plans in {planning:.1f} s (target 5), with all its results in {again:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        # PostgreSQL refuses root and runs as another user, who must reach its files.
        Path(folder).chmod(0o755)
        with postgres(Path(folder)) as server:
            _report_board(server.new_database("bench"), plan[:TRIALS])


def _report_board(url: str, plan: list[PlannedRun]) -> None:
    board = Board(url, "bench")
    board.add(plan)
    records = {item.run_id: record_of(item, 2.0) for item in plan}
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(WORKERS + 1)
    workers = [context.Process(target=_work, args=(url, index, records, gate)) for index in range(WORKERS)]
    for worker in workers:
        worker.start()
    gate.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    counts = board.counts()
    started = time.perf_counter()
    board.states()
    board.failures()
    status = time.perf_counter() - started
    board.close()
    each, of_worker = 1e3 * seconds / counts.done, 1e3 * seconds * WORKERS / counts.done
    print(f"{WORKERS} workers on one PostgreSQL took and finished {counts.done:,} instant runs in {seconds:.1f} s:")
    print(
        f"  {each:.1f} ms a run, {of_worker:.1f} ms of a worker's time (target 20); their states are read in {1e3 * status:.0f} ms"
    )


def _work(url: str, index: int, records: dict[str, RunRecord], gate: object) -> None:
    board = Board(url, "bench", ping=False)
    owner = f"worker {index}"
    gate.wait()  # type: ignore[attr-defined]
    while (claimed := board.claim(owner)) is not None:
        board.finish(records[claimed.run_id], "")
    board.close()
