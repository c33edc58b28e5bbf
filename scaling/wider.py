"""Training losses of a coordinate check's target at several widths, for `analysis.wider`: fresh batches, paired seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from scaling.coordinates import Target


def train_losses(
    target: Target, widths: Sequence[int], *, seeds: int, steps: int, progress: Callable[[int, int], None] | None = None
) -> dict[int, dict[int, list[float]]]:
    """Train `target` for `steps` steps at every width and seed: width -> seed -> the loss at every step.

    The batch of step s is `target.batch(s)` at every width and seed. From a loss on that is not finite, the losses are infinite.
    progress: called with (width, seed) before each.
    """
    losses: dict[int, dict[int, list[float]]] = {}
    for width in widths:
        for seed in range(seeds):
            if progress is not None:
                progress(width, seed)
            losses.setdefault(width, {})[seed] = _train(target, width, seed, steps)
    return losses


def _train(target: Target, width: int, seed: int, steps: int) -> list[float]:
    torch.manual_seed(seed)
    model = target.build(width)
    optimizer = target.optimizer(model, width)
    after_step = getattr(target, "after_step", None)
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = target.loss(model, target.batch(step))
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return losses[:-1] + [math.inf] * (steps - step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if after_step is not None:
            after_step(model, optimizer, step)
    return losses
