"""Parameters, tokens and FLOPs of a run, each convention by its name. Torch-free; all numbers are Python floats or ints.

FLOPs are counted as floats: 6 * N * D overflows 64-bit integers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from scaling.config import RunConfig
from scaling.model_config import ModelConfig
from scaling.shapes import transformer_tensors


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts under every convention in use; they are not interchangeable in fits.

    total: each tensor once (a tied readout is not counted twice); non_embedding: without embedding and readout (Kaplan et al.
    2001.08361); matmul: tensors that multiply activations, the readout included, tied or not (Hoffmann et al. 2203.15556 count
    their FLOPs), the embedding's look-up excluded.
    """

    total: int
    embedding: int
    readout: int
    non_embedding: int
    matmul: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Counts from the model's own list of tensors."""
    by_role: dict[str, int] = {}
    for spec in transformer_tensors(model):
        by_role[spec.role] = by_role.get(spec.role, 0) + spec.size
    total, embedding, readout = sum(by_role.values()), by_role["embedding"], by_role.get("readout", 0)
    matmul = by_role["hidden"] + (embedding if model.tied_embeddings else readout)
    return ParameterCounts(total, embedding, readout, total - embedding - readout, matmul)


def attention_flops_per_token(model: ModelConfig) -> float:
    """Training FLOPs a token of attention scores and their application under a causal mask: 6 * depth * width * context.

    They cost 2 * 2 * context * width a layer forward when every key is seen, half of it under a causal mask, and three times that with
    the backward pass. Publications that do not halve count twice this.
    """
    return 6.0 * model.depth * model.heads * model.head_size * model.context


def flops_per_token(model: ModelConfig) -> float:
    """Training FLOPs a token: 6 per matmul parameter, and causal attention. Embedding look-ups, norms and softmax are left out."""
    return 6.0 * parameter_counts(model).matmul + attention_flops_per_token(model)


def run_flops(run: RunConfig) -> float:
    """Training FLOPs of the whole run, validation excluded."""
    return flops_per_token(run.model) * float(run.tokens)
