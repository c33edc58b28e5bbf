"""Bytes that a training run needs on its fullest device, term by term. Torch-free.

Owns Layout (how a run is spread over devices), the sharding schemes, and `device_memory`. Formulas: ZeRO (Rajbhandari et al. 1910.02054)
for model states, Korthikanti et al. (2205.05198) Table 2 for activations, counted tensor by tensor so that grouped queries and SwiGLU are
in them. All sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from analysis.hardware import GIB
from analysis.layout_experts import every_token_mlp, expert_parameters, experts_of, shared_tensors
from scaling.model_config import ModelConfig
from scaling.shapes import TensorSpec, transformer_tensors

Checkpointing = Literal["none", "selective", "selective-op", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "selective-op", "full")
"""selective: attention scores are made again (Korthikanti et al.), which is nothing beside flash attention; selective-op: every second
matrix product is made again (torchtitan); full: a layer's input alone is kept."""
OVERHEAD = ((1.0 * GIB, 1.0), (3.0 * GIB, 1.1))
"""(bytes, factor), least and most, of what no formula counts: communication buffers, workspaces, the allocator's gaps."""
ACTIVATION_BYTES = 2
TWO_MOMENTS = (8, 8)
"""Bytes a parameter of Adam's two fp32 moments, which every scheme's figure for the optimizer holds."""


@dataclass(frozen=True)
class Scheme:
    """Bytes a parameter of each term, which terms are split over the data-parallel ranks, and what its engine keeps beside them.

    unit_bytes: of each parameter of the largest unit that is whole for a moment; logit_bytes: of each logit; gate_tensors: tensors of MLP
    width that SwiGLU keeps for its backward pass. saves_gathered: whether inputs of column-parallel products are kept as they are gathered
    along the sequence, as torch's tensor parallelism does; Megatron gathers them again.
    """

    weights: int
    gradients: int
    optimizer: int
    sharded: frozenset[str]
    unit_bytes: int
    logit_bytes: int
    gate_tensors: int
    saves_gathered: bool
    source: str


def _scheme(per_param: tuple[int, int, int], sharded: str, unit: int, logit: int, gate: int, source: str) -> Scheme:
    return Scheme(*per_param, frozenset(sharded.split()), unit, logit, gate, not source.startswith("Megatron"), source)


_ALL = "weights gradients optimizer"
_ZERO = "ZeRO 1910.02054, section 3: 16-bit weights and gradients, fp32 copy and two moments"
_MEGATRON = "Megatron-LM: 16-bit weights, fp32 gradients, fp32 copy and two moments"
SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "zero0": _scheme((2, 2, 12), "", 0, 10, 4, _ZERO),
        "zero1": _scheme((2, 2, 12), "optimizer", 0, 10, 4, _ZERO),
        "zero2": _scheme((2, 2, 12), "gradients optimizer", 0, 10, 4, _ZERO),
        "zero3": _scheme((2, 2, 12), _ALL, 4, 10, 4, f"{_ZERO}; a whole layer's weights and gradients"),
        "fsdp": _scheme(
            (4, 4, 8), _ALL, 10, 10, 4, "torch FSDP2: fp32 weights, gradients, moments; two whole 16-bit units, a gradient"
        ),
        "megatron": _scheme((2, 4, 12), "", 0, 6, 3, _MEGATRON),
        "megatron-dist": _scheme((2, 4, 12), "optimizer", 0, 6, 3, f"{_MEGATRON}, with its distributed optimizer"),
        "megatron-fsdp": _scheme((2, 4, 12), _ALL, 8, 6, 3, f"{_MEGATRON}, sharding optim_grads_params"),
    }
)
"""By the name that is typed. zero0 to zero3 are DeepSpeed's stages. Logits: 16-bit, fp32 log-probabilities and their fp32 gradient, which
Megatron's fused loss does not keep."""


@dataclass(frozen=True)
class Layout:
    """How one run is spread. devices = dp * tp * pp * cp; context parallel ranks share in splitting the optimizer's states.

    ep splits experts over ranks of dp * cp, and is no factor of its own.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    micro_batch_size: int = 1
    """Sequences a forward pass, of one data-parallel rank."""
    batch_size: int = 1
    """Sequences a step, all ranks together."""
    virtual_stages: int = 1
    """Model parts a pipeline stage (interleaved 1F1B); 1 is plain 1F1B."""
    sharding: str = "megatron-dist"
    checkpointing: Checkpointing = "none"
    sequence_parallel: bool = True
    """Whether what tensor parallel ranks would all hold is split along the sequence; no effect at tp 1."""
    flash_attention: bool = True
    dropout: bool = False
    """Whether dropout masks are kept; the published GPT rows have them."""
    ep: int = 1
    """Expert parallel: ranks of dp * cp over which the experts of a block are split."""
    fused: bool = True
    """Whether norms, rotary positions and gates are a kernel each, by the engine or by torch.compile."""
    moment_bytes: tuple[int, int] = TWO_MOMENTS
    """What the optimizer keeps of a parameter beside its fp32 copy: of a block's matrices, and of all else."""

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shards(self) -> int:
        """Ranks over which sharded states are split."""
        return self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Forward passes of a rank in one step."""
        return self.batch_size // (self.micro_batch_size * self.dp)

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.sharding]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"devices": self.devices, "micro_batches": self.micro_batches}

    def __str__(self) -> str:
        parts = [f"{name.upper()} {getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        parts += [f"{self.virtual_stages} parts a stage"] * (self.virtual_stages > 1)
        spread = f"{' '.join(parts) or 'one device'}, micro-batch {self.micro_batch_size}"
        return f"{spread}, {self.sharding}, checkpointing {self.checkpointing}"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device. stage: which pipeline stage that is, from 0. parameters: on that device before sharding."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    unsharded: float
    stage: int
    parameters: float

    @property
    def terms(self) -> dict[str, float]:
        names = ("weights", "gradients", "optimizer", "activations", "logits", "unsharded")
        return {name: getattr(self, name) for name in names}

    @property
    def counted(self) -> float:
        """Sum of the terms, without overhead."""
        return sum(self.terms.values())

    @property
    def band(self) -> tuple[float, float]:
        """With the least and the most overhead."""
        low, high = (extra + factor * self.counted for extra, factor in OVERHEAD)
        return low, high

    @property
    def largest(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])

    def to_dict(self) -> dict[str, Any]:
        sizes = {f"{name}_bytes": size for name, size in self.terms.items()}
        return sizes | {"counted_bytes": self.counted, "with_overhead_bytes": self.band, "stage": self.stage}


def device_memory(model: ModelConfig, layout: Layout) -> DeviceMemory:
    """Memory of the fullest pipeline stage: the first holds most activations, the last the logits, the second no end and most layers."""
    stages = {0, min(1, layout.pp - 1), layout.pp - 1}
    return max((stage_memory(model, layout, stage) for stage in sorted(stages)), key=lambda memory: memory.counted)


def stage_memory(model: ModelConfig, layout: Layout, stage: int) -> DeviceMemory:
    """Memory of a device of pipeline stage `stage`."""
    scheme, parameters = layout.scheme, stage_parameters(model, layout, stage)

    def states(name: str) -> float:
        held = sharded_parameters(model, layout, stage) if name in scheme.sharded else parameters
        fewer = sum(TWO_MOMENTS) / 2 - moment_bytes(model, layout, stage) if name == "optimizer" else 0.0
        return held * (float(getattr(scheme, name)) - fewer)

    # A rank that shares its weights with nobody has no whole copy to gather.
    unit = scheme.unit_bytes * largest_unit(model, layout, stage) if layout.shards > 1 else 0.0
    last = stage == layout.pp - 1
    logits = _logits(model, layout) if last else 0.0
    activations = stage_activations(model, layout, stage)
    weights, gradients, optimizer = map(states, ("weights", "gradients", "optimizer"))
    return DeviceMemory(weights, gradients, optimizer, activations, logits, unit, stage, parameters)


def _logits(model: ModelConfig, layout: Layout) -> float:
    """Bytes of one micro-batch's logits, and of the readout's input where it is kept whole beside its split."""
    gathered = layout.scheme.saves_gathered and layout.sequence_parallel
    whole = ACTIVATION_BYTES * model.width * (1 - 1 / layout.tp) if gathered else 0.0
    return _tokens(model, layout) * (layout.scheme.logit_bytes * model.vocabulary / layout.tp + whole)


def _tokens(model: ModelConfig, layout: Layout) -> float:
    """Of one micro-batch, on one device."""
    return layout.micro_batch_size * model.context / layout.cp


def _on_device(tensors: Sequence[TensorSpec], tp: int) -> float:
    """Parameters; gains are whole on every tensor-parallel rank."""
    return sum(spec.size / tp if len(spec.shape) > 1 else spec.size for spec in tensors)


@lru_cache(maxsize=64)
def _parts(model: ModelConfig) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec], Sequence[TensorSpec]]:
    """Tensors of a block (experts are no tensors here), of the embedding, and of final norm and readout."""
    tensors = [spec for spec in transformer_tensors(model.model_copy(update={"depth": 1})) if not spec.name.startswith("blocks.")]
    return shared_tensors(model), tensors[:1], tensors[1:]


def _ends(model: ModelConfig, layout: Layout, stage: int) -> list[Sequence[TensorSpec]]:
    """What a stage holds besides blocks, a list each: the embedding on the first, final norm and readout on the last."""
    _, embedding, rest = _parts(model)
    first, last = stage == 0, stage == layout.pp - 1
    # A tied readout on another stage than the embedding is a copy of it.
    tied_copy = embedding if model.tied_embeddings and last and not first else ()
    return [group for group in (embedding if first else (), [*rest, *tied_copy] if last else ()) if group]


def part_layers(depth: int, parts: int) -> list[int]:
    """Layers of each pipeline part, in order. Where they do not divide, embedding and readout count as a layer each, and what is left
    goes to the first parts: torchtitan's split, and Llama 3's (126 layers on 16 stages: 7, 8, ..., 8, 7)."""
    if depth % parts == 0:
        return [depth // parts] * parts
    each, more = divmod(depth + 2, parts)
    sizes = [each + (part < more) for part in range(parts)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return sizes


@lru_cache(maxsize=4096)
def _stage_layers(depth: int, pp: int, virtual_stages: int, stage: int) -> int:
    return sum(part_layers(depth, pp * virtual_stages)[stage::pp])


def stage_layers(depth: int, layout: Layout, stage: int) -> int:
    """Layers of a pipeline stage, of all its parts."""
    return _stage_layers(depth, layout.pp, layout.virtual_stages, stage)


def _experts_held(model: ModelConfig, layout: Layout) -> float:
    """Parameters of one block's experts on one device, before sharding."""
    return expert_parameters(model) / layout.ep / layout.tp


def stage_parameters(model: ModelConfig, layout: Layout, stage: int) -> float:
    """Parameters on one device of the stage, before sharding over data-parallel ranks."""
    block = _on_device(_parts(model)[0], layout.tp) + _experts_held(model, layout)
    blocks = stage_layers(model.depth, layout, stage) * block
    return blocks + sum(_on_device(group, layout.tp) for group in _ends(model, layout, stage))


def moment_bytes(model: ModelConfig, layout: Layout, stage: int) -> float:
    """Bytes a parameter that the stage's optimizer keeps beside its fp32 copy, the mean over its parameters."""
    matrices, others = layout.moment_bytes
    if matrices == others:
        return float(matrices)
    block = _on_device([spec for spec in _parts(model)[0] if len(spec.shape) > 1], layout.tp) + _experts_held(model, layout)
    share = stage_layers(model.depth, layout, stage) * block / stage_parameters(model, layout, stage)
    return share * matrices + (1 - share) * others


def sharded_parameters(model: ModelConfig, layout: Layout, stage: int) -> float:
    """Parameters on one device of a state that is split over all ranks that hold the same: ep of them hold other experts."""
    experts = stage_layers(model.depth, layout, stage) * _experts_held(model, layout)
    return (stage_parameters(model, layout, stage) - experts) / layout.shards + experts * layout.ep / layout.shards


def largest_unit(model: ModelConfig, layout: Layout, stage: int) -> float:
    """Parameters of the largest part that is gathered at once: a block, the embedding, or norm and readout."""
    block = _on_device(_parts(model)[0], layout.tp) + _experts_held(model, layout)
    return max(block, *(_on_device(group, layout.tp) for group in _ends(model, layout, stage)), 0.0)


def layer_activations(model: ModelConfig, layout: Layout, checkpointing: Checkpointing | None = None) -> float:
    """Bytes that one block keeps of one micro-batch for its backward pass, on one device.

    With GELU, as many key heads as query heads and dropout this is Korthikanti's s b h (34 + 5 a s / h), (10 + 24/t + ...) under tensor
    parallel, and all of it over t with sequence parallel. With experts, every copy of a token that is sent to one is kept, and what the
    expert makes of it.
    """
    kind = checkpointing or layout.checkpointing
    _, top_k, expert_width = experts_of(model)
    width, kv_width, mlp = model.width, model.kv_heads * model.head_size, every_token_mlp(model) + top_k * expert_width
    if kind == "full":
        whole, split = float(width), 0.0
    elif kind == "selective-op":
        # The layer's input; outputs of query, value, first MLP and last MLP product, and of attention.
        whole, split = 2.0 * width, 2.0 * width + kv_width + mlp + top_k * width
    else:
        # Inputs of two norms, of the query, key, value product and of the MLP; two byte-wide masks.
        whole = 4.0 * width + (width if layout.dropout else 0.0)
        split = 2.0 * width + 2.0 * kv_width + mlp * (layout.scheme.gate_tensors if model.activation == "swiglu" else 2)
        split += 2.0 * top_k * width
        if layout.scheme.saves_gathered and layout.sequence_parallel:
            split += 2.0 * width * (layout.tp - 1)
    scores = 0.0
    if kind == "none" and not layout.flash_attention:
        scores = model.heads * model.context * (5 if layout.dropout else 4) / layout.tp
    whole_split = layout.tp if layout.sequence_parallel else 1
    return _tokens(model, layout) * (ACTIVATION_BYTES * (whole / whole_split + split / layout.tp) + scores)


def layers_in_flight(depth: int, layout: Layout, stage: int) -> float:
    """Layers whose activations a device of the stage holds at once, of every micro-batch that is under way (1F1B, interleaved or not)."""
    behind, parts = layout.pp - 1 - stage, layout.virtual_stages
    if parts == 1:
        chunks = min(layout.micro_batches, behind + 1)
    else:
        chunks = min(layout.micro_batches * parts, 2 * behind + (parts - 1) * layout.pp + 1)
    return chunks * stage_layers(depth, layout, stage) / parts


def stage_activations(model: ModelConfig, layout: Layout, stage: int) -> float:
    """Bytes of all layers in flight; under checkpointing, also of the one layer whose forward pass is being made again."""
    kept = layers_in_flight(model.depth, layout, stage) * layer_activations(model, layout)
    again = layer_activations(model, layout, "none") if layout.checkpointing in ("selective-op", "full") else 0.0
    return kept + again


def gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if math.isfinite(size) else "unknown"
