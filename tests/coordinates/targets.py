"""Models with known answers for the coordinate check: right ones, and the same ones with one fault put in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaling.config import RunConfig
from scaling.coordinate_targets import RunTarget
from scaling.data import prepare

BASE = 32
CLASSES = 10


@dataclass(frozen=True)
class Fault:
    """Powers of width / base put on what a right model has, by pattern of a tensor's or a module's name."""

    lr: Mapping[str, float] = field(default_factory=dict)
    init: Mapping[str, float] = field(default_factory=dict)
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    multiplier: Mapping[str, float] = field(default_factory=dict)
    eps: float | None = None
    flat_schedule: bool = False
    """A scheduler that gives all groups one learning rate."""


def power(powers: Mapping[str, float], name: str, width: int) -> float:
    return math.prod((width / BASE) ** exponent for pattern, exponent in powers.items() if fnmatchcase(name, pattern))


class Mlp(nn.Module):
    """Four layers, tanh, the readout's input times `readout`, hidden outputs times `hidden`."""

    def __init__(self, width: int, readout: float, hidden: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        # A bias inside a multiplier that falls with width would be frozen.
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=hidden == 1.0) for _ in range(2))
        self.readout = nn.Linear(width, CLASSES)
        self.multipliers = (readout, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.multipliers[1])
        return self.readout(x * self.multipliers[0])


class ConvNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)
        self.readout = BASE / width

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + torch.relu(block(norm(x)))
        return self.head(x.mean(dim=(2, 3)) * self.readout)


@dataclass(frozen=True)
class Supervised:
    """A model of this file under muP (Tensor Programs V, Table 8), on fixed random data."""

    model: Callable[[int], nn.Module]
    shape: tuple[int, ...] = (16,)
    optimizer_kind: str = "adamw"
    form: str = "table8"
    zero_readout: bool = False
    lr: float = 2.0**-6
    fault: Fault = field(default_factory=Fault)

    def build(self, width: int) -> nn.Module:
        model = self.model(width)
        for name, tensor in model.named_parameters():
            with torch.no_grad():
                self._initialize(name, tensor, width)
                tensor.mul_(power(self.fault.init, name, width))
        for name, module in model.named_modules():
            factor = power(self.fault.multiplier, name, width)
            if factor != 1.0 and not list(module.children()):
                module.register_forward_hook(lambda _module, _inputs, output, factor=factor: output * factor)
        return model

    def _initialize(self, name: str, tensor: Tensor, width: int) -> None:
        if tensor.dim() == 1:
            tensor.fill_(1.0 if name.startswith("norms") and name.endswith("weight") else 0.0)
        elif name.startswith(("readout", "head")):
            std = 0.0 if self.zero_readout else BASE**-0.5 * (BASE / width if self.form == "table3" else 1.0)
            tensor.normal_(0.0, std) if std else tensor.zero_()
        elif self.form == "unit" and not name.startswith(("embed", "stem")):
            tensor.normal_()
        else:
            tensor.normal_(0.0, tensor[0].numel() ** -0.5)

    def optimizer(self, model: nn.Module, width: int) -> torch.optim.Optimizer:
        groups = [self._group(name, tensor, width) for name, tensor in model.named_parameters()]
        if self.optimizer_kind == "sgd":
            return torch.optim.SGD(groups)
        if self.optimizer_kind == "muon":
            return _MuonAndAdamW(groups)
        return torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def _group(self, name: str, tensor: nn.Parameter, width: int) -> dict[str, Any]:
        m = width / BASE
        hidden = tensor.dim() > 1 and name.startswith(("layers", "blocks"))
        readout = tensor.dim() > 1 and name.startswith(("readout", "head"))
        lr, decay = self.lr, 0.1
        if self.optimizer_kind == "sgd":
            lr = 0.5 * (1.0 if hidden else m if tensor.shape[0] == width or readout else 1.0)
        elif hidden:
            unit = self.form == "unit"
            lr, decay = lr * (m**-0.5 if unit else 1 / m), decay * (m**0.5 if unit else m)
            if self.optimizer_kind == "muon":
                lr, decay = self.lr, 0.1
        elif readout and self.form == "table3":
            lr, decay = lr / m, decay * m
        lr *= power(self.fault.lr, name, width)
        # The product with the LR stays: a fault of the LR is not also one of the decay.
        decay *= power(self.fault.weight_decay, name, width) / power(self.fault.lr, name, width)
        group: dict[str, Any] = {"params": [tensor], "lr": lr, "weight_decay": decay if self.optimizer_kind != "sgd" else 0.0}
        if self.optimizer_kind == "adamw":
            group["eps"] = 1e-12 if self.fault.eps is None else self.fault.eps
        return group

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(99 + step)
        return torch.randn((64, *self.shape), generator=generator), torch.randint(CLASSES, (64,), generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def after_step(self, _model: nn.Module, optimizer: torch.optim.Optimizer, _step: int) -> None:
        if self.fault.flat_schedule:
            for group in optimizer.param_groups:
                group["lr"] = self.lr


class _MuonAndAdamW:
    """Muon for hidden matrices, AdamW for the rest, as one object."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        def is_hidden(group: dict[str, Any]) -> bool:
            return group["params"][0].dim() == 2 and min(group["params"][0].shape) > 16

        hidden = [group for group in groups if is_hidden(group)]
        rest = [group for group in groups if not is_hidden(group)]
        self.optimizers = [torch.optim.Muon(hidden), torch.optim.AdamW(rest, eps=1e-12)]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def mlp(**changes: Any) -> Supervised:
    """Right unless a fault is given; form: table8, table3 or unit (u-muP's: unit init, 1/sqrt(fan_in) forward)."""
    form = changes.get("form", "table8")

    def build(width: int) -> nn.Module:
        return Mlp(width, 1.0 if form == "table3" else BASE / width, width**-0.5 if form == "unit" else 1.0)

    return Supervised(build, **changes)


def convnet(**changes: Any) -> Supervised:
    return Supervised(ConvNet, shape=(3, 6, 6), **changes)


class FaultyRun(RunTarget):
    """The toolkit's transformer with a fault put in after it was built."""

    fault = Fault()

    def build(self, width: int) -> nn.Module:
        model = super().build(width)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.mul_(power(self.fault.init, name, width))
        for name, module in model.named_modules():
            factor = power(self.fault.multiplier, name, width) if name else 1.0
            if factor != 1.0 and not list(module.children()):
                module.register_forward_hook(lambda _module, _inputs, output, factor=factor: output * factor)
        readout = power(self.fault.multiplier, "readout", width)
        model.rules = replace(model.rules, readout=model.rules.readout * readout)
        return model

    def optimizer(self, model: nn.Module, width: int) -> torch.optim.Optimizer:
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        whole = super().optimizer(model, width)
        if self.fault == Fault():
            return whole
        groups = [
            {**{key: value for key, value in group.items() if key not in ("params", "names")}, "params": [tensor]}
            | {"lr": group["lr"] * power(self.fault.lr, names[id(tensor)], width)}
            | ({"eps": self.fault.eps} if self.fault.eps is not None else {})
            for group in whole.param_groups
            for tensor in group["params"]
        ]
        return type(whole)(groups)


def transformer(fault: Fault | None = None, **changes: Any) -> FaultyRun:
    """The toolkit's decoder at depth 1 on synthetic tokens; `changes` of RunConfig's keys, `model__x` for its model's."""
    model = {"depth": 1, "width": BASE, "context": 16, "vocab_size": 32, "head_dim": 8}
    model |= {key.removeprefix("model__"): value for key, value in changes.items() if key.startswith("model__")}
    values = {
        "model": model,
        "base": {"width": BASE},
        "data": {"source": "zipf-markov", "synthetic_tokens": 40_000, "synthetic_vocab": 32},
        "training": {"batch_size": 16},
        "optimizer": {"lr": 2.0**-6, "eps": 1e-12},
    }
    values |= {key: value for key, value in changes.items() if not key.startswith("model__")}
    run = RunConfig.model_validate(values)
    target = FaultyRun(run, prepare(run.data, context=16, vocab_size=32))
    target.fault = fault or Fault()
    return target


def with_fault(target: Supervised, **powers: Any) -> Supervised:
    return replace(target, fault=Fault(**powers))


frozen_embedding = with_fault(mlp(), lr={"embed.weight": -1})
"""For the README: a model whose first layer's learning rate falls with width, which a plot of mean activations does not show."""
