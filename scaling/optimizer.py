"""The optimizer of a run: parameter groups from the rules, tensors with equal settings merged."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from scaling.config import RunConfig, ScheduleConfig
from scaling.parametrization import tensor_rules
from scaling.schedule import lr_factor


def parameter_groups(model: nn.Module, run: RunConfig) -> list[dict[str, Any]]:
    """Groups for a torch optimizer; `peak_lr` is each group's own LR before the schedule, `names` its tensors.

    Few groups keep the optimizer's step fast (a fused step a group). A parameter that no rule names is an error.
    """
    parameters = dict(model.named_parameters())
    merged: dict[tuple[float, float, float], list[str]] = defaultdict(list)
    for rule in tensor_rules(run):
        merged[(rule.lr, rule.weight_decay, rule.eps)].append(rule.name)
    named = {name for names in merged.values() for name in names}
    assert named == set(parameters), f"tensors without a rule, or rules without a tensor: {named ^ set(parameters)}"
    return [
        {"params": [parameters[name] for name in names], "names": names, "lr": lr, "peak_lr": lr, "weight_decay": wd, "eps": eps}
        for (lr, wd, eps), names in merged.items()
    ]


def build_optimizer(model: nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """AdamW or SGD with momentum, fused, over the merged groups."""
    groups, optimizer = parameter_groups(model, run), run.optimizer
    if optimizer.kind == "sgd":
        for group in groups:
            del group["eps"]
        return torch.optim.SGD(groups, momentum=optimizer.beta1, fused=True)
    return torch.optim.AdamW(groups, betas=(optimizer.beta1, optimizer.beta2), fused=True)


def set_lr(optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Give every group its peak LR times the schedule's factor, and return the factor: groups keep their ratios."""
    factor = lr_factor(schedule, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return factor
