"""Models with known answers against depth: the toolkit's transformer and a residual MLP, and the same with one fault put in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaling.config import RunConfig
from scaling.coordinate_targets import DepthTarget
from scaling.data import prepare

BASE_DEPTH = 2
CLASSES = 10


@dataclass(frozen=True)
class DepthFault:
    """Powers of depth / base put on what a model has, by pattern of a tensor's or a module's name."""

    lr: Mapping[str, float] = field(default_factory=dict)
    init: Mapping[str, float] = field(default_factory=dict)
    multiplier: Mapping[str, float] = field(default_factory=dict)
    eps: float | None = None


def power(powers: Mapping[str, float], name: str, depth: int) -> float:
    return math.prod((depth / BASE_DEPTH) ** exponent for pattern, exponent in powers.items() if fnmatchcase(name, pattern))


def put_in(model: nn.Module, fault: DepthFault, depth: int) -> nn.Module:
    """Init and forward multipliers of leaf modules, in place."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.mul_(power(fault.init, name, depth))
    for name, module in model.named_modules():
        factor = power(fault.multiplier, name, depth)
        if factor != 1.0 and not list(module.children()):
            module.register_forward_hook(lambda _module, _inputs, output, factor=factor: output * factor)
    return model


def put_in_groups(optimizer: torch.optim.Optimizer, model: nn.Module, fault: DepthFault, depth: int) -> torch.optim.Optimizer:
    """The optimizer anew, one group a tensor, with the fault's learning rates."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    groups = [
        {**{key: value for key, value in group.items() if key not in ("params", "names")}, "params": [tensor]}
        | {"lr": group["lr"] * power(fault.lr, names[id(tensor)], depth)}
        | ({"eps": fault.eps} if fault.eps is not None else {})
        for group in optimizer.param_groups
        for tensor in group["params"]
    ]
    kind: Any = type(optimizer)
    made: torch.optim.Optimizer = kind(groups)
    return made


class FaultyDepthRun(DepthTarget):
    fault = DepthFault()

    def build(self, width: int) -> nn.Module:
        return put_in(super().build(width), self.fault, width)

    def optimizer(self, model: nn.Module, width: int) -> torch.optim.Optimizer:
        return put_in_groups(super().optimizer(model, width), model, self.fault, width)


def transformer(fault: DepthFault | None = None, **changes: Any) -> FaultyDepthRun:
    """The toolkit's decoder under completep unless told otherwise; `changes` of RunConfig's keys, `model__x` for its model's."""
    model = {"depth": BASE_DEPTH, "width": 32, "context": 16, "vocab_size": 32, "head_dim": 8}
    model |= {key.removeprefix("model__"): value for key, value in changes.items() if key.startswith("model__")}
    values = {
        "model": model,
        "base": {"width": 32, "depth": BASE_DEPTH},
        "data": {"source": "zipf-markov", "synthetic_tokens": 40_000, "synthetic_vocab": 32},
        "training": {"batch_size": 16},
        "optimizer": {"lr": 2.0**-6, "eps": 1e-12},
        "parametrization": {"kind": "completep"},
    }
    values |= {key: value for key, value in changes.items() if not key.startswith("model__")}
    run = RunConfig.model_validate(values)
    target = FaultyDepthRun(run, prepare(run.data, context=16, vocab_size=32))
    target.fault = fault or DepthFault()
    return target


class ResidualMlp(nn.Module):
    """x + branch * down(relu(up(x))) a layer, without norms."""

    def __init__(self, depth: int, branch: float, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(depth)
        )
        self.readout = nn.Linear(width, CLASSES)
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + self.branch * layer(x)
        return self.readout(x)


@dataclass(frozen=True)
class DeepMlp:
    """A user's target of which the size is the depth: right at any alpha, unless a fault is given."""

    alpha: float = 1.0
    optimizer_kind: str = "adamw"
    lr: float = 2.0**-8
    fault: DepthFault = field(default_factory=DepthFault)
    model: Callable[[int, float], nn.Module] = ResidualMlp

    def build(self, depth: int) -> nn.Module:
        return put_in(self.model(depth, (depth / BASE_DEPTH) ** -self.alpha), self.fault, depth)

    def optimizer(self, model: nn.Module, depth: int) -> torch.optim.Optimizer:
        m = depth / BASE_DEPTH
        # Adam divides the gradient by its size, which falls as m^-alpha; SGD does not.
        within = m ** (self.alpha - 1) if self.optimizer_kind == "adamw" else m ** (2 * self.alpha - 1)
        groups = [
            {"params": [tensor], "lr": self.lr * (within if name.startswith("layers") else 1.0)}
            for name, tensor in model.named_parameters()
        ]
        made = torch.optim.AdamW(groups, eps=1e-12) if self.optimizer_kind == "adamw" else torch.optim.SGD(groups)
        return put_in_groups(made, model, self.fault, depth)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(99 + step)
        return torch.randn((64, 16), generator=generator), torch.randint(CLASSES, (64,), generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class PlainMlp(ResidualMlp):
    """Layers after one another, no stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)
