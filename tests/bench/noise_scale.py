"""What `runtime.noise_scale_every_steps` costs: steps with and without the measurement, taken in turn by one trainer."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from scaling.config import RunConfig
from scaling.config_file import load_config
from scaling.data import prepare, train_batch
from scaling.noise_scale import example_norms
from scaling.train import Trainer
from sweeps.study import StudyConfig

QUICKSTART = Path(__file__).parents[2] / "configs" / "studies" / "quickstart.yaml"
PAIRS = 24
EVERY = 20


def report(widths: tuple[int, ...] = (64, 128, 256)) -> None:
    """Print a step's time on one thread, what a measured one takes more, and the share of the training at one in EVERY steps."""
    study = load_config(QUICKSTART, StudyConfig, ["model.vocab_size=256"])
    print(
        f"\nthe gradient noise scale, one thread, 16 sequences of 128 tokens, medians of {PAIRS} steps in turn; target: at most 10 %"
    )
    for width in widths:
        for micro in (None, 4):
            run = study.run("mup", width, -7.0, 0)
            training = run.training.model_copy(update={"micro_batch_size": micro})
            plain, measured = _step_seconds(run.model_copy(update={"training": training}))
            how = "extra passes" if micro is None else f"accumulation of {micro}"
            more = measured / plain - 1
            share = f"{100 * more / EVERY:.1f} % at one in {EVERY}"
            print(f"  width {width:3}, {how:17}  step {1e3 * plain:5.1f} ms, a measured one {100 * more:+4.0f} %: {share}")
        print(
            f"  width {width:3}, every example's gradient (torch.func): {_examples(study.run('mup', width, -7.0, 0)):.1f} steps"
        )


def _trainer(run: RunConfig) -> Trainer:
    return Trainer(run, prepare(run.data, context=run.model.context, vocab_size=256))


def _step_seconds(run: RunConfig) -> tuple[float, float]:
    """Median processor time of a step without the measurement and with it."""
    trainer = _trainer(run)
    seconds: dict[int | None, list[float]] = {None: [], 1: []}
    for step in range(2 * PAIRS + 4):
        every = 1 if step % 2 else None
        trainer.run = run.model_copy(update={"runtime": run.runtime.model_copy(update={"noise_scale_every_steps": every})})
        started = time.process_time()
        trainer.step(step)
        if step >= 4:
            seconds[every].append(time.process_time() - started)
    return statistics.median(seconds[None]), statistics.median(seconds[1])


def _examples(run: RunConfig) -> float:
    """Time of the per-example norms of a batch over that of a step."""
    trainer = _trainer(run)
    steps, passes = [], []
    for step in range(8):
        started = time.process_time()
        trainer.step(step)
        middle = time.process_time()
        tokens = train_batch(trainer.corpus, step=step, data_seed=0, batch_size=16, context=run.model.context)
        example_norms(trainer.model, torch.from_numpy(tokens))
        steps.append(middle - started)
        passes.append(time.process_time() - middle)
    return statistics.median(passes) / statistics.median(steps)
