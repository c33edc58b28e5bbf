"""Builds megatron-core's GPTModel and its optimizer groups on the CPU from the flags on stdin; prints every tensor's values as JSON.

megatron-core needs Python 3.12 for one name of `typing` alone, which is put there before it is imported.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import math
import os
import sys
import typing

import typing_extensions

typing.override = typing_extensions.override  # type: ignore[assignment,attr-defined,unused-ignore]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import (
    OptimizerConfig,
    _get_param_groups,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import add_megatron_arguments

flags = json.load(sys.stdin)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=int(flags["--num-layers"]),
    hidden_size=int(flags["--hidden-size"]),
    ffn_hidden_size=int(flags["--ffn-hidden-size"]),
    num_attention_heads=int(flags["--num-attention-heads"]),
    num_query_groups=int(flags["--num-query-groups"]),
    kv_channels=int(flags["--kv-channels"]),
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    normalization="RMSNorm",
    add_bias_linear=False,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    params_dtype=torch.float32,
    init_method_std=float(flags["--init-method-std"]),
    embedding_init_method_std=float(flags["--embedding-init-method-std"]),
    use_mup="--use-mup" in flags,
    mup_base_hidden_size=int(flags["--mup-base-hidden-size"]),
    mup_base_head_dim=float(flags["--mup-base-head-dim"]),
    mup_embedding_mult=float(flags["--mup-embedding-mult"]),
)
torch.manual_seed(0)
model = GPTModel(
    config,
    get_gpt_layer_local_spec(normalization="RMSNorm"),
    vocab_size=512,
    max_sequence_length=int(flags["--seq-length"]),
    share_embeddings_and_output_weights=False,
    position_embedding_type="rope",
)
settings = OptimizerConfig(
    optimizer="adam",
    lr=float(flags["--lr"]),
    min_lr=float(flags["--min-lr"]),
    weight_decay=float(flags["--weight-decay"]),
    adam_eps=float(flags["--adam-eps"]),
)
overrides = {**get_standard_config_overrides(settings), **get_mup_config_overrides(settings, config.mup_width_mult)}
names = {id(parameter): name for name, parameter in model.named_parameters()}
tensors = {}
for group in _get_param_groups([model], settings, overrides):
    for parameter in group["params"]:
        tensors[names[id(parameter)]] = {
            "lr": group["max_lr"] * group.get("lr_mult", 1.0),
            "weight_decay": settings.weight_decay * group["wd_mult"],
            "eps": group.get("eps", settings.adam_eps),
            "std": float(parameter.detach().double().std()) if parameter.dim() > 1 else math.inf,
            "entries": parameter.numel(),
        }
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
unknown = parser.parse_known_args([text for flag in flags.items() for text in flag if text is not None])[1]
found = {
    "unknown_flags": unknown,
    "softmax_scale": config.softmax_scale,
    "output_mult": config.mup_output_mult,
    "tensors": tensors,
}
print(json.dumps(found))
