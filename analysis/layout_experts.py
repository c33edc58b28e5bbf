"""Mixture-of-experts models as the planner sees them: shapes, parameters in all and active, FLOP a token. Torch-free.

Owns ExpertModel. Nothing here is trained: the package's own model is dense, and a study of it says nothing about experts. Counts follow
scaling.accounting's conventions; a dense model is counted by that module itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Self

from pydantic import Field, model_validator

from scaling.accounting import attention_flops_per_token, parameter_counts
from scaling.config_base import Positive, fault_at
from scaling.model_config import ModelConfig
from scaling.shapes import TensorSpec, block_tensors


class ExpertModel(ModelConfig):
    """A decoder transformer whose MLPs are experts, in every block. mlp_ratio is not used."""

    experts: Positive
    """Experts of a block."""
    top_k: Positive
    """Experts that a token passes through; balanced routing and no dropped tokens are assumed."""
    expert_width: Positive
    """MLP width of one expert."""
    shared_width: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] = 0
    """MLP width of what every token passes through beside its experts."""

    @model_validator(mode="after")
    def _tokens_find_experts(self) -> Self:
        if self.top_k > self.experts:
            raise fault_at("top_k", f"top_k {self.top_k} is more than the {self.experts} experts")
        return self


def with_experts(model: ModelConfig, experts: int, top_k: int, expert_width: int, shared_width: int = 0) -> ExpertModel:
    """The model with experts in place of its MLPs. Raises pydantic.ValidationError where the sizes do not go together."""
    fields = {name: getattr(model, name) for name in ModelConfig.model_fields}
    return ExpertModel(**fields, experts=experts, top_k=top_k, expert_width=expert_width, shared_width=shared_width)


def mlp_matrices(model: ModelConfig) -> int:
    """Matrices of one MLP: up and down, and SwiGLU's gate."""
    return 3 if model.activation == "swiglu" else 2


def every_token_mlp(model: ModelConfig) -> int:
    """MLP width that every token passes through: of a dense model its MLP."""
    return model.shared_width if isinstance(model, ExpertModel) else model.mlp_width


def experts_of(model: ModelConfig) -> tuple[int, int, int]:
    """Experts, top_k and expert width; zeros for a dense model."""
    return (model.experts, model.top_k, model.expert_width) if isinstance(model, ExpertModel) else (0, 0, 0)


def expert_parameters(model: ModelConfig) -> int:
    """Parameters of one block that are in experts; the router is not."""
    experts, _, width = experts_of(model)
    return experts * mlp_matrices(model) * model.width * width


def shared_tensors(model: ModelConfig) -> list[TensorSpec]:
    """Tensors of one block that every token passes through."""
    if not isinstance(model, ExpertModel):
        return block_tensors(model, 0)
    kept = [spec for spec in block_tensors(model, 0) if ".mlp." not in spec.name]
    width, shared = model.width, model.shared_width
    kept.append(TensorSpec("blocks.0.router.weight", (model.experts, width), "hidden", width, model.experts))
    if shared:
        pairs = [("up", width, shared), ("gate", width, shared), ("down", shared, width)]
        kept += [
            TensorSpec(f"blocks.0.shared.{name}.weight", (fan_out, fan_in), "hidden", fan_in, fan_out)
            for name, fan_in, fan_out in pairs
            if name != "gate" or model.activation == "swiglu"
        ]
    return kept


@lru_cache(maxsize=64)
def planned_parameters(model: ModelConfig) -> dict[str, int]:
    """scaling.accounting's counts; of a model with experts also `active`, what one token passes through, embedding included."""
    counts = parameter_counts(model.model_copy(update={"depth": 1})).to_dict()
    dense = sum(spec.size for spec in block_tensors(model, 0))
    if not isinstance(model, ExpertModel):
        return parameter_counts(model).to_dict()
    shared = shared_tensors(model)
    matrices = sum(spec.size for spec in shared if len(spec.shape) > 1)
    every, routed = sum(spec.size for spec in shared), expert_parameters(model)
    used = routed * model.top_k // model.experts
    outside = counts["total"] - dense
    ends = counts["matmul"] - sum(spec.size for spec in block_tensors(model, 0) if len(spec.shape) > 1)
    return {
        "total": outside + model.depth * (every + routed),
        "embedding": counts["embedding"],
        "readout": counts["readout"],
        "non_embedding": outside + model.depth * (every + routed) - counts["embedding"] - counts["readout"],
        "matmul": ends + model.depth * (matrices + routed),
        "active": outside + model.depth * (every + used),
        "active_matmul": ends + model.depth * (matrices + used),
    }


@lru_cache(maxsize=64)
def model_flops(model: ModelConfig) -> float:
    """Training FLOP a token: 6 a matmul parameter that it passes through, and causal attention."""
    counts = planned_parameters(model)
    return 6.0 * counts.get("active_matmul", counts["matmul"]) + attention_flops_per_token(model)
