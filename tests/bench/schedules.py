"""The multi-power law on a whole schedule at once, against its formula's two loops: seconds of processor time and the difference."""

from __future__ import annotations

import time

import numpy as np

from analysis.schedule_curves import LrSchedule, Terms, multi_power
from scaling.config import ScheduleConfig

THETA = np.log([3.04, 0.525, 0.508, 364.0, 2.07, 0.583, 0.641])
STEPS, POINTS, LOOPED = 24_000, 171, 4
"""The schedule's updates, its logged points, and at how many of them the loops are run."""


def loops(theta: np.ndarray, lr: np.ndarray, t: int) -> float:
    """The sum over k, each term on its own."""
    level, scale, alpha, factor, rate, beta, gamma = np.exp(theta)
    sums = np.cumsum(lr[: t + 1])
    decay = sum(
        (lr[k - 1] - lr[k]) * (1 - (1 + rate * lr[k] ** -gamma * (sums[-1] - sums[k - 1])) ** -beta) for k in range(1, t + 1)
    )
    return float(level + scale * sums[-1] ** -alpha - factor * decay)


def report() -> None:
    schedule = LrSchedule.named(ScheduleConfig(kind="cosine", warmup_fraction=0.09, final_factor=0.1), STEPS, 3e-4)
    steps = np.linspace(STEPS // 10, STEPS, POINTS).astype(np.intp)
    times, values = [], []
    for block in (1, 16):
        started = time.process_time()
        values.append(multi_power(THETA, Terms.of(schedule, block), steps)[0])
        times.append(time.process_time() - started)
    chosen = np.linspace(0, POINTS - 1, LOOPED).astype(int)
    started = time.process_time()
    looped = np.array([loops(THETA, schedule.lr, int(steps[index])) for index in chosen])
    looping = (time.process_time() - started) * POINTS / LOOPED
    print(f"multi-power law, cosine of {STEPS} steps at {POINTS} points: two loops {looping:.2f} s (from {LOOPED} points)")
    print(
        f"  exact, with gradient {times[0]:.3f} s, x{looping / times[0]:.3g}, differs by {np.abs(values[0][chosen] - looped).max():.1e}"
    )
    print(
        f"  16 changes together {times[1]:.4f} s, x{looping / times[1]:.3g}, differs by {np.abs(values[1] - values[0]).max():.1e} nats"
    )
