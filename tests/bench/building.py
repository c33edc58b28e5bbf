"""What building a model takes of each process's memory under a layout, beside what the process keeps of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from scaling.accounting import parameter_counts
from scaling.config import RunConfig
from scaling.data import prepare
from scaling.model_config import ModelFamily
from scaling.ranks import Group, Team
from scaling.train import Trainer
from tests.bench.layouts import large_run

LAYOUTS = ("dp=2", "fsdp=2", "tp=2", "pp=2", "fsdp=4", "fsdp=2,tp=2", "pp=2,fsdp=2")
ROOT = Path(__file__).parents[2]


def small_run(run: RunConfig) -> RunConfig:
    """Loads all that `run` needs of libraries."""
    family = ModelFamily(depth=run.model.depth, head_dim=16, context=run.model.context, vocab_size=run.model.vocab_size)
    return run.model_copy(update={"model": family.at(64)})


def measure(layout: str) -> list[tuple[float, float]]:
    """Of each process: what it grew by as it built its part of a large model, at the most and in the end, MB."""
    run = large_run(layout, 1)
    # A pipeline needs as many micro-batches as stages.
    run = run.model_copy(update={"training": run.training.model_copy(update={"micro_batch_size": 1})})
    with Team() as team:
        with team.run(small_run(run)) as group:
            _build(small_run(run), group)
        processes = [os.getpid(), *(process.pid for process, _ in team._others)]
        before = [_resident_mb(process, "VmRSS") for process in processes]
        for process in processes:
            Path(f"/proc/{process}/clear_refs").write_text("5")  # the largest so far is what it is now
        with team.run(run) as group:
            trainer = _build(run, group)
            after = [(_resident_mb(process, "VmHWM"), _resident_mb(process, "VmRSS")) for process in processes]
            del trainer
    return [(most - base, now - base) for (most, now), base in zip(after, before, strict=True)]


def _build(run: RunConfig, group: Group) -> Trainer:
    trainer = Trainer(run, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size), group)
    trainer.process_s()  # all have built theirs
    return trainer


def _resident_mb(process: int, field: str) -> float:
    line = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def report() -> None:
    """Print what each layout's processes take, each layout in processes of its own (Linux)."""
    total = parameter_counts(large_run(None, 1).model).total
    print(f"\n{total / 1e6:.0f} million parameters, {4 * total / 1e6:.0f} MB; what each process grew by as it built its part, MB")
    print("\n| layout | at the most | in the end |\n|---|---|---|")
    for layout in LAYOUTS:
        command = [sys.executable, "-m", "tests.bench.building", layout]
        found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        most, last = (", ".join(f"{value:.0f}" for value in values) for values in zip(*found, strict=True))
        print(f"| {layout} | {most} | {last} |", flush=True)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
