"""What a sharded checkpoint costs the steps beside it, written while they wait or in the background (runtime.checkpoint_async)."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
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
STEPS = 60
EVERY = 10
"""Steps from one checkpoint to the next."""
REPEATS = 3
BYTES_A_PARAMETER = 12
"""fp32, with Adam's two moments."""


@dataclass
class Times:
    """Seconds from one step's end to the next one's, first checkpoint to last; those of repeats together."""

    plain: list[float]
    """Between two checkpoints."""
    after: list[float]
    """From the step that a checkpoint follows to the next one: the save is in them."""

    @property
    def total_s(self) -> float:
        return sum(self.plain) + sum(self.after)


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
    for step in range(EVERY, STEPS):
        times.after.append(ends[step] - ends[step - 1]) if step % EVERY == 0 else times.plain.append(ends[step] - ends[step - 1])
    return loss


def report() -> None:
    """Print what a step takes with no checkpoint, and what one loses by each way of writing; ways in turn."""
    times, losses = {how: Times([], []) for how in HOWS}, set[float]()
    with tempfile.TemporaryDirectory() as name, Team() as team:
        _measure("none", team, Path(name) / "warm-up", Times([], []))
        for repeat in range(REPEATS):
            for how in HOWS:
                losses.add(_measure(how, team, Path(name) / f"{how}{repeat}", times[how]))
    saves = REPEATS * (STEPS // EVERY - 1)
    size_mb = BYTES_A_PARAMETER * parameter_counts(sharded_run("none").model).to_dict()["total"] / 1e6
    print(
        f"\ncheckpoints of {size_mb:.0f} MB, fsdp=2 on CPUs, one in {EVERY} steps, {saves} of them; losses all equal: {len(losses) == 1}"
    )
    print(
        "\n| written | a step without one, median | the step with one, median | longest | lost a checkpoint, all steps together |"
    )
    print("|---|---|---|---|---|")
    for how, found in times.items():
        lost = "" if how == "none" else f"{1e3 * (found.total_s - times['none'].total_s) / saves:.0f} ms"
        plain, after = statistics.median(found.plain), statistics.median(found.after)
        print(f"| {how} | {1e3 * plain:.0f} ms | {1e3 * after:.0f} ms | {1e3 * max(found.after):.0f} ms | {lost} |")
