"""How long a step takes under a layout: FLOP, communication volume, pipeline bubble, MFU with a band. Torch-free.

Owns StepTime. Model FLOP are scaling.accounting's (causal attention, no recomputation); what checkpointing makes again costs time and earns
no MFU. The share of its peak that a device reaches in matrix products is no theory: EFFICIENCY is the range that published runs show
(analysis.published_runs, docs/planner.md). Volumes: ZeRO (1910.02054) section 7, Megatron-LM (2104.04473) section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from analysis.hardware import Arithmetic, Device
from analysis.memory_plan import ACTIVATION_BYTES, Layout, stage_parameters
from scaling.accounting import attention_flops_per_token, flops_per_token, parameter_counts
from scaling.model_config import ModelConfig

EFFICIENCY: Mapping[Arithmetic, tuple[float, float, float]] = MappingProxyType(
    {"bf16": (0.33, 0.47, 0.61), "fp8": (0.38, 0.44, 0.46)}
)
"""Lowest, middle and highest share of the peak in which products run, nothing but them counted, of published runs; a table makes it."""
BACKWARD = 2 / 3
"""Share of a step's computation that is its backward pass, behind which gradients move; sharded weights move behind all of it."""


@dataclass(frozen=True)
class Volume:
    """Bytes that one device sends in a step, by what for. data: gradients and sharded states."""

    data: float
    tensor: float
    pipeline: float
    context: float

    def to_dict(self) -> dict[str, float]:
        return {f"{name}_bytes": size for name, size in asdict(self).items()}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and the MFU that follows; `low` and `high` MFU by the band of EFFICIENCY.

    bubble: share of the step in which a device waits for its pipeline. exposed_s: communication that nothing hides.
    """

    mfu: float
    mfu_low: float
    mfu_high: float
    step_s: float
    bubble: float
    exposed_s: float
    recompute: float
    """Computed over model FLOP."""
    volume: Volume

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"volume": self.volume.to_dict()}


@lru_cache(maxsize=64)
def _model_flops(model: ModelConfig) -> float:
    return flops_per_token(model)


def bubble(layout: Layout) -> float:
    """Share of the step: (p - 1) / (v m + p - 1)."""
    waiting = layout.pp - 1
    return waiting / (layout.virtual_stages * layout.micro_batches + waiting)


def recompute_factor(model: ModelConfig, layout: Layout) -> float:
    """FLOP computed over model FLOP: a block's forward pass, a third of its FLOP, is made again under full checkpointing.

    selective-op makes half of the products again; selective the attention scores.
    """
    total, attention = _model_flops(model), attention_flops_per_token(model)
    blocks = total - _readout_flops(model)
    again = {
        "none": 0.0,
        "selective": 0.0 if layout.flash_attention else attention,
        "selective-op": (blocks - attention) / 2,
        "full": blocks,
    }
    return 1.0 + again[layout.checkpointing] / 3.0 / total


@lru_cache(maxsize=64)
def _readout_flops(model: ModelConfig) -> float:
    """FLOP a token of the readout, which checkpointing of blocks never makes again."""
    counts = parameter_counts(model)
    return 6.0 * (counts.embedding if model.tied_embeddings else counts.readout)


def _hidden_share(layout: Layout) -> float:
    """Share of the computation behind which data-parallel and context-parallel volumes can move."""
    return 1.0 if "weights" in layout.scheme.sharded else BACKWARD


def volume(model: ModelConfig, layout: Layout) -> Volume:
    """What the fullest stage's devices send; ring algorithms, (n - 1) / n of each buffer a pass."""
    tokens = layout.micro_batch_size * model.context / layout.cp
    layers, passes = model.depth / layout.pp, float(layout.micro_batches)
    stream = ACTIVATION_BYTES * tokens * model.width
    share = {name: (n - 1) / n for name, n in (("data", layout.shards), ("tensor", layout.tp), ("context", layout.cp))}
    reduces = 6 if layout.checkpointing == "full" else 4
    tensor = reduces * layers * passes * 2 * share["tensor"] * stream
    across = stream / (layout.tp if layout.sequence_parallel else 1)
    pipeline = 2 * across * passes * layout.virtual_stages if layout.pp > 1 else 0.0
    kv = ACTIVATION_BYTES * tokens * 2 * model.kv_heads * model.head_size / layout.tp
    context = 3 * kv * share["context"] * layout.cp * layers * passes
    return Volume(share["data"] * _data_bytes(model, layout), tensor, pipeline, context)


def _data_bytes(model: ModelConfig, layout: Layout) -> float:
    """Bytes of weights and gradients that pass through a device in a step, before the ring's (n - 1) / n."""
    scheme = layout.scheme
    parameters = stage_parameters(model, layout, 0)
    if "weights" in scheme.sharded:
        # Gathered in 16 bit for each forward and backward pass, gradients reduced after each.
        return parameters * (2 * ACTIVATION_BYTES + scheme.gradients) * layout.micro_batches
    gather = ACTIVATION_BYTES if "optimizer" in scheme.sharded else scheme.gradients
    return parameters * (scheme.gradients + gather)


def _seconds(model: ModelConfig, layout: Layout, device: Device) -> tuple[float, float]:
    """Seconds of the volumes that computation hides, and of those that it does not; what no bandwidth is stated for is not timed."""
    sent = volume(model, layout)
    within = {
        "tensor": layout.tp,
        "context": layout.tp * layout.cp,
        "data": layout.tp * layout.shards,
        "pipeline": layout.devices,
    }

    def time(name: str) -> float:
        bandwidth = device.link_bandwidth if within[name] <= device.node_devices else device.network_bandwidth
        return 0.0 if math.isnan(bandwidth) else float(getattr(sent, name)) / bandwidth

    return time("data") + time("context"), time("tensor") + time("pipeline")


def step_time(
    model: ModelConfig, layout: Layout, device: Device, arithmetic: Arithmetic = "bf16", efficiency: float | None = None
) -> StepTime:
    """Seconds and MFU of one step; products at `efficiency` (default: the middle EFFICIENCY), and the band at its ends."""
    flops = _model_flops(model) * layout.batch_size * model.context / layout.devices
    again, waits, peak = recompute_factor(model, layout), bubble(layout), device.peak(arithmetic)
    hidden, open_s = _seconds(model, layout, device)

    def seconds(share: float) -> tuple[float, float]:
        computing = flops * again / (peak * share)
        exposed = open_s + max(0.0, hidden - _hidden_share(layout) * computing)
        return (computing + exposed) / (1 - waits), exposed

    least, usual, most = EFFICIENCY[arithmetic]
    slow, middle, fast = seconds(least), seconds(efficiency or usual), seconds(most)
    low, mfu, high = (flops / (peak * time) for time, _ in (slow, middle, fast))
    return StepTime(mfu, low, high, middle[0], waits, middle[1], again, volume(model, layout))


def efficiency_of(model: ModelConfig, layout: Layout, device: Device, tokens_s: float, arithmetic: Arithmetic = "bf16") -> float:
    """The efficiency of products at which `step_time` reaches `tokens_s` tokens a second a device; NaN where none does, or any would."""
    flops = _model_flops(model) * layout.batch_size * model.context / layout.devices
    work = flops * recompute_factor(model, layout) / device.peak(arithmetic)
    hidden, open_s = _seconds(model, layout, device)
    busy = layout.batch_size * model.context / layout.devices / tokens_s * (1 - bubble(layout)) - open_s
    share = _hidden_share(layout)
    if hidden < share * busy * (1 - 1e-9):
        return work / busy
    # What cannot be hidden is part of the step; where all of it could be, communication alone sets the step's length.
    computing = (busy - hidden) / (1 - share) if share < 1 else math.nan
    return work / computing if computing > 0 else math.nan


__all__ = ["EFFICIENCY", "StepTime", "Volume", "bubble", "efficiency_of", "step_time", "volume"]
