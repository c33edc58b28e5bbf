"""megatron-core on the CPU, from the flags on stdin: every tensor's values, and the schedule at every update, printed as JSON.

stdin: {"flags": {...}, "folder": ...}; with a folder, its megatron_recipe.py is installed first, as a user would.
Model, groups, optimizer and schedule are made by Megatron's own code; megatron-core needs Python 3.12 for one name of `typing` alone,
which is put there before it is imported.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import typing
from typing import Any
from unittest.mock import patch

import typing_extensions

typing.override = typing_extensions.override  # type: ignore[assignment,attr-defined,unused-ignore]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_mup_config_overrides
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import training
from megatron.training.arguments import add_megatron_arguments
from megatron.training.global_vars import set_args

from tests.engines.init_trace import InitTrace


class Wrapped(torch.nn.Module):
    """What Megatron's data parallel, whose buffers need CUDA, shows the optimizer of a model."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.module = model
        self.ddp_config = DistributedDataParallelConfig()
        self.buffers: list[Any] = []  # type: ignore[assignment]
        self.expert_parallel_buffers: list[Any] = []


def start() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def parsed(flags: dict[str, str | None]) -> tuple[Any, list[str]]:
    """What Megatron's own parser makes of the flags, and those that it does not know."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments, unknown = parser.parse_known_args([text for flag in flags.items() for text in flag if text is not None])
    arguments.start_weight_decay = arguments.end_weight_decay = arguments.weight_decay  # as validate_args does, which needs CUDA
    for name in [name for name in vars(arguments) if name.endswith("_dtype")]:
        delattr(arguments, name)  # words, which validate_args makes types
    return arguments, unknown


def build(arguments: Any) -> tuple[TransformerConfig, GPTModel]:
    """GPTModel and its config."""
    mup = {name: getattr(arguments, name) for name in ("mup_base_hidden_size", "mup_base_head_dim", "mup_embedding_mult")}
    config = TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=arguments.ffn_hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups,
        kv_channels=arguments.kv_channels,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        params_dtype=torch.float32,
        qk_layernorm=arguments.qk_layernorm,
        init_method_std=arguments.init_method_std,
        embedding_init_method_std=arguments.embedding_init_method_std,
        use_mup=arguments.use_mup,
        **(mup if arguments.use_mup else {}),
    )
    torch.manual_seed(0)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=arguments.qk_layernorm),
        vocab_size=512,
        max_sequence_length=arguments.seq_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return config, model


def optimizer_of(arguments: Any, config: TransformerConfig, model: GPTModel) -> Any:
    """As `setup_model_and_optimizer` makes it."""
    settings, overrides = training.get_megatron_optimizer_config(arguments)
    if arguments.use_mup:
        found = get_mup_config_overrides(config=settings, mup_width_mult=config.mup_width_mult, optimizer_type=settings.optimizer)
        overrides = {**overrides, **found}
    # It puts the loss' scale, a constant, on a GPU.
    with patch.object(torch, "tensor", lambda value, **others: _tensor(value, **others | {"device": "cpu"})):
        return training.get_megatron_optimizer(
            settings, [Wrapped(model)], config_overrides=overrides, use_gloo_process_groups=True
        )


_tensor = torch.tensor


def values(optimizer: Any, model: GPTModel, adam_eps: float) -> dict[str, dict[str, Any]]:
    """Of every tensor: what its group holds, and how it starts."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: {
            "lr": group["max_lr"],
            "weight_decay": group["weight_decay"],
            "eps": group.get("eps", adam_eps),
            "std": float(parameter.detach().double().std()) if parameter.dim() > 1 else math.inf,
            "mean": float(parameter.detach().double().mean()),
            "entries": parameter.numel(),
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def schedule(optimizer: Any, scheduler: Any, arguments: Any) -> list[list[float]]:
    """LR over peak of every group at every update."""
    factors = []
    for _ in range(arguments.train_iters):
        factors.append([group["lr"] / group["max_lr"] for group in optimizer.param_groups])
        scheduler.step(increment=arguments.global_batch_size)
    return factors


def main() -> None:
    asked = json.load(sys.stdin)
    start()
    arguments, unknown = parsed(asked["flags"])
    set_args(arguments)
    if asked.get("folder"):
        sys.path.insert(0, asked["folder"])
        importlib.import_module("megatron_recipe").install()
    with InitTrace() as trace:
        config, model = build(arguments)
        # Init that Megatron itself configures, entry by entry of the same draw.
        drawn = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = optimizer_of(arguments, config, model)
    scheduler = training.get_optimizer_param_scheduler(optimizer)
    found = {
        "unknown_flags": unknown,
        "softmax_scale": config.softmax_scale,
        "output_mult": config.mup_output_mult,
        "tensors": values(optimizer, model, arguments.adam_eps),
        "scaled": {
            name: float((parameter.detach() / drawn[name]).nan_to_num(1.0).mean()) for name, parameter in model.named_parameters()
        },
        "init": {name: vars(trace.init_of(parameter)) for name, parameter in model.named_parameters()},
        "init_method_std": config.init_method_std,
        "embedding_init_method_std": config.embedding_init_method_std,
        "identifiers": [[group.get(key) for key in param_group_identifier_keys] for group in optimizer.param_groups],
        "schedule": schedule(optimizer, scheduler, arguments),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
