"""The decoder transformer: pre-norm RMSNorm, rotary positions, GELU or SwiGLU, grouped-query attention, optional QK-norm.

Owns the forward pass and the initialization. Every forward multiplier and init std comes from `scaling.parametrization`;
tensor names and shapes are those of `scaling.shapes`, which is checked when a model is built.
Shape letters: B batch, T context, H heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaling.config import RunConfig
from scaling.matmul import linear
from scaling.model_config import ModelConfig
from scaling.parametrization import ForwardRules, TensorRule, forward_rules, tensor_rules
from scaling.shapes import transformer_tensors


class RMSNorm(nn.Module):
    """x / RMS(x), times a gain when there is one."""

    weight: nn.Parameter | None

    def __init__(self, length: int, gain: bool) -> None:
        super().__init__()
        self.length = (length,)
        self.register_parameter("weight", nn.Parameter(torch.ones(length)) if gain else None)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.length, self.weight, eps=1e-6)


class Matrix(nn.Linear):
    """x W^T times the multiplier of its rule."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)
        self.multiplier = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return times(linear(x, self.weight), self.multiplier)


def times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, model: ModelConfig, rules: ForwardRules) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = model.heads, model.kv_heads, model.head_size
        self.scale, self.unit = rules.attention_scale, rules.attention_output
        self.query = Matrix(model.width, model.heads * model.head_size)
        self.key = Matrix(model.width, model.kv_heads * model.head_size)
        self.value = Matrix(model.width, model.kv_heads * model.head_size)
        self.output = Matrix(model.heads * model.head_size, model.width)
        self.query_norm = RMSNorm(model.head_size, gain=True) if model.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(model.head_size, gain=True) if model.qk_norm else nn.Identity()

    def forward(self, x_BTW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, context, _ = x_BTW.shape
        q_BTHD = self.query(x_BTW).view(batch, context, self.heads, self.head_dim)
        k_BTKD = self.key(x_BTW).view(batch, context, self.kv_heads, self.head_dim)
        v_BKTD = self.value(x_BTW).view(batch, context, self.kv_heads, self.head_dim).transpose(1, 2)
        q_BHTD = rotate(self.query_norm(q_BTHD), cos, sin).transpose(1, 2)
        k_BKTD = rotate(self.key_norm(k_BTKD), cos, sin).transpose(1, 2)
        grouped = self.kv_heads != self.heads
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=self.scale, enable_gqa=grouped)
        out: Tensor = self.output(times(mixed_BHTD, self.unit).transpose(1, 2).reshape(batch, context, -1))
        return out


def rotary_tables(context: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and signed sin of the rotary angles (Su et al. 2104.09864), each (context, 1, head_dim)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)[:, None, :]
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) of (B, T, heads, head_dim) by their position's angles."""
    context, half = x.shape[1], x.shape[-1] // 2
    return x * cos[:context].to(x.dtype) + x.roll(half, dims=-1) * sin[:context].to(x.dtype)


class MLP(nn.Module):
    """Two matrices around a GELU, or three around a SwiGLU (Shazeer 2002.05202)."""

    def __init__(self, model: ModelConfig, rules: ForwardRules) -> None:
        super().__init__()
        self.unit = rules.mlp_inner
        self.up = Matrix(model.width, model.mlp_width)
        self.gate = Matrix(model.width, model.mlp_width) if model.activation == "swiglu" else None
        self.down = Matrix(model.mlp_width, model.width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(times(inner, self.unit))
        return out


class Block(nn.Module):
    """x + a * attention(norm(x)), then x + m * mlp(norm(x)), a and m being the branches' factors."""

    def __init__(self, model: ModelConfig, rules: ForwardRules) -> None:
        super().__init__()
        self.attention_branch, self.mlp_branch = rules.attention_branch, rules.mlp_branch
        self.attention_norm = RMSNorm(model.width, model.norm_gain)
        self.attention = Attention(model, rules)
        self.mlp_norm = RMSNorm(model.width, model.norm_gain)
        self.mlp = MLP(model, rules)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + times(self.attention(self.attention_norm(x), cos, sin), self.attention_branch)
        return x + times(self.mlp(self.mlp_norm(x)), self.mlp_branch)


class Transformer(nn.Module):
    """Token ids (B, T) to logits (B, T, vocabulary); parameters are uninitialized until `initialize`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelConfig, rules: ForwardRules) -> None:
        super().__init__()
        self.rules = rules
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.blocks = nn.ModuleList(Block(model, rules) for _ in range(model.depth))
        self.final_norm = RMSNorm(model.width, model.norm_gain)
        self.readout = None if model.tied_embeddings else nn.Linear(model.width, model.vocabulary, bias=False)
        cos, sin = rotary_tables(model.context, model.head_size, model.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = times(self.embedding(ids), self.rules.embedding)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = times(self.final_norm(x), self.rules.readout)
        weight = self.embedding.weight if self.readout is None else self.readout.weight
        return linear(x, weight)

    def loss(self, tokens: Tensor, reduction: str = "mean") -> Tensor:
        """Next-token cross-entropy in nats of (B, T + 1) tokens."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction=reduction)


def build_model(run: RunConfig) -> Transformer:
    """The run's model on CPU, initialized from `run.training.seed`."""
    model = outline(run)
    materialize(model, run)
    return model


def outline(run: RunConfig) -> Transformer:
    """The run's model on torch's meta device: its tensors without their values."""
    with torch.device("meta"):
        model = Transformer(run.model, forward_rules(run))
    expected = {spec.name: spec.shape for spec in transformer_tensors(run.model)}
    actual = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert actual == expected, f"scaling.shapes and scaling.model disagree: {expected.items() ^ actual.items()}"
    return model


Draw = Callable[[Tensor, TensorRule, int], None]
"""Puts a tensor's first values into it, by its rule and the seed of its own generator."""


def draw(tensor: Tensor, rule: TensorRule, seed: int) -> None:
    """Fill `tensor`, whole and on CPU, as its rule says: N(0, init_std), or ones for gains."""
    if math.isnan(rule.init_std):
        tensor.fill_(1.0)
    elif rule.init_std:
        tensor.normal_(0.0, rule.init_std, generator=torch.Generator().manual_seed(seed))
    else:
        tensor.zero_()


def materialize(model: Transformer, run: RunConfig, device: torch.device | str = "cpu", draw: Draw = draw) -> None:
    """Give `model`, the run's or a part of it on torch's meta device, memory on `device`, its multipliers and its values."""
    model.to_empty(device=device)
    cos, sin = rotary_tables(run.model.context, run.model.head_size, run.model.rope_base)
    model.cos, model.sin = cos.to(device), sin.to(device)
    modules = dict(model.named_modules())
    for rule in tensor_rules(run):
        matrix = modules.get(rule.name.removesuffix(".weight"))
        if rule.role == "hidden" and matrix is not None:
            assert isinstance(matrix, Matrix), rule.name
            matrix.multiplier = rule.multiplier
    initialize(model, run, draw)


@torch.no_grad()
def initialize(model: Transformer, run: RunConfig, draw: Draw = draw) -> None:
    """Fill every parameter, of the run's model or of a part of it, as the rules say.

    Each tensor draws from a generator of its own, seeded by the run's seed and the tensor's place in the list, so that the
    tensors before it do not change it.
    """
    parameters = dict(model.named_parameters())
    for place, rule in enumerate(tensor_rules(run)):
        if rule.name in parameters:
            draw(parameters[rule.name], rule, run.training.seed * 1_000_003 + place)
