"""Ways to train the quickstart's runs: workers and threads, precisions, compilation."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scaling.config import RunConfig
from scaling.data import prepare
from scaling.train import Trainer
from sweeps.study_dir import open_study

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "studies" / "quickstart.yaml"
SEEDS = 3


def quickstart_run(width: int, folder: Path, *, threads: int = 1, steps: int | None = None, **training: Any) -> RunConfig:
    """A muP run of the quickstart at its middle LR."""
    study = open_study(QUICKSTART, folder)
    run = study.config.run("mup", width, -8, 0)
    updates = {"steps": steps or run.training.steps} | training
    return run.model_copy(
        update={
            "training": run.training.model_copy(update=updates),
            "runtime": run.runtime.model_copy(update={"threads": threads}),
        }
    )


def time_steps(run: RunConfig, seconds: float) -> tuple[float, float]:
    """Median seconds of a step after the first, for about `seconds`, and the first step's seconds."""
    trainer = Trainer(run, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size))
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 4 or time.perf_counter() - started < seconds + times[0]:
        before = time.perf_counter()
        trainer.step(len(times))
        times.append(time.perf_counter() - before)
    return statistics.median(times[2:]), times[0]


def report_workers(width: int = 64) -> None:
    """Two processes of one thread against one of two threads, each for the same wall time."""
    print(f"\ntwo workers of one thread against one of two threads, width {width}")

    def rate(processes: int, threads: int) -> float:
        command = [sys.executable, "-m", "tests.bench.variants", str(width), str(threads)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(processes)]
        return sum(1 / float(json.loads(process.communicate()[0])) for process in running)

    rates = [(rate(2, 1), rate(1, 2), rate(1, 1)) for _ in range(3)]
    ratio = statistics.median(two / one for two, one, _ in rates)
    batch = 16 * 128
    two, one, single = (statistics.median(triple[side] for triple in rates) * batch for side in (0, 1, 2))
    print(f"  2 x 1 thread {two:9,.0f} tokens/s   1 x 2 threads {one:9,.0f} tokens/s   ratio {ratio:.2f} (target 1.6)")
    print(
        f"  1 x 1 thread {single:9,.0f} tokens/s   so a second process gives x{two / single:.2f}, a second thread x{one / single:.2f}"
    )


def report_variants(widths: list[int]) -> None:
    """Time of a step, with compilation, and whether the losses agree with fp32 within seed noise."""
    import tempfile

    print(f"\nprecision and compilation, one thread; final training loss over the last 20 of 200 steps, {SEEDS} seeds")
    print("  width  variant         ms a step  ratio  first step  200 steps with it   loss (difference to fp32, seed s.d.)")
    with tempfile.TemporaryDirectory() as folder:
        for width in widths:
            reference: float | None = None
            fp32_losses: list[float] = []
            for precision, compiled in (("fp32", False), ("bf16", False), ("fp32", True), ("bf16", True)):
                run = quickstart_run(width, Path(folder) / "study", precision=precision, compile=compiled)
                step_s, first_s = time_steps(run, 3)
                reference = reference or step_s
                losses = final_losses(run) if width <= 64 or not compiled else []
                fp32_losses = fp32_losses or losses
                name = f"{precision}{' compiled' if compiled else ''}"
                total = first_s + 199 * step_s
                agreement = (
                    _agreement(losses, fp32_losses) if losses else "not trained (the arithmetic is that of its uncompiled twin)"
                )
                print(
                    f"  {width:5}  {name:14} {1e3 * step_s:9.1f}  {step_s / reference:5.2f}  {first_s:8.1f} s "
                    f"{total:10.1f} s          {agreement}",
                    flush=True,
                )


def final_losses(run: RunConfig) -> list[float]:
    """Mean training loss of the last 20 steps, for each seed."""
    losses = []
    for seed in range(SEEDS):
        seeded = run.model_copy(update={"training": run.training.model_copy(update={"seed": seed, "data_seed": seed})})
        trainer = Trainer(seeded, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size))
        history = [trainer.step(step)[0] for step in range(run.training.steps)]
        losses.append(statistics.mean(history[-20:]))
    return losses


def _agreement(losses: list[float], reference: list[float]) -> str:
    difference = statistics.mean(loss - other for loss, other in zip(losses, reference, strict=True))
    return f"{statistics.mean(losses):.4f} ({difference:+.4f}, {statistics.stdev(reference):.4f})"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run = quickstart_run(int(sys.argv[1]), Path(folder) / "study", threads=int(sys.argv[2]))
        print(json.dumps(time_steps(run, 6)[0]))
