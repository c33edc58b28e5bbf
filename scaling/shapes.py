"""Every tensor of the transformer: name, shape, role, fans. Torch-free.

Owns the list that the rules, `explain`, parameter counts and exporters read; `scaling.model` builds exactly these tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scaling.model_config import ModelConfig

Role = Literal["embedding", "hidden", "block_gain", "qk_gain", "final_gain", "readout"]


@dataclass(frozen=True)
class TensorSpec:
    """One trainable tensor.

    fan_in and fan_out follow the map from input to output whatever the memory layout; for an embedding fan_in is the
    vocabulary, for a gain both are its length. block_output: it writes to the residual stream.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    fan_in: int
    fan_out: int
    block_output: bool = False

    @property
    def size(self) -> int:
        total = 1
        for length in self.shape:
            total *= length
        return total


def _matrix(name: str, fan_in: int, fan_out: int, *, block_output: bool = False) -> TensorSpec:
    return TensorSpec(name, (fan_out, fan_in), "hidden", fan_in, fan_out, block_output)


def _gain(name: str, length: int, role: Role) -> TensorSpec:
    return TensorSpec(name, (length,), role, length, length)


def block_tensors(model: ModelConfig, layer: int) -> list[TensorSpec]:
    """Tensors of one block, named as in `scaling.model.Transformer`."""
    prefix, width, kv_width = f"blocks.{layer}.", model.width, model.kv_heads * model.head_size
    tensors = [
        _matrix(f"{prefix}attention.query.weight", width, width),
        _matrix(f"{prefix}attention.key.weight", width, kv_width),
        _matrix(f"{prefix}attention.value.weight", width, kv_width),
        _matrix(f"{prefix}attention.output.weight", width, width, block_output=True),
        _matrix(f"{prefix}mlp.up.weight", width, model.mlp_width),
        _matrix(f"{prefix}mlp.down.weight", model.mlp_width, width, block_output=True),
    ]
    if model.activation == "swiglu":
        tensors.insert(5, _matrix(f"{prefix}mlp.gate.weight", width, model.mlp_width))
    if model.qk_norm:
        tensors += [_gain(f"{prefix}attention.{part}_norm.weight", model.head_size, "qk_gain") for part in ("query", "key")]
    if model.norm_gain:
        tensors += [_gain(f"{prefix}{part}_norm.weight", width, "block_gain") for part in ("attention", "mlp")]
    return tensors


def transformer_tensors(model: ModelConfig) -> list[TensorSpec]:
    """All trainable tensors; a tied readout is the embedding and is not listed twice."""
    vocabulary, width = model.vocabulary, model.width
    tensors = [TensorSpec("embedding.weight", (vocabulary, width), "embedding", vocabulary, width)]
    for layer in range(model.depth):
        tensors += block_tensors(model, layer)
    if model.norm_gain:
        tensors.append(_gain("final_norm.weight", width, "final_gain"))
    if not model.tied_embeddings:
        tensors.append(TensorSpec("readout.weight", (vocabulary, width), "readout", width, vocabulary))
    return tensors
