"""One backward pass gives every tensor's sensitivity; where gradients cannot, or would be wrong, random changes do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import scaling.coordinates as coordinates
from analysis.coordinates import judge
from scaling.coordinates import measure
from scaling.signs import balanced_signs
from tests.coordinates.targets import BASE, Mlp, Supervised, mlp, transformer

WIDTHS = (32, 64, 128, 256)


class _OneWay(torch.autograd.Function):
    """Times a factor forward, as it is backward: the gradient is not the derivative, by a power of the width."""

    @staticmethod
    def forward(_context: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(_context: Any, *gradients: Any) -> Any:
        return gradients[0], None


class OneWayReadout(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.readout(_OneWay.apply(x, self.multipliers[0]))


class Reentrant(Mlp):
    """torch.autograd.grad raises on such checkpoints; backward() does not."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.readout(x * self.multipliers[0])


def sensitivities(target: Any, seeds: int) -> dict[str, dict[int, float]]:
    """Tensor -> width -> root of the mean square over seeds."""
    squares: dict[str, dict[int, list[float]]] = {}
    for row in measure(target, (32, 64), seeds=seeds, steps=1).rows:
        if row.statistic == "sensitivity":
            squares.setdefault(row.name, {}).setdefault(row.width, []).append(row.value**2)
    return {name: {width: float(np.sqrt(np.mean(values))) for width, values in found.items()} for name, found in squares.items()}


@pytest.mark.parametrize("target", [mlp(), mlp(zero_readout=True), transformer()], ids=["mlp", "zero readout", "transformer"])
def test_gradients_say_what_random_changes_say(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    by_gradient = sensitivities(target, 24)
    monkeypatch.setattr(coordinates._Probe, "_gradients", lambda _self, output: ({}, output))
    by_change = sensitivities(target, 24)
    assert by_gradient.keys() == by_change.keys()
    # Ten outputs share a bias, so that one draw of its sensitivity has a spread of a fifth; the mean over 24 seeds of a twentieth.
    for name, found in by_gradient.items():
        for width, value in found.items():
            assert value == pytest.approx(by_change[name][width], rel=0.2), (name, width)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("model", "passes"), [(Mlp, 0), (OneWayReadout, 64), (Reentrant, 64)], ids=["plain", "one way", "reentrant checkpoint"]
)
def test_gradients_that_are_not_derivatives_are_not_used(monkeypatch: pytest.MonkeyPatch, model: Any, passes: int) -> None:
    calls: Counter[str] = Counter()
    by_change = coordinates._Probe._by_change

    def counted(probe: Any, name: str, *rest: Any) -> float:
        calls[name] += 1
        return by_change(probe, name, *rest)

    monkeypatch.setattr(coordinates._Probe, "_by_change", counted)
    verdict = judge(measure(Supervised(lambda width: model(width, BASE / width)), WIDTHS, seeds=2))
    assert verdict.verdict == "pass", str(verdict)
    assert calls.total() == passes
    readout = next(item for item in verdict.tensors if item.name == "readout.weight")
    assert readout.sensitivity.value == pytest.approx(-0.5, abs=0.25)


def test_the_measurement_leaves_the_training_as_it_would_be() -> None:
    """No gradient, no random number and no changed entry of the measurement reaches the training steps."""
    target, seen = mlp(), {}

    class Watched(Supervised):
        def after_step(self, model: Any, _optimizer: Any, step: int) -> None:
            seen[step] = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    measure(Watched(target.model), (32,), seeds=1, steps=2)
    torch.manual_seed(0)
    model = target.build(32)
    optimizer, batch = target.optimizer(model, 32), target.batch(0)
    for step in range(2):
        optimizer.zero_grad()
        target.loss(model, batch).backward()
        optimizer.step()
        for name, tensor in model.named_parameters():
            assert torch.equal(tensor, seen[step][name]), (step, name)


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (3, 2), (4, 3), (8, 2), (7,), (5, 2, 3)])
def test_every_two_signs_are_uncorrelated(shape: tuple[int, ...]) -> None:
    """Balancing them over the samples takes noise away and adds no bias."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([balanced_signs(torch.empty(shape), generator).flatten() for _ in range(10_000)])
    assert draws.abs().eq(1).all()
    # Five standard errors.
    assert (draws.T @ draws / len(draws) - torch.eye(draws.shape[1])).abs().max() < 0.05
    assert draws.mean(0).abs().max() < 0.05
