"""The optimizer of a run: parameter groups from the rules, tensors with equal settings merged, and the schedule put on them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from scaling.config import OptimizerKind, RunConfig, ScheduleConfig
from scaling.lion import Lion
from scaling.parametrization import carried, tensor_rules
from scaling.schedule import lr_factor

WITH_EPS: tuple[OptimizerKind, ...] = ("adamw", "adam", "muon")


def parameter_groups(model: nn.Module, run: RunConfig) -> list[dict[str, Any]]:
    """Groups for torch optimizers; `peak_lr` is each group's own LR before the schedule, `names` its tensors, `optimizer` what moves it.

    Few groups keep the optimizer's step fast (a fused step a group). `model` may be a part of the run's. A parameter that no rule names
    is an error.
    """
    parameters = dict(model.named_parameters())
    merged: dict[tuple[OptimizerKind, float, float, float], list[str]] = defaultdict(list)
    for rule in tensor_rules(run):
        if rule.name not in parameters:
            continue
        eps = rule.eps if rule.optimizer in WITH_EPS else 0.0
        merged[rule.optimizer, rule.lr, rule.weight_decay, eps].append(rule.name)
    named = {name for names in merged.values() for name in names}
    assert named == set(parameters), f"tensors without a rule: {set(parameters) - named}"
    return [
        {"params": [parameters[name] for name in names], "names": names, "lr": lr, "peak_lr": lr, "weight_decay": wd}
        | {"optimizer": kind}
        | ({"eps": eps} if kind in WITH_EPS else {})
        for (kind, lr, wd, eps), names in merged.items()
    ]


class Optimizers:
    """Several optimizers that move one model, as one: `param_groups`, `zero_grad`, `step`, state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)


AnyOptimizer = torch.optim.Optimizer | Optimizers


def build_optimizer(model: nn.Module, run: RunConfig) -> AnyOptimizer:
    """The run's optimizer over the merged groups; under muon two of them as one."""
    groups, optimizer = parameter_groups(model, run), carried(run)
    if optimizer.kind == "muon":
        hidden = [group for group in groups if group["optimizer"] == "muon"]
        rest = [group for group in groups if group["optimizer"] != "muon"]
        muon = torch.optim.Muon(hidden, momentum=optimizer.muon_momentum, weight_decay=0.0, adjust_lr_fn="original")
        return Optimizers([muon, torch.optim.AdamW(rest, betas=(optimizer.beta1, optimizer.beta2), fused=True)])
    if optimizer.kind == "sgd":
        return torch.optim.SGD(groups, momentum=optimizer.beta1, fused=True)
    betas = (optimizer.beta1, optimizer.beta2)
    if optimizer.kind == "lion":
        return Lion(groups, betas=betas)
    if optimizer.kind == "adam":
        return torch.optim.Adam(groups, betas=betas, fused=True)
    return torch.optim.AdamW(groups, betas=betas, fused=True)


def inner_optimizers(optimizer: AnyOptimizer) -> list[torch.optim.Optimizer]:
    """torch's own optimizers in it."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]


def set_lr(optimizer: AnyOptimizer, schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Give every group its peak LR times the schedule's factor, and return the factor: groups keep their ratios."""
    factor = lr_factor(schedule, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return factor


def flattened(optimizer: AnyOptimizer) -> list[dict[str, Any]]:
    """Groups whose LR is not their peak LR times one factor common to all: what a scheduler that gives all groups one LR leaves.

    The factor is that of the group with the largest peak LR. All groups need `peak_lr`, as `parameter_groups` and
    `scaling.parametrize` give them.
    """
    groups = optimizer.param_groups
    reference = max(groups, key=lambda group: float(group["peak_lr"]))
    factor = reference["lr"] / reference["peak_lr"]
    return [group for group in groups if not math.isclose(group["lr"], group["peak_lr"] * factor, rel_tol=1e-6, abs_tol=1e-300)]
