"""How long a step takes under a layout: computing, communication volume, pipeline bubble, MFU with a band. Torch-free.

Owns StepTime. Model FLOP are scaling.accounting's (causal attention, no recomputation); what checkpointing makes again costs time and earns
no MFU. Computing is analysis.layout_work's; one constant is fitted, EFFICIENCY, to published runs (analysis.published_runs,
docs/planner.md). Volumes: ZeRO (1910.02054) section 7, Megatron-LM (2104.04473) section 3.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from analysis.hardware import Arithmetic, Device
from analysis.layout_experts import experts_of, model_flops
from analysis.layout_work import step_work
from analysis.memory_plan import ACTIVATION_BYTES, Layout, stage_layers, stage_parameters
from scaling.accounting import attention_flops_per_token, parameter_counts
from scaling.model_config import ModelConfig

EFFICIENCY = 0.71
"""Share of a device's best single product that the products of a step reach: the median of what published runs imply, source by source."""
BAND = 1.35
"""Factor either way within which a speed is expected; docs/planner.md counts how many published rows of left-out sources it holds."""
BACKWARD = 2 / 3
"""Share of a step's computation that is its backward pass, behind which gradients move; sharded weights move behind all of it."""


@dataclass(frozen=True)
class Volume:
    """Bytes that one device sends in a step, by what for. data: gradients and sharded states."""

    data: float
    tensor: float
    pipeline: float
    context: float
    expert: float

    def to_dict(self) -> dict[str, float]:
        return {f"{name}_bytes": size for name, size in asdict(self).items()}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and the MFU that follows; `low` and `high` MFU by BAND.

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


def bubble(layout: Layout) -> float:
    """Share of the step: (p - 1) / (v m + p - 1)."""
    waiting = layout.pp - 1
    return waiting / (layout.virtual_stages * layout.micro_batches + waiting)


def recompute_factor(model: ModelConfig, layout: Layout) -> float:
    """FLOP computed over model FLOP: a block's forward pass, a third of its FLOP, is made again under full checkpointing.

    selective-op makes half of the products again; selective the attention scores.
    """
    total, attention = model_flops(model), attention_flops_per_token(model)
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
    """What the devices of a stage with most layers send; ring algorithms, (n - 1) / n of each buffer a pass."""
    tokens = layout.micro_batch_size * model.context / layout.cp
    layers, passes = stage_layers(model.depth, layout, min(1, layout.pp - 1)), float(layout.micro_batches)
    stream = ACTIVATION_BYTES * tokens * model.width
    share = {name: (n - 1) / n for name, n in (("data", layout.shards), ("tensor", layout.tp), ("context", layout.cp))}
    reduces = 6 if layout.checkpointing == "full" else 4
    tensor = reduces * layers * passes * 2 * share["tensor"] * stream
    across = stream / (layout.tp if layout.sequence_parallel else 1)
    pipeline = 2 * across * passes * layout.virtual_stages if layout.pp > 1 else 0.0
    kv = ACTIVATION_BYTES * tokens * 2 * model.kv_heads * model.head_size / layout.tp
    context = 3 * kv * share["context"] * layout.cp * layers * passes
    # A token goes to its experts and comes back, in both passes; once more each when the forward pass is made again.
    moves = 6 if layout.checkpointing == "full" else 4
    expert = moves * experts_of(model)[1] * across * (layout.ep - 1) / layout.ep * layers * passes
    return Volume(share["data"] * _data_bytes(model, layout), tensor, pipeline, context, expert)


def _data_bytes(model: ModelConfig, layout: Layout) -> float:
    """Bytes of weights and gradients that pass through a device in a step, before the ring's (n - 1) / n."""
    scheme = layout.scheme
    parameters = stage_parameters(model, layout, 0)
    if "weights" in scheme.sharded:
        # Gathered in 16 bit for each forward and backward pass, gradients reduced after each.
        return parameters * (2 * ACTIVATION_BYTES + scheme.gradients) * layout.micro_batches
    gather = ACTIVATION_BYTES if "optimizer" in scheme.sharded else scheme.gradients
    return parameters * (scheme.gradients + gather)


def _pooled(device: Device, layout: Layout) -> float:
    """Bytes/s of one device in a data-parallel ring over several nodes: it leaves a node by the adapters of all its ranks in it."""
    across = device.network_bandwidth * max(1, device.node_devices // layout.tp)
    return min(device.link_bandwidth, across) if device.link_bandwidth > 0 else across


def communication_s(model: ModelConfig, layout: Layout, device: Device) -> tuple[float, float]:
    """Seconds of the volumes that computation hides, and of those that it does not; what no bandwidth is stated for is not timed."""
    sent = volume(model, layout)
    within = {
        "tensor": layout.tp,
        "context": layout.tp * layout.cp,
        "data": layout.tp * layout.shards,
        "pipeline": layout.devices,
        "expert": layout.tp * layout.ep,
    }

    def time(name: str) -> float:
        across = _pooled(device, layout) if name == "data" else device.network_bandwidth
        bandwidth = device.link_bandwidth if within[name] <= device.node_devices else across
        return 0.0 if math.isnan(bandwidth) else float(getattr(sent, name)) / bandwidth

    return time("data") + time("context"), time("tensor") + time("pipeline") + time("expert")


def step_time(
    model: ModelConfig, layout: Layout, device: Device, arithmetic: Arithmetic = "bf16", efficiency: float = EFFICIENCY
) -> StepTime:
    """Seconds and MFU of one step; products at `efficiency` of the device's best one."""
    work, waits = step_work(model, layout, device, arithmetic), bubble(layout)
    hidden, open_s = communication_s(model, layout, device)
    computing = work.computing_s(efficiency)
    exposed = open_s + max(0.0, hidden - _hidden_share(layout) * computing)
    step_s = (computing + exposed) / (1 - waits) + work.update_s
    mfu = model_flops(model) * layout.batch_size * model.context / layout.devices / (device.peak(arithmetic) * step_s)
    again = recompute_factor(model, layout)
    return StepTime(mfu, mfu / BAND, mfu * BAND, step_s, waits, exposed, again, volume(model, layout))


def tokens_s(
    model: ModelConfig, layout: Layout, device: Device, arithmetic: Arithmetic = "bf16", efficiency: float = EFFICIENCY
) -> float:
    """Tokens a second of one device."""
    return layout.batch_size * model.context / layout.devices / step_time(model, layout, device, arithmetic, efficiency).step_s


def efficiency_of(model: ModelConfig, layout: Layout, device: Device, speed: float, arithmetic: Arithmetic = "bf16") -> float:
    """The efficiency of products at which a device reaches `speed` tokens a second; NaN where none from 0.05 to 20 does.

    Where communication sets the step's length, any would; the smallest is returned.
    """
    low, high = math.log(0.05), math.log(20.0)

    def reached(share: float) -> float:
        return tokens_s(model, layout, device, arithmetic, math.exp(share))

    if not reached(low) <= speed <= reached(high):
        return math.nan
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) >= speed else (middle, high)
    return math.exp(high)


__all__ = [
    "BAND",
    "EFFICIENCY",
    "StepTime",
    "Volume",
    "bubble",
    "communication_s",
    "efficiency_of",
    "step_time",
    "tokens_s",
    "volume",
]
