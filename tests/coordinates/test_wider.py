"""Wider is not worse under muP; at a learning rate that is too high for wide models it is, and the check says so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analysis.coordinate_verdict import CoordinateVerdict, with_wider
from analysis.coordinates import judge
from analysis.wider import judge_wider, tail_mean
from scaling.coordinates import measure
from scaling.wider import train_losses
from tests.coordinates.targets import CLASSES, Fault, Supervised, mlp

WIDTHS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Taught(Supervised):
    """The MLP on fresh inputs whose class a fixed small network says, so that there is something to learn."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        teacher = torch.Generator().manual_seed(7)
        hidden, readout = torch.randn((16, 24), generator=teacher), torch.randn((24, CLASSES), generator=teacher)
        x = torch.randn((64, *self.shape), generator=torch.Generator().manual_seed(10_000 + step))
        return x, (torch.tanh(x @ hidden) @ readout).argmax(1)


def taught(lr: float, sp: bool = False) -> Taught:
    """muP's, or SP's: one learning rate for all tensors, no readout multiplier, and fan-in init everywhere."""
    fault = Fault(lr={"layers.*.weight": 1}, init={"readout.weight": -0.5}, multiplier={"readout": 1}) if sp else Fault()
    return Taught(mlp().model, lr=lr, fault=fault)


def verdict_of(target: Any, steps: int = 100) -> CoordinateVerdict:
    checked = judge(measure(target, WIDTHS, seeds=2))
    return with_wider(checked, judge_wider(train_losses(target, WIDTHS, seeds=3, steps=steps), steps))


def test_mup_passes_and_sp_at_a_high_learning_rate_fails() -> None:
    right = verdict_of(taught(2.0**-6))
    assert (right.verdict, right.wider and right.wider.verdict) == ("pass", "pass"), str(right)
    wrong = verdict_of(taught(2.0**-6, sp=True))
    assert wrong.verdict == "fail"
    named = [item for item in wrong.culprits if item.tensor == "loss"]
    assert named, str(wrong)
    assert {item.statistic for item in named} == {"wider_is_worse"}
    assert all(item.slope.interval[0] <= item.slope.value <= item.slope.interval[1] for item in named)
    document = wrong.to_dict()["wider"]
    assert document["verdict"] == "fail"
    assert [item["width"] for item in document["losses"]] == list(WIDTHS)
    assert "wider is worse" in str(wrong)


def curves(*by_width: list[float]) -> dict[int, dict[int, list[float]]]:
    """One loss a seed, the same at every step."""
    return {32 * 2**place: {seed: [loss] * 20 for seed, loss in enumerate(losses)} for place, losses in enumerate(by_width)}


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (([2.0, 2.1, 2.2], [1.9, 2.0, 2.1], [1.8, 1.9, 2.0]), "pass"),
        (([2.0, 2.1, 2.2], [2.1, 2.2, 2.3], [2.0, 2.1, 2.2]), "fail"),
        # Within half a percent.
        (([2.0, 2.1, 2.2], [2.005, 2.105, 2.205], [2.0, 2.1, 2.2]), "pass"),
        # A rise on average, not beyond the seeds' spread.
        (([2.0, 2.1, 2.2], [1.8, 2.2, 2.4], [1.9, 2.3, 2.1]), "pass"),
        (([2.0, 2.1, 2.2], [1.9, math.inf, 2.1], [1.8, 1.9, 2.0]), "fail"),
        (([math.inf, 2.1, 2.2], [1.9, 2.0, 2.1], [1.8, 1.9, 2.0]), "inconclusive"),
        (([2.0], [1.9], [1.8]), "inconclusive"),
    ],
)
def test_a_rise_counts_beyond_its_noise(losses: tuple[list[float], ...], expected: str) -> None:
    assert judge_wider(curves(*losses), 20).verdict == expected


def test_a_rise_of_equal_models_is_rarely_called_one() -> None:
    generator = torch.Generator().manual_seed(0)
    called = 0
    for _ in range(400):
        noise = (2.0 + 0.1 * torch.randn((2, 4), generator=generator)).tolist()
        called += judge_wider(curves(*noise), 20).verdict == "fail"
    # One pair of widths: the test's own 10 %, less what the floor takes off.
    assert called <= 0.13 * 400


def test_the_tail_is_the_last_tenth() -> None:
    assert tail_mean([9.0] * 18 + [1.0, 3.0]) == 2.0
    assert tail_mean([1.0, math.nan]) == math.inf


def test_a_schedule_and_fresh_batches_are_seen() -> None:
    """after_step runs after every step, and every step has the next batch; a loss that is not finite ends the run."""
    steps: list[int] = []
    batches: list[int] = []

    class Watched:
        def build(self, width: int) -> nn.Module:
            return nn.Linear(2, width)

        def optimizer(self, model: nn.Module, _width: int) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

        def batch(self, step: int) -> Tensor:
            batches.append(step)
            return torch.ones(3, 2)

        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).square().mean() * (math.inf if len(batches) == 4 else 1.0)

        def after_step(self, _model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> None:
            steps.append(step)

    losses = train_losses(Watched(), (4,), seeds=1, steps=6)[4][0]
    assert batches == [0, 1, 2, 3]
    assert steps == [0, 1, 2]
    assert [math.isfinite(loss) for loss in losses] == [True] * 3 + [False] * 3
