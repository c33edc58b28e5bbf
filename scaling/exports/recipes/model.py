"""The model that train_fsdp.py trains: the transformer of the study, from run.json and plan.json. Needs torch alone. Replace it by yours.

train_fsdp.py calls these, which your model.py has to have too:

    build_model(folder, plan)        the model, on the meta device; parameters are named as plan.json's patterns say, buffers are none
    units(model)                     modules that are sharded one at a time, and recomputed one at a time: the blocks
    share(model, mesh)               tensor parallel over the processes of `mesh`; raise NotImplementedError if yours has none
    loss(model, tokens)              mean loss, nats per token, of (B, T + 1) tokens

Shape letters: B batch, T context, H heads, K key/value heads, D entries a head, W width.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from param_groups import match
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module


class RMSNorm(nn.Module):
    """x / RMS(x), times a gain when there is one."""

    weight: nn.Parameter | None

    def __init__(self, length: int, gain: bool) -> None:
        super().__init__()
        self.length = (length,)
        self.register_parameter("weight", nn.Parameter(torch.ones(length)) if gain else None)

    def forward(self, x: Tensor) -> Tensor:
        gain: Tensor | None = self.weight
        if isinstance(gain, DTensor):
            # Each process of a tensor-parallel group sees its own heads: their parts of the gradient are summed.
            gain = gain.to_local(grad_placements=[Partial()])
        return F.rms_norm(x, self.length, gain, eps=1e-6)


class Matrix(nn.Linear):
    """x W^T times the multiplier of its row in the plan."""

    multiplier = 1.0

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return times(super().forward(x), self.multiplier)


def times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier


@lru_cache(maxsize=8)
def rotary_tables(context: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and signed sin of the angles by which positions rotate pairs of entries, each (context, 1, head_dim)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angles = torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), frequencies)[:, None, :]
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: dict[str, Any], forward: dict[str, float]) -> None:
        super().__init__()
        width, head_dim = shape["width"], shape["head_dim"]
        self.heads, self.kv_heads, self.head_dim = shape["heads"], shape["kv_heads"], head_dim
        self.scale, self.unit, self.rope_base = forward["attention_scale"], forward["attention_output"], shape["rope_base"]
        self.query = Matrix(width, self.heads * head_dim)
        self.key = Matrix(width, self.kv_heads * head_dim)
        self.value = Matrix(width, self.kv_heads * head_dim)
        self.output = Matrix(self.heads * head_dim, width)
        self.query_norm = RMSNorm(head_dim, gain=True) if shape["qk_norm"] else nn.Identity()
        self.key_norm = RMSNorm(head_dim, gain=True) if shape["qk_norm"] else nn.Identity()

    def forward(self, x_BTW: Tensor) -> Tensor:
        batch, context, _ = x_BTW.shape
        q_BTHD = self.query_norm(self.query(x_BTW).view(batch, context, self.heads, self.head_dim))
        k_BTKD = self.key_norm(self.key(x_BTW).view(batch, context, self.kv_heads, self.head_dim))
        v_BKTD = self.value(x_BTW).view(batch, context, self.kv_heads, self.head_dim).transpose(1, 2)
        q_BHTD, k_BKTD = self.rotate(q_BTHD).transpose(1, 2), self.rotate(k_BTKD).transpose(1, 2)
        grouped = self.kv_heads != self.heads
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=self.scale, enable_gqa=grouped)
        out: Tensor = self.output(times(mixed_BHTD, self.unit).transpose(1, 2).reshape(batch, context, -1))
        return out

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = rotary_tables(x.shape[1], self.head_dim, self.rope_base, x.device)
        return x * cos.to(x.dtype) + x.roll(self.head_dim // 2, dims=-1) * sin.to(x.dtype)


class MLP(nn.Module):
    """Two matrices around a GELU, or three around a SwiGLU."""

    def __init__(self, shape: dict[str, Any], forward: dict[str, float]) -> None:
        super().__init__()
        self.unit = forward["mlp_inner"]
        self.up = Matrix(shape["width"], shape["mlp_width"])
        self.gate = Matrix(shape["width"], shape["mlp_width"]) if shape["activation"] == "swiglu" else None
        self.down = Matrix(shape["mlp_width"], shape["width"])

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(times(inner, self.unit))
        return out


class Block(nn.Module):
    """Attention and MLP, each read from a normed stream and added to it."""

    def __init__(self, shape: dict[str, Any], forward: dict[str, float]) -> None:
        super().__init__()
        self.attention_branch, self.mlp_branch = forward["attention_branch"], forward["mlp_branch"]
        self.attention_norm = RMSNorm(shape["width"], shape["norm_gain"])
        self.attention = Attention(shape, forward)
        self.mlp_norm = RMSNorm(shape["width"], shape["norm_gain"])
        self.mlp = MLP(shape, forward)

    def forward(self, x: Tensor) -> Tensor:
        x = x + times(self.attention(self.attention_norm(x)), self.attention_branch)
        return x + times(self.mlp(self.mlp_norm(x)), self.mlp_branch)


class Transformer(nn.Module):
    """Token ids (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, shape: dict[str, Any], forward: dict[str, float]) -> None:
        super().__init__()
        self.before, self.after = forward["embedding"], forward["readout"]
        self.embedding = nn.Embedding(shape["vocabulary"], shape["width"])
        self.blocks = nn.ModuleList(Block(shape, forward) for _ in range(shape["depth"]))
        self.final_norm = RMSNorm(shape["width"], shape["norm_gain"])
        tied = shape["tied_embeddings"]
        self.readout = None if tied else nn.Linear(shape["width"], shape["vocabulary"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = times(self.embedding(ids), self.before)
        for block in self.blocks:
            x = block(x)
        x = times(self.final_norm(x), self.after)
        return F.linear(x, self.embedding.weight) if self.readout is None else self.readout(x)


def build_model(folder: Path, plan: dict[str, Any]) -> nn.Module:
    """The run's model on the meta device: nothing is allocated before it is sharded."""
    shape = json.loads((folder / "run.json").read_text())["model"]
    with torch.device("meta"):
        model = Transformer(shape, plan["forward"])
    for name, _, row in match(model, plan):
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Matrix):
            owner.multiplier = row["multiplier"]
    return model


def units(model: nn.Module) -> list[nn.Module]:
    """Its blocks."""
    return list(model.get_submodule("blocks").children())


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def share(model: nn.Module, mesh: DeviceMesh) -> None:
    """Heads and inner width of every block over the processes of `mesh`; stream, embedding and readout stay whole on each.

    Raises ValueError where they do not divide.
    """
    size = mesh.size()
    for block in units(model):
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        if attention.heads % size or attention.kv_heads % size or mlp.up.out_features % size:
            what = f"{attention.heads} heads, {attention.kv_heads} key/value heads and an inner width of {mlp.up.out_features}"
            raise ValueError(f"--tp {size}: {what} do not all divide by {size}")
        whole, columns, rows = Replicate(), ColwiseParallel(), RowwiseParallel()
        inputs = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,), use_local_output=False)
        names = ("attention.query", "attention.key", "attention.value", "mlp.up", *(("mlp.gate",) if mlp.gate else ()))
        plan = {"attention": inputs, "mlp": inputs, "attention.output": rows, "mlp.down": rows}
        parallelize_module(block, mesh, plan | dict.fromkeys(names, columns))
        attention.heads //= size
        attention.kv_heads //= size
        for norm in (attention.query_norm, attention.key_norm):
            if isinstance(norm, RMSNorm) and norm.weight is not None:
                norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()], src_data_rank=None))
