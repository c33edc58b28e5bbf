"""What a device computes and moves through its own memory in a step: products, attention, everything else. Torch-free.

Owns Work and `step_work`. Products run at a share of the device's measured best product and also move their operands; attention runs at
a share of that; norms, activations, rotary positions, losses and the optimizer are bound by the memory's bandwidth and counted in bytes.
Bytes are counted kernel by kernel from the tensors' sizes, none of them is fitted. All figures are of the slowest pipeline stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.hardware import Arithmetic, Device
from analysis.layout_experts import every_token_mlp, experts_of, mlp_matrices
from analysis.memory_plan import (
    ACTIVATION_BYTES,
    TWO_MOMENTS,
    Layout,
    moment_bytes,
    sharded_parameters,
    stage_layers,
    stage_parameters,
)
from scaling.model_config import ModelConfig

ATTENTION_SHARE = 0.6
"""Speed of attention over that of large products: FlashAttention-2 reaches 35 % of an H100's peak (2407.08608), products about 60 %."""
BANDWIDTH_SHARE = 0.9
"""Of the memory's bandwidth that kernels which stream reach: a round figure, not a measurement."""
FLASH_BACKWARD = 2.5
"""Backward over forward FLOP of flash attention, which makes the scores again; 2 where they are kept."""
UPDATE_BYTES = 30
"""A parameter and step: fp32 gradient read, fp32 weight and two moments read and written, a 16-bit weight written; fewer moments less."""


@dataclass(frozen=True)
class Work:
    """Seconds of one step. products_s, attention_s: at the device's sustained rate; memory_s, update_s: bound by its memory, update_s
    the optimizer's, behind which nothing else runs."""

    products_s: float
    attention_s: float
    memory_s: float
    update_s: float

    def computing_s(self, efficiency: float) -> float:
        """All but the optimizer, with products at this share of the best one."""
        return (self.products_s + self.attention_s / ATTENTION_SHARE) / efficiency + self.memory_s


@dataclass(frozen=True)
class _Block:
    """Of one block, one micro-batch and one forward pass: FLOP of products and of attention, bytes of products and of all else."""

    flops: float
    attention_flops: float
    product_bytes: float
    other_bytes: float


def _tokens(model: ModelConfig, layout: Layout) -> float:
    return layout.micro_batch_size * model.context / layout.cp


def _products(model: ModelConfig, layout: Layout) -> list[tuple[float, float, float, float]]:
    """Products of a block on one device: (rows a token, inner, outer, how many weights of that size are read)."""
    width, kv_width, tp = model.width, model.kv_heads * model.head_size, layout.tp
    experts, top_k, expert_width = experts_of(model)
    into = mlp_matrices(model) - 1
    found = [(1.0, width, (width + 2 * kv_width) / tp, 1.0), (1.0, width / tp, width, 1.0)]
    shared = every_token_mlp(model) / tp
    found += [(1.0, width, into * shared, 1.0), (1.0, shared, width, 1.0)] if shared else []
    if experts:
        held, hidden = experts / layout.ep, expert_width / tp
        found += [(1.0, width, experts, 1.0), (top_k, width, into * hidden, held), (top_k, hidden, width, held)]
    return found


def _other_bytes(model: ModelConfig, layout: Layout, arithmetic: Arithmetic) -> float:
    """Bytes a token of a block's forward pass that are no product's: each kernel reads its inputs and writes its output once.

    Unfused norms and rotary positions go through fp32 in several kernels (36 and 20 bytes an entry instead of 4), an unfused gate twice
    through memory. 8-bit products read their 16-bit input and write it in two layouts.
    """
    tp, whole_split = layout.tp, layout.tp if layout.sequence_parallel else 1
    width, kv_width = model.width / whole_split, model.kv_heads * model.head_size
    _, top_k, expert_width = experts_of(model)
    hidden = (every_token_mlp(model) + top_k * expert_width) / tp
    rotated = (model.width + kv_width) / tp
    norm, turn = (4, 4) if layout.fused else (36, 20)
    gate = (6 if layout.fused else 10) if model.activation == "swiglu" else 4
    moved = 2 * norm * width + 2 * 6 * width + gate * hidden + turn * rotated
    moved += 2 * 5 * width if layout.dropout else 0.0
    # A copy of a token for each of its experts, and their sum.
    moved += 2 * 2 * ACTIVATION_BYTES * top_k * width
    if arithmetic == "fp8":
        moved += 4 * (2 * width + model.width / tp + hidden + top_k * width)
    return moved


def _score_bytes(model: ModelConfig, layout: Layout) -> float:
    """Bytes a token of scores that are written out: by the product, softmax and dropout, each written and read."""
    return 0.0 if layout.flash_attention else 6 * ACTIVATION_BYTES * model.heads * model.context / layout.tp


def _block(model: ModelConfig, layout: Layout, arithmetic: Arithmetic) -> _Block:
    tokens, size = _tokens(model, layout), 1 if arithmetic == "fp8" else ACTIVATION_BYTES
    products = _products(model, layout)
    flops = sum(2 * tokens * rows * inner * outer for rows, inner, outer, _ in products)
    operands = sum(
        size * (tokens * rows * inner + count * inner * outer) + ACTIVATION_BYTES * tokens * rows * outer
        for rows, inner, outer, count in products
    )
    # Halved by the causal mask, which only kernels that never write the scores make use of.
    seen = model.context if layout.flash_attention else 2 * model.context
    attention = 2 * tokens * seen * model.heads * model.head_size / layout.tp
    return _Block(flops, attention, operands, tokens * _other_bytes(model, layout, arithmetic))


def _readout(model: ModelConfig, layout: Layout) -> tuple[float, float]:
    """FLOP and bytes of the readout and its loss, forward and backward, of one micro-batch: logits are written in 16 bit, and the loss
    passes over them four times in fp32; twice more where it is not fused."""
    logits = _tokens(model, layout) * model.vocabulary / layout.tp
    return 6 * logits * model.width, logits * (2 + 16 + (0 if layout.fused else 8))


def _again(layout: Layout) -> tuple[float, float, float]:
    """Forward passes that checkpointing makes again: of products, of attention and its scores, of all else."""
    scores = 0.0 if layout.flash_attention else 1.0
    return {
        "none": (0.0, 0.0, 0.0),
        "selective": (0.0, scores, 0.0),
        "selective-op": (0.5, 0.0, 1.0),
        "full": (1.0, 1.0, 1.0),
    }[layout.checkpointing]


def _stage_work(model: ModelConfig, layout: Layout, device: Device, arithmetic: Arithmetic, stage: int) -> Work:
    block, (products, scores, others) = _block(model, layout, arithmetic), _again(layout)
    layers = stage_layers(model.depth, layout, stage)
    last = stage == layout.pp - 1
    readout_flops, readout_bytes = _readout(model, layout) if last else (0.0, 0.0)
    backward = FLASH_BACKWARD if layout.flash_attention else 2.0
    bandwidth = device.memory_bandwidth * BANDWIDTH_SHARE
    moved = layers * ((3 + products) * block.product_bytes + (3 + others) * block.other_bytes) + readout_bytes
    moved += layers * (3 + scores) * _tokens(model, layout) * _score_bytes(model, layout)
    passes = layout.micro_batches
    # Attention and the readout stay in 16 bit.
    sixteen = device.sustained("bf16")
    linear = layers * (3 + products) * block.flops / device.sustained(arithmetic) + readout_flops / sixteen
    attention = layers * (1 + backward + scores) * block.attention_flops / sixteen
    updated = UPDATE_BYTES - 2 * (sum(TWO_MOMENTS) / 2 - moment_bytes(model, layout, stage))
    held = (sharded_parameters if "optimizer" in layout.scheme.sharded else stage_parameters)(model, layout, stage)
    memory, update = (0.0 if math.isnan(bandwidth) else size / bandwidth for size in (passes * moved, updated * held))
    return Work(passes * linear, passes * attention, memory, update)


def step_work(model: ModelConfig, layout: Layout, device: Device, arithmetic: Arithmetic = "bf16") -> Work:
    """Work of the pipeline stage that takes longest: one with most layers, or the last, which has the readout.

    A memory whose bandwidth is not stated takes no time.
    """
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    works = [_stage_work(model, layout, device, arithmetic, stage) for stage in stages]
    return max(works, key=lambda work: work.computing_s(1.0))
