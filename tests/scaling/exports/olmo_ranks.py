"""One of the processes of test_olmo: trains the exported run in OLMo-core's train module, under FSDP and recomputation where there are two.

    olmo_ranks.py FOLDER

Rank 0 writes FOLDER/found-WORLD.json: losses, gradient norms, and what every tensor started at and is moved by.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from scaling.torchrun import leave

STEPS, WRAPPER = 6, "_checkpoint_wrapped_module."


def parallel_settings() -> dict[str, Any]:
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.transformer.config import TransformerActivationCheckpointingMode
    from olmo_core.train.train_module import TransformerActivationCheckpointingConfig, TransformerDataParallelConfig

    recompute = TransformerActivationCheckpointingConfig(mode=TransformerActivationCheckpointingMode.full)
    return {"dp_config": TransformerDataParallelConfig(name=DataParallelType.fsdp), "ac_config": recompute}


def tensors_of(module: Any) -> dict[str, Any]:
    groups = {id(parameter): group for group in module.optim.param_groups for parameter in group["params"]}
    found = {}
    for name, parameter in module.model.named_parameters():
        whole, group = getattr(parameter, "full_tensor", lambda kept=parameter: kept)(), groups[id(parameter)]
        values = [float(whole.detach().double().sum()), group["initial_lr"], group["weight_decay"], group["eps"]]
        found[name.replace(WRAPPER, "")] = values
    return found


def losses_of(module: Any, rank: int, world: int) -> tuple[list[float], list[float]]:
    metrics: dict[str, float] = {}
    module._trainer = SimpleNamespace(
        global_step=0,
        max_steps=STEPS,
        record_metric=lambda name, value, *_, **__: metrics.update({name: float(value)}),
        record_ce_loss=lambda value, *_, **__: metrics.update(loss=float(value)),
    )
    losses, norms = [], []
    for step, tokens in enumerate(torch.randint(0, 32, (STEPS, 8, 17), generator=torch.Generator().manual_seed(5))):
        module.trainer.global_step = step + 1  # as OLMo-core's Trainer counts
        mine = tokens[rank::world]
        module.zero_grads()
        module.train_batch({"input_ids": mine[:, :-1].contiguous(), "labels": mine[:, 1:].contiguous()})
        module.optim_step()
        loss = torch.tensor(metrics["loss"])
        dist.all_reduce(loss)
        losses.append(loss.item() / world)
        norms.append(metrics["total grad norm"])
    return losses, norms


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    recipe = importlib.import_module("olmo_core_recipe")
    settings = parallel_settings() if world > 1 else {}
    model = recipe.model_config().build(init_device="meta")
    module = recipe.train_module_config(**settings).build(model, device=torch.device("cpu"))
    tensors = tensors_of(module)
    losses, norms = losses_of(module, rank, world)
    if rank == 0:
        found = {"losses": losses, "norms": norms, "tensors": tensors}
        (folder / f"found-{os.environ['WORLD_SIZE']}.json").write_text(json.dumps(found))
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
