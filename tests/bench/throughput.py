"""Trials per hour on this machine: `mutransfer run` against one new process a trial, as sweeps are commonly written.

Same model, data, learning rates, seed and steps (the quickstart's muP runs: 200 steps of 2,048 tokens), same losses. The baseline is
`plain_trial`: torch's own matrix products, its default AdamW with a group a tensor, two threads; with and without a validation
batch after every step. Start-up counts on both sides: a process a trial there, the driver and a pool of new workers for every
four trials here, which is more than in a study, whose workers make dozens of runs each.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scaling.config import RuntimeConfig
from sweeps.pinning import default_jobs

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "studies" / "quickstart.yaml"
WIDTHS = (64, 128, 256)
LOG2_LRS = (-9, -8.5, -8, -7.5)
BASELINE_TRIALS = 2
TOLERANCE = 1e-3
"""Nats; sums in another order drift apart over 200 steps. The seeds of the quickstart differ by 0.01 and more."""


def plain_trial(folder: Path, out: Path, evaluate: bool) -> None:
    """A trial as people write it: eager fp32, a group a tensor, default AdamW, LambdaLR, `.item()` every step."""
    import torch

    from scaling import matmul
    from scaling.config import RunConfig
    from scaling.config_file import load_config
    from scaling.data import prepare, train_batch, validation_batches
    from scaling.model import build_model
    from scaling.parametrization import tensor_rules
    from scaling.schedule import lr_factor

    matmul.ONEDNN = False  # F.linear
    run = load_config(folder / "config.yaml", RunConfig)
    training, context = run.training, run.model.context
    torch.set_num_threads(2)
    corpus = prepare(run.data, context=context, vocab_size=run.model.vocab_size)
    model = build_model(run)
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[rule.name]], "lr": rule.lr, "weight_decay": rule.weight_decay, "eps": rule.eps}
        for rule in tensor_rules(run)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(run.optimizer.beta1, run.optimizer.beta2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(run.schedule, step, training.steps))
    held_out = [
        torch.from_numpy(tokens)
        for tokens in validation_batches(corpus, sequences=training.validation_sequences, context=context, batch_size=16)
    ]
    losses, validation = [], []
    for step in range(training.steps):
        tokens = torch.from_numpy(
            train_batch(corpus, step=step, data_seed=training.data_seed, batch_size=training.batch_size, context=context)
        )
        loss = model.loss(tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_norm or float("inf"))
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if evaluate:
            with torch.no_grad():
                validation.append(model.loss(held_out[step % len(held_out)]).item())
    with torch.no_grad():
        final = sum(model.loss(tokens, reduction="sum").item() for tokens in held_out) / sum(
            tokens[:, 1:].numel() for tokens in held_out
        )
    out.write_text(json.dumps({"losses": losses, "loss": final, "validation": validation}))


@dataclass(frozen=True)
class Rate:
    """Wall and processor time of a trial, seconds; a trial is the unit, however many are made at once."""

    wall_s: float
    processor_s: float

    @property
    def hourly(self) -> float:
        return 3600 / self.wall_s


class _Stopwatch:
    """Wall time, and processor time of children that have ended."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), _children_s()

    def rate(self, trials: int) -> Rate:
        return Rate((time.perf_counter() - self._wall) / trials, (_children_s() - self._processor) / trials)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report() -> None:
    """Trials per hour and processor time of both, and the largest difference of their losses, at each width."""
    print(
        f"\ntrials, 200 steps of 2,048 tokens; {default_jobs(RuntimeConfig())} cores, load average before {os.getloadavg()[0]:.1f}"
    )
    print("                                     pool   process a trial, validating each step   the same, not validating")
    for width in WIDTHS:
        with tempfile.TemporaryDirectory() as folder:
            directory, pool = _pool(width, Path(folder))
            validating, difference = _baseline(directory, True)
            plain, other = _baseline(directory, False)
        ratios = [f"ratio {rate.wall_s / pool.wall_s:.2f}{note}" for rate, note in ((validating, " (target 1.6)"), (plain, ""))]
        cores = [f"ratio {rate.processor_s / pool.processor_s:.2f}" for rate in (validating, plain)]
        worst = max(difference, other)
        print(
            f"  width {width:3}  trials an hour     {pool.hourly:8.1f}   {validating.hourly:8.1f}  {ratios[0]:26}"
            f"   {plain.hourly:8.1f}  {ratios[1]}"
        )
        print(
            f"             core s a trial     {pool.processor_s:8.1f}   {validating.processor_s:8.1f}  {cores[0]:26}"
            f"   {plain.processor_s:8.1f}  {cores[1]}"
        )
        print(f"             largest difference of a loss {worst:.1e} nats", flush=True)
        assert worst < TOLERANCE, f"the two train differently: {worst} nats"


def _pool(width: int, folder: Path) -> tuple[Path, Rate]:
    """Make the runs as `mutransfer run` does, a worker of one thread a core; its directory and what a trial took."""
    from sweeps.cli_common import messages
    from sweeps.driver import drive
    from sweeps.progress import watcher_for
    from sweeps.study_dir import open_study

    source: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    settings = {key: value for key, value in source["parametrizations"]["mup"].items() if key != "seeds_near_best"}
    source |= {"name": "throughput", "widths": [width], "target": None, "follow_up": {"margin_points": 0}}
    source |= {"log2_lr": {"low": LOG2_LRS[0], "high": LOG2_LRS[-1], "step": 0.5}, "parametrizations": {"mup": settings}}
    config = folder / "throughput.yaml"
    config.write_text(yaml.safe_dump(source))
    study = open_study(config, folder / "study")
    jobs = default_jobs(study.config.runtime)
    watch = _Stopwatch()
    outcome = drive(study.directory, study.config, jobs, watcher_for(messages(), jobs), study.data_arguments(), "bench")
    assert outcome.complete == len(LOG2_LRS), outcome
    return study.directory, watch.rate(outcome.made)


def _baseline(study: Path, evaluate: bool) -> tuple[Rate, float]:
    """What one new process a trial takes for the study's first runs, and the largest difference of a loss from the pool's."""
    from scaling.records import read_metrics, read_records

    records = sorted(read_records(study), key=lambda record: record.lr)[:BASELINE_TRIALS]
    watch, worst = _Stopwatch(), 0.0
    for record in records:
        folder, out = study / "runs" / record.run_id, study / "plain.json"
        # Without the bench's own setting of one thread: torch and its libraries see the machine as they do by default.
        environment = {name: text for name, text in os.environ.items() if not name.endswith("_NUM_THREADS")}
        command = [sys.executable, "-m", "tests.bench.throughput", str(folder), str(out), str(int(evaluate))]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        plain = json.loads(out.read_text())
        assert record.loss is not None
        pool = {row["step"]: row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row}
        differences = [abs(plain["losses"][step] - loss) for step, loss in pool.items()]
        worst = max(worst, abs(plain["loss"] - record.loss), *differences)
    return watch.rate(len(records)), worst


if __name__ == "__main__":
    plain_trial(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
