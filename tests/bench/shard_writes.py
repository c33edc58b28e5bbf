"""What a sharded checkpoint costs the steps beside it, written while they wait or in the background (runtime.checkpoint_async)."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from scaling.accounting import parameter_counts
from scaling.config import OptimizerConfig, RunConfig, RuntimeConfig, TrainingConfig
from scaling.data import prepare
from scaling.model_config import ModelFamily
from scaling.parallel import Layout
from scaling.ranks import Team
from scaling.train import Progress, train_run
from tests.conftest import tiny_run

How = Literal["none", "waiting", "background"]
HOWS: tuple[How, ...] = ("none", "waiting", "background")
STEPS = 84
EVERY = 12
"""Steps from one checkpoint to the next."""
NEAR = 6
"""Steps of those in which a write may be felt; the others are what they are compared with, a second later at most."""
REPEATS = 3
BYTES_A_PARAMETER = 12
"""fp32, with Adam's two moments."""


@dataclass
class Times:
    """Milliseconds, one entry a checkpoint (or the place of one, where none is written)."""

    usual: list[float] = field(default_factory=list)
    """A step away from any checkpoint, median."""
    first: list[float] = field(default_factory=list)
    """The step in which the save begins, beyond the usual one."""
    lost: list[float] = field(default_factory=list)
    """NEAR steps from the save on, beyond as many usual ones."""

    def add(self, steps_ms: Sequence[float]) -> None:
        """The EVERY steps from one save on."""
        usual = statistics.median(steps_ms[NEAR:])
        self.usual.append(usual)
        self.first.append(steps_ms[0] - usual)
        self.lost.append(sum(steps_ms[:NEAR]) - NEAR * usual)


def sharded_run(how: How) -> RunConfig:
    """10 million parameters, fsdp=2."""
    family = ModelFamily(depth=3, head_dim=64, context=64, vocab_size=256)
    training = TrainingConfig(steps=STEPS, batch_size=8, validation_sequences=8)
    run = tiny_run(512, family=family, base_width=64, optimizer=OptimizerConfig(lr=2.0**-8), training=training)
    runtime = RuntimeConfig(
        log_every_steps=1,
        checkpoint_every_steps=None if how == "none" else EVERY,
        checkpoint_async=how == "background",
        processes=2,
        parallel=Layout(fsdp=2),
    )
    return run.model_copy(update={"runtime": runtime})


def _measure(how: How, team: Team, directory: Path, times: Times) -> float:
    """Add one run's times; returns its final loss."""
    run, ends = sharded_run(how), list[float]()

    def note(_progress: Progress) -> None:
        ends.append(time.perf_counter())

    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    loss = train_run(run, directory, corpus, note, team=team).loss
    assert loss is not None
    steps_ms = [1e3 * (after - before) for before, after in pairwise(ends)]
    for save in range(EVERY, STEPS - EVERY + 1, EVERY):
        times.add(steps_ms[save - 1 : save - 1 + EVERY])
    return loss


def report() -> None:
    """Print what a step takes, and what steps lose by each way of writing: medians, quartiles in brackets; ways in turn."""
    times, losses = {how: Times() for how in HOWS}, set[float]()
    with tempfile.TemporaryDirectory() as name, Team() as team:
        _measure("none", team, Path(name) / "warm-up", Times())
        for repeat in range(REPEATS):
            for how in HOWS:
                losses.add(_measure(how, team, Path(name) / f"{how}{repeat}", times[how]))
    size_mb = BYTES_A_PARAMETER * parameter_counts(sharded_run("none").model).total / 1e6
    saves, same = len(times["none"].usual), len(losses) == 1
    print(f"\ncheckpoints of {size_mb:.0f} MB, fsdp=2 on CPUs, {saves} of each kind; losses all equal: {same}")
    print(
        "\n| written | a usual step, ms | the step of the save, beyond it | all steps that a save touches, beyond them |\n|---|---|---|---|"
    )
    for how, found in times.items():
        print(f"| {how} | {statistics.median(found.usual):.0f} | {_middle(found.first)} | {_middle(found.lost)} |")


def _middle(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"
