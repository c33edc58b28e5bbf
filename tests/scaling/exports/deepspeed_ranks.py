"""One of the processes of test_deepspeed: trains the plain recipe, then each exported engine, and rank 0 writes what was found."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from scaling.config import RunConfig
from scaling.exports.recipes import param_groups as recipe
from scaling.model import build_model
from scaling.torchrun import leave

MICRO, ACCUMULATION = 2, 2


def batches(step: int, run: RunConfig) -> torch.Tensor:
    return torch.randint(0, 32, (8, run.model.context + 1), generator=torch.Generator().manual_seed(step))


def plain(run: RunConfig, folder: Path) -> dict[str, Any]:
    plan = recipe.read_plan(folder / "zero1" / "plan.json")
    model = build_model(run)
    recipe.initialize(model, plan, seed=0)
    optimizer = recipe.build_optimizer(model, plan)
    scheduler, losses = recipe.build_scheduler(optimizer, plan), []
    for step in range(run.training.steps):
        optimizer.zero_grad()
        loss = model.loss(batches(step, run))
        loss.backward()
        recipe.clip_gradients(model, plan)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return {"losses": losses}


def engine_of(run: RunConfig, folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(folder))
    for name in ("param_groups", "engine"):
        sys.modules.pop(name, None)
    exported = importlib.import_module("engine")
    plan = recipe.read_plan(folder / "plan.json")
    model = build_model(run)
    recipe.initialize(model, plan, seed=0)
    # The engine calls forward, which has to be the loss.
    logits = model.forward
    model.forward = lambda tokens: cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())  # type: ignore[method-assign]
    engine, optimizer, _ = exported.initialize_engine(model)
    factor = recipe.lr_factor(plan, 0)
    tensors = {
        name: (group["lr"] / factor, group["weight_decay"], group["eps"])
        for group in optimizer.param_groups
        for name in group["names"]
    }
    rank, losses = dist.get_rank(), []
    for step in range(run.training.steps):
        share, total = batches(step, run)[rank::2], 0.0
        for part in share.split(MICRO):
            loss = engine(part)
            engine.backward(loss)
            engine.step()
            total += loss.item() / ACCUMULATION
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
    sys.path.remove(str(folder))
    return {"losses": losses, "tensors": tensors}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed decorates functions with it that nothing here calls; the import of the compiler takes a second of each process.
    torch.compile = lambda function=None, **_: (lambda decorated: decorated) if function is None else function
    import deepspeed

    # A faster reduction between processes of one machine, whose C++ is compiled on its first use, for a minute. By the module's name: as an
    # attribute `deepspeed.comm.torch` is torch itself.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed("gloo")
    run = RunConfig.model_validate_json((folder / "run.json").read_text())
    found = {"plain": plain(run, folder)} | {stage: engine_of(run, folder / f"zero{stage}") for stage in ("1", "2", "3")}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
