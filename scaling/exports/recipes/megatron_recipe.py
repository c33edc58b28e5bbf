"""Megatron-LM (megatron-core 0.19) with plan.json's LR, decay, eps and init a tensor, and its schedule. Needs param_groups.py beside it.

In pretrain_gpt.py, before pretrain(...) is called:

    import megatron_recipe
    megatron_recipe.install()

and start it with the flags of megatron_arguments.sh, without --use-mup and --decoupled-lr. A parameter without a row, or a row without a
parameter on any pipeline stage, is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import param_groups
import torch
from param_groups import PlanError, lr_factor, read_plan
from torch import nn

try:
    import megatron.core
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
except ImportError as error:
    raise param_groups.not_installed(error, "megatron", "pip install megatron-core==0.19.2") from None

HERE = Path(__file__).parent
WRITTEN_FOR = "0.19."


def install(folder: Path = HERE) -> None:
    """Have Megatron's training program make its optimizer and schedule from the plan. Raises PlanError for another megatron-core."""
    import megatron.training.training as training

    if not megatron.core.__version__.startswith(WRITTEN_FOR):
        raise PlanError(f"megatron-core {megatron.core.__version__} is installed; this recipe is for {WRITTEN_FOR}x")
    plan = read_plan(folder / "plan.json")
    training.get_megatron_optimizer = partial(get_megatron_optimizer, plan, training.get_megatron_optimizer)
    training.OptimizerParamScheduler = partial(Scheduler, plan)


def get_megatron_optimizer(
    plan: dict[str, Any], build: Callable[..., Any], config: Any, model_chunks: list[nn.Module], **others: Any
) -> Any:
    """Megatron's optimizer over the plan's groups, of parameters that start as the plan says."""
    if config.decoupled_lr is not None:
        raise PlanError("--decoupled-lr gives embedding and readout another LR than the plan: leave it out")
    rows = match(model_chunks, plan)
    scale_init(rows, model_chunks[0])
    return build(config, model_chunks, **others | {"config_overrides": overrides(plan, config)})


def match(model_chunks: Iterable[nn.Module], plan: dict[str, Any]) -> list[tuple[str, nn.Parameter, dict[str, Any]]]:
    """Name, parameter and row of every parameter here; rows are looked for on all pipeline stages."""
    found, wrong = [], []
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            rows = [row for row in plan["tensors"] if matches(row["pattern"], parameter, name)]
            if len(rows) == 1:
                found.append((name, parameter, rows[0]))
            else:
                wrong.append(f"{name} matches {len(rows)} rows")
    stages: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(stages, [row["pattern"] for _, _, row in found])
    used = {pattern for patterns in stages for pattern in patterns}
    wrong += [f"{row['pattern']} matches no parameter" for row in plan["tensors"] if row["pattern"] not in used]
    if wrong:
        raise PlanError("; ".join(wrong))
    return found


def matches(pattern: str, _parameter: nn.Parameter, name: str) -> bool:
    """Wrappers put `module.` before a name."""
    return re.fullmatch(r"(module\.)*" + pattern, name) is not None


def overrides(plan: dict[str, Any], config: Any) -> dict[ParamKey, dict[str, float]]:
    """megatron-core's overrides, one a row; they stand in place of its own, which only turn decay off for gains."""
    found: dict[ParamKey, dict[str, float]] = {}
    seen: dict[tuple[float, float], list[float]] = {}
    for row in plan["tensors"]:
        # Megatron tells the groups of a checkpoint apart by LR and decay, not by eps: those that differ in eps alone have their decay
        # written as another product.
        same = seen.setdefault((row["lr"], row["weight_decay"]), [])
        if row["eps"] not in same:
            same.append(row["eps"])
        times = 2.0 ** same.index(row["eps"])
        decay = row["weight_decay"] / times
        values = {"start_wd": decay, "end_wd": decay, "wd_mult": times, "eps": row["eps"]}
        if row["lr"] != config.lr:
            # Megatron logs the LR of groups that have the flags' own.
            values |= {"max_lr": row["lr"], "min_lr": row["lr"] * plan["schedule"]["final_factor"]}
        predicate = ParamWithNamePredicate(name=row["pattern"], fn=partial(matches, row["pattern"]))
        found[ParamKey(with_name_predicate=predicate)] = values
    return found


@torch.no_grad()
def scale_init(rows: Iterable[tuple[str, nn.Parameter, dict[str, Any]]], chunk: nn.Module) -> None:
    """Bring every parameter from the std that Megatron's flags gave it to its row's; whatever the parallel layout."""
    config = config_of(chunk)
    if config.use_mup or config.layernorm_zero_centered_gamma:
        raise PlanError("--use-mup and --apply-layernorm-1p change what the plan changes: leave them out")
    for name, parameter, row in rows:
        wanted, given = (row["init_std"], given_std(name, config)) if row["init_std"] is not None else (row["init_constant"], 1.0)
        if wanted != given:
            parameter.mul_(wanted / given)


def config_of(chunk: nn.Module) -> Any:
    """The TransformerConfig under the wrappers."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return inner.config


def given_std(name: str, config: Any) -> float:
    """Megatron's init std of a matrix, without --use-mup."""
    if "word_embeddings" in name:
        return float(config.embedding_init_method_std)
    if "linear_proj" in name or "linear_fc2" in name:
        return float(config.init_method_std / math.sqrt(2.0 * config.num_layers))
    return float(config.init_method_std)


class Scheduler(OptimizerParamScheduler):  # type: ignore[misc,unused-ignore]
    """The plan's factor on every group's peak: Megatron's own starts its warm-up at an update with LR 0."""

    def __init__(self, plan: dict[str, Any], *arguments: Any, **settings: Any) -> None:
        self.plan = plan
        super().__init__(*arguments, **settings)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Megatron counts sequences."""
        step, left = divmod(self.num_steps, self.plan["batch"]["sequences"])
        if left:
            raise PlanError(
                f"{self.num_steps} sequences are no whole number of the plan's batches: leave --rampup-batch-size out"
            )
        peak: float = param_group["max_lr"]  # which megatron-core gives every group
        factor: float = lr_factor(self.plan, int(step))
        return peak * factor
