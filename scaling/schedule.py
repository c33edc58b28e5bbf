"""LR over a run as a factor of each group's own peak LR: pure functions of the step. Torch-free."""

from __future__ import annotations

import math

from scaling.config import ScheduleConfig


def warmup_steps(schedule: ScheduleConfig, steps: int) -> int:
    return round(schedule.warmup_fraction * steps)


def lr_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Factor of the update number `step` (from 0) of `steps`.

    Warm-up rises from 1/warmup to 1; the decay reaches `final_factor` right after the last step, so that no update is wasted on an
    LR of 0. "wsd" (Hu et al. 2404.06395) holds the peak until its decay.
    """
    warmup = warmup_steps(schedule, steps)
    if step < warmup:
        return (step + 1) / warmup
    decay_start = warmup if schedule.kind != "wsd" else steps - round(schedule.decay_fraction * steps)
    if schedule.kind == "constant" or step < decay_start:
        return 1.0
    progress = (step - decay_start) / (steps - decay_start)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.final_factor + (1 - schedule.final_factor) * left
