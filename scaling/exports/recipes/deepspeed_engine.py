"""A DeepSpeed engine from ds_config.json and plan.json. Needs deepspeed, and param_groups.py beside it.

    engine, optimizer, scheduler = initialize_engine(model)
    loss = engine(batch); engine.backward(loss); engine.step()  # step() moves the schedule too

Groups are built by name before ZeRO partitions the parameters, and one schedule factor goes to all groups.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import param_groups
from torch import nn

try:
    import deepspeed
except ImportError as error:
    raise param_groups.not_installed(error, "deepspeed", "DS_BUILD_OPS=0 pip install deepspeed==0.19.8") from None

HERE = Path(__file__).parent


def initialize_engine(model: nn.Module, folder: Path = HERE, fused: bool = True) -> tuple[Any, Any, Any]:
    """Engine, optimizer and scheduler; raises where a group has lost its learning rate."""
    plan = param_groups.read_plan(folder / "plan.json")
    settings = json.loads((folder / "ds_config.json").read_text())
    optimizer = param_groups.build_optimizer(model, plan, fused=fused)
    peaks = {name: group["peak_lr"] for group in optimizer.param_groups for name in group["names"]}
    scheduler = param_groups.build_scheduler(optimizer, plan)
    engine, wrapped, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings
    )
    factor = param_groups.lr_factor(plan, 0)
    for group in wrapped.param_groups:
        for name in group["names"]:
            if group["lr"] != peaks[name] * factor:
                raise RuntimeError(f"{name} has LR {group['lr']} instead of {peaks[name] * factor}")
    return engine, wrapped, scheduler
