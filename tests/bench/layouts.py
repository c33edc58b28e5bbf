"""What a layout over processes changes: the losses and the best learning rate of a small cell (nothing, it should be), speed and memory."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.tensor import DTensor

from analysis.optimum import fit_cell
from scaling.accounting import parameter_counts
from scaling.config import OptimizerConfig, RunConfig, RuntimeConfig, TrainingConfig
from scaling.data import prepare
from scaling.model_config import ModelFamily
from scaling.parallel import parse_layout
from scaling.parallel_checkpoint import held
from scaling.ranks import Team
from scaling.records import read_metrics
from scaling.train import Trainer, train_run
from tests.conftest import tiny_run

TWO = ("dp=2", "fsdp=2", "fsdp=2,zero=2", "fsdp=2,recompute=full", "tp=2", "tp=2,sp=on", "pp=2")
FOUR = ("dp=2,fsdp=2", "fsdp=2,tp=2,sp=on", "fsdp=2,pp=2")
LOG2_LRS = tuple(float(value) for value in range(-8, -2))
CELL = ModelFamily(
    depth=2, head_dim=8, context=16, vocab_size=32, norm_gain=True, qk_norm=True, activation="swiglu", queries_per_kv=2
)
"""Every kind of tensor that the rules know."""
TIMED_STEPS = 6
ROOT = Path(__file__).parents[2]


def laid(run: RunConfig, layout: str | None, threads: int = 1) -> RunConfig:
    parallel = None if layout is None else parse_layout(layout)
    processes = parallel.processes if parallel else 1
    runtime = RuntimeConfig(log_every_steps=1, parallel=parallel, processes=processes, threads=threads)
    return run.model_copy(update={"runtime": runtime})


def cell_run(log2_lr: float, layout: str | None, steps: int, micro: int = 2) -> RunConfig:
    """muP at twice the base width, gradients accumulated over micro-batches of `micro` sequences and clipped."""
    training = TrainingConfig(steps=steps, batch_size=8, micro_batch_size=micro, validation_sequences=64)
    optimizer = OptimizerConfig(lr=2.0**log2_lr, clip_norm=0.5, weight_decay=0.1)
    return laid(tiny_run(64, family=CELL, training=training, optimizer=optimizer), layout)


def losses(layout: str | None, log2_lrs: Sequence[float], steps: int, team: Team, micro: int = 2) -> dict[float, list[float]]:
    """`losses_of` each learning rate."""
    found = {}
    for log2_lr in log2_lrs:
        found[log2_lr] = losses_of(cell_run(log2_lr, layout, steps, micro), team)
    return found


def losses_of(run: RunConfig, team: Team) -> list[float]:
    """Every step's loss and last the validation loss, nats per token; infinite where the run diverged."""
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        record = train_run(run, Path(name), corpus, team=team)
        rows = [row["loss"] for row in read_metrics(Path(name) / "metrics.jsonl") if "loss" in row]
    return [*rows, math.inf if record.loss is None else record.loss]


def best_log2_lr(found: Mapping[float, Sequence[float]]) -> float:
    """Of the fitted curve; the edge where the best one lies at it."""
    return fit_cell(list(found), [values[-1] for values in found.values()]).log2_lr


def furthest(found: Mapping[float, Sequence[float]], other: Mapping[float, Sequence[float]]) -> float:
    """Largest difference of two losses, of any step and learning rate; infinite where one diverged alone."""
    gaps = [
        abs(a - b) for lr in found for a, b in zip(found[lr], other[lr], strict=True) if not (math.isinf(a) and math.isinf(b))
    ]
    return max(gaps)


def report_optima(steps: int = 40) -> None:
    """Print the optimum of one cell under each layout, and how far any loss is from one process's."""
    with Team() as team:
        alone = losses(None, LOG2_LRS, steps, team)
        # What another order of summation does to one process: the measure of the others.
        rows = {"one process": alone, "one process, micro-batches of 1": losses(None, LOG2_LRS, steps, team, micro=1)}
        for layout in (*TWO, *FOUR):
            rows[layout] = losses(layout, LOG2_LRS, steps, team)
    print(f"\nwidth 64 of base 32, {steps} steps, 8 sequences, log2 LR {LOG2_LRS[0]:g} to {LOG2_LRS[-1]:g}, fp32")
    print("\n| layout | best log2 LR | validation loss there, nearest LR | any final loss from one process's | any step's loss |")
    print("|---|---|---|---|---|")
    for name, found in rows.items():
        finals = {lr: values[-1:] for lr, values in found.items()}
        gaps = (
            ("", "")
            if found is alone
            else (f"{furthest(finals, {lr: v[-1:] for lr, v in alone.items()}):.1e}", f"{furthest(found, alone):.1e}")
        )
        print(
            f"| {name} | {best_log2_lr(found):.5f} | {min(values[-1] for values in found.values()):.6f} | {gaps[0]} | {gaps[1]} |"
        )


def report_bf16(seeds: int = 8, steps: int = 8) -> None:
    """Print how far losses under bf16 are from those of one process under bf16, beside what other roundings do to one process."""
    found: dict[str, list[list[float]]] = {}
    with Team() as team:
        for seed in range(seeds):
            for name, layout, micro, precision in (
                ("one process", None, 2, "bf16"),
                ("one process, fp32", None, 2, "fp32"),
                ("one process, micro-batches of 4", None, 4, "bf16"),
                *((layout, layout, 2, "bf16") for layout in TWO),
            ):
                run = cell_run(-6.0, layout, steps, micro)
                training = run.training.model_copy(update={"precision": precision, "seed": seed, "data_seed": seed})
                # Without gains, so that blocks are gathered in bf16.
                model = run.model.model_copy(update={"norm_gain": False, "qk_norm": False})
                found.setdefault(name, []).append(losses_of(run.model_copy(update={"training": training, "model": model}), team))
    print(f"\nbf16, width 64 of base 32, no gains, {steps} steps, {seeds} seeds: largest difference of any loss, nats per token")
    print("\n| compared with one process under bf16 | median seed | worst seed |\n|---|---|---|")
    alone = found.pop("one process")
    for name, curves in found.items():
        gaps = [furthest({0.0: curve}, {0.0: other}) for curve, other in zip(curves, alone, strict=True)]
        print(f"| {name} | {statistics.median(gaps):.1e} | {max(gaps):.1e} |")


def large_run(layout: str | None, threads: int) -> RunConfig:
    """43 million parameters: 170 MB of weights, as much of gradients, twice as much of moments."""
    family = ModelFamily(depth=6, head_dim=64, context=64, vocab_size=256, activation="gelu")
    training = TrainingConfig(steps=TIMED_STEPS + 1, batch_size=4, micro_batch_size=2, validation_sequences=4)
    run = tiny_run(768, family=family, base_width=64, training=training, optimizer=OptimizerConfig(lr=2.0**-9))
    return laid(run, layout, threads)


def measure(layout: str | None, threads: int) -> dict[str, object]:
    """In this process and those that it starts.

    step_s, work_s: the fastest step, and the processor time of all processes in the cheapest; held_mb: tensors of rank 0; peak_mb: of
    each process.
    """
    run, seconds, work = large_run(layout, threads), list[float](), list[float]()
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    with Team() as team, team.run(run) as group:
        trainer = Trainer(run, corpus, group)
        for step in range(run.training.steps):
            before, started = trainer.process_s(), time.perf_counter()
            trainer.step(step)
            seconds.append(time.perf_counter() - started)
            work.append(trainer.process_s() - before)
        ranks = ["self", *(str(process.pid) for process, _ in team._others)]
        return {
            "step_s": min(seconds[1:]),
            "work_s": min(work[1:]),
            "held_mb": _held_mb(trainer),
            "peak_mb": [_peak_mb(rank) for rank in ranks],
        }


def _held_mb(trainer: Trainer) -> float:
    """This process's weights, gradients and moments between two steps."""
    gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
    tensors = [*held(trainer.model, trainer.optimizer).values(), *gradients]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local) / 1e6


def _peak_mb(process: str) -> float:
    """Largest resident set so far."""
    line = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def report_speeds() -> None:
    """Print speed and memory of each layout, each in processes of its own."""
    run = large_run(None, 1)
    million = parameter_counts(run.model).total / 1e6
    print(
        f"\n{million:.0f} million parameters, {run.batch_tokens} tokens a step, fp32, AdamW, gloo; the fastest of {TIMED_STEPS} steps"
    )
    print("\n| layout | threads | tokens/s | processor time a step, s | held by rank 0, MB | peak memory of each process, MB |")
    print("|---|---|---|---|---|---|")
    for layout, threads in ((None, 1), (None, 2), *((name, 1) for name in TWO)):
        command = [sys.executable, "-m", "tests.bench.layouts", json.dumps([layout, threads])]
        found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        peaks = ", ".join(f"{peak:.0f}" for peak in found["peak_mb"])
        speed = f"{run.batch_tokens / found['step_s']:.0f} | {found['work_s']:.2f}"
        print(f"| {layout or 'one process'} | {threads} | {speed} | {found['held_mb']:.0f} | {peaks} |")


if __name__ == "__main__":
    print(json.dumps(measure(*json.loads(sys.argv[1]))))
