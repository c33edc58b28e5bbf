"""The coordinate check beside the mup package's: the same models, widths, steps and seeds, on the same data."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from analysis.coordinates import judge
from scaling.coordinates import measure
from tests.coordinates.targets import FaultyRun, Supervised, mlp, transformer

WIDTHS, STEPS, SEEDS = (64, 128, 256, 512), 3, 2


class _WithLoss(nn.Module):
    """A model that returns its loss, as mup.coord_check takes it with lossfn None."""

    def __init__(self, target: Any, width: int) -> None:
        super().__init__()
        self.inner, self.target, self.width = target.build(width), target, width

    def forward(self, **batch: Tensor) -> tuple[Tensor]:
        values = tuple(batch.values())
        return (self.target.loss(self.inner, values if len(values) > 1 else values[0]),)


def theirs(target: Any) -> Any:
    """mup's records as a data frame, which is what it is used for."""
    from mup.coord_check import _get_coord_data

    batch = target.batch(0)
    named = {f"input{index}": item for index, item in enumerate(batch)} if isinstance(batch, tuple) else {"input0": batch}
    widths = {width: partial(_WithLoss, target, width) for width in WIDTHS}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, _WithLoss)
        return target.optimizer(model.inner, model.width)

    return _get_coord_data(
        widths, [named], optimizer, nsteps=STEPS, nseeds=SEEDS, dict_in_out=True, output_name=0, cuda=False, show_progress=False
    )


def ours(target: Any) -> Any:
    return judge(measure(target, WIDTHS, seeds=SEEDS, steps=STEPS))


def _seconds(function: Callable[[Any], Any], target: Any) -> float:
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(target)
    return time.perf_counter() - started


def report() -> None:
    """Both on an MLP and on the toolkit's transformer, alternating, more rounds where one is short."""
    print(f"\ncoordinate check, widths {', '.join(map(str, WIDTHS))}, {STEPS} steps, {SEEDS} seeds")
    targets: dict[str, tuple[Supervised | FaultyRun, int]] = {"mlp": (mlp(), 25), "transformer": (transformer(model__depth=2), 5)}
    for name, (target, rounds) in targets.items():
        pairs = [(_seconds(theirs, target), _seconds(ours, target)) for _ in range(rounds)]
        package, own = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        print(
            f"  {name:12} mup.coord_check {package:6.2f} s   measure and judge {own:6.2f} s   ratio {own / package:.2f} (target 1)"
        )
