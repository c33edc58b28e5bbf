"""A torchtitan 0.3.0 recipe from plan.json and model.json: Llama 3 with the plan's init, and the plan's parameter groups.

    torchrun ... -m torchtitan.train --module torchtitan_recipe --config run

`configure` puts model, groups, schedule, batch and clipping on a configuration of yours, whose data, tokenizer, checkpoints and parallel
layout stay. Pipeline parallelism is refused: a group that matches nothing on a stage stops torchtitan 0.3.0.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import param_groups
from param_groups import PlanError, read_plan
from torch import nn

try:
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3 import Llama3Model, model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.models.llama3.model import Llama3TransformerBlock
except ImportError as error:
    raise param_groups.not_installed(error, "torchtitan", "pip install torchtitan==0.3.0 triton") from None

HERE = Path(__file__).parent
WRITTEN_FOR = "0.3.0"


def run() -> Any:
    """torchtitan's small Llama 3 configuration with all that the export says; replace its data and tokenizer by yours."""
    return configure(llama3_debugmodel())


def configure(config: Any, folder: Path = HERE) -> Any:
    """`config`, changed in place. Raises PlanError for another version of torchtitan, and for pipeline stages."""
    if version("torchtitan") != WRITTEN_FOR:
        raise PlanError(f"torchtitan {version('torchtitan')} is installed; this recipe is for {WRITTEN_FOR}")
    if config.parallelism.pipeline_parallel_degree != 1:
        raise PlanError("pipeline_parallel_degree > 1: torchtitan 0.3.0 refuses groups that match nothing on a stage")
    plan, shape = read_plan(folder / "plan.json"), json.loads((folder / "model.json").read_text())
    spec = model_registry("debugmodel")
    spec.model = model_config(plan, shape)
    config.model_spec = spec
    config.optimizer = OptimizersContainer.Config(param_groups=groups(plan))
    schedule = plan["schedule"]
    config.lr_scheduler = LRSchedulersContainer.Config(
        warmup_steps=schedule["warmup_steps"],
        total_steps=schedule["steps"],
        decay_ratio=(schedule["steps"] - schedule["decay_start_step"]) / schedule["steps"],
        decay_type=schedule["decay_shape"],
        min_lr_factor=schedule["final_factor"],
    )
    config.training.steps = schedule["steps"]
    config.training.seq_len = shape["seq_len"]
    config.training.local_batch_size = shape["local_batch_size"]
    config.training.global_batch_size = shape["global_batch_size"]
    config.training.max_norm = plan["optimizer"]["clip_norm"] or float("inf")
    config.training.mixed_precision_param = "bfloat16" if shape["bf16"] else "float32"
    return config


def groups(plan: dict[str, Any]) -> list[ParamGroupConfig]:
    """One group a row. torchtitan searches a pattern anywhere in a name, so that it is anchored here."""
    name = {"adamw": "AdamW", "adam": "Adam"}[plan["optimizer"]["kind"]]
    betas = (plan["optimizer"]["beta1"], plan["optimizer"]["beta2"])
    return [
        ParamGroupConfig(
            pattern=f"^{row['pattern']}$",
            optimizer_name=name,
            optimizer_kwargs={"lr": row["lr"], "weight_decay": row["weight_decay"], "eps": row["eps"], "betas": betas},
        )
        for row in plan["tensors"]
    ]


def init_of(plan: dict[str, Any], name: str) -> dict[str, Any]:
    """torchtitan's param_init for the tensors whose pattern ends in `name`."""
    (row,) = [row for row in plan["tensors"] if row["pattern"].replace("\\", "").endswith(f"{name}.weight")]
    if row["init_std"] is None:
        return {"weight": partial(nn.init.constant_, val=row["init_constant"])}
    return {"weight": partial(nn.init.normal_, std=row["init_std"])}


def model_config(plan: dict[str, Any], shape: dict[str, Any]) -> Any:
    """Llama 3 of the run's shape, queries, keys and values as three matrices."""
    dim, layers = shape["dim"], []
    norm = partial(RMSNorm.Config, normalized_shape=dim, eps=shape["norm_eps"])
    for _ in range(shape["n_layers"]):
        attention = make_gqa_config(
            dim=dim,
            n_heads=shape["n_heads"],
            n_kv_heads=shape["n_kv_heads"],
            head_dim=shape["head_dim"],
            wqkv_param_init=init_of(plan, ".wk"),
            wo_param_init=init_of(plan, ".wo"),
            inner_attention=get_attention_config("flex"),
            rope=ComplexRoPE.Config(dim=shape["head_dim"], max_seq_len=shape["seq_len"], theta=shape["rope_theta"]),
        )
        attention.qkv_linear.wq.param_init = init_of(plan, ".wq")
        feed_forward = make_ffn_config(
            dim=dim,
            hidden_dim=shape["hidden_dim"],
            w1_param_init=init_of(plan, ".w1"),
            w2w3_param_init=init_of(plan, ".w3"),
        )
        feed_forward.w2.param_init = init_of(plan, ".w2")
        layers.append(
            Llama3TransformerBlock.Config(
                attention_norm=norm(param_init=init_of(plan, ".attention_norm")),
                ffn_norm=norm(param_init=init_of(plan, ".ffn_norm")),
                attention=attention,
                feed_forward=feed_forward,
            )
        )
    vocabulary = shape["vocab_size"]
    return Llama3Model.Config(
        dim=dim,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=init_of(plan, "tok_embeddings")),
        norm=norm(param_init=final_norm(plan)),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=init_of(plan, "lm_head")),
        layers=layers,
    )


def final_norm(plan: dict[str, Any]) -> dict[str, Any]:
    """param_init of the norm before the readout, whose whole name is norm.weight."""
    (row,) = [row for row in plan["tensors"] if row["pattern"] == r"norm\.weight"]
    return {"weight": partial(nn.init.constant_, val=row["init_constant"])}
