"""A layout put on the model: tensor and sequence parallel by DTensor, activation checkpointing, FSDP2 around it, and what they sum.

Owns the building of a rank's part, the changes to the transformer and the global gradient norm over sharded tensors. Names, shapes (as a
DTensor shows them) and hence the rules' groups stay those of one process. What is sharded is sharded by torch.

Residual stream, embedding and readout: whole on every rank of a tensor-parallel group, the stream sharded over the context under sp.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

from scaling.config import RunConfig
from scaling.model import Block, RMSNorm, Transformer, draw, materialize, outline
from scaling.optimizer import AnyOptimizer, inner_optimizers
from scaling.parallel import Layout
from scaling.parametrization import TensorRule
from scaling.ranks import Group, once_a_group


def build_part(run: RunConfig, rank: int, device: torch.device) -> Transformer:
    """What a rank does of the run's model under runtime.parallel, on `device`, with the values that one process would draw.

    The rank makes its own part of each tensor, and beside it one whole tensor at a time. For a sharded layout the process group is there
    and has its number of ranks.
    """
    layout = run.runtime.parallel
    assert layout is not None, "a part is a layout's"
    if layout.pp > 1:
        from scaling.parallel_pipeline import outline_stage  # a second, and it needs this module

        model: Transformer = outline_stage(run, rank)
    else:
        model = outline(run)
    if layout.recompute == "full":
        recompute_blocks(model)
    if layout.sharded:
        _shard(model, run, layout)
    materialize(model, run, device, draw_part)
    return model


def draw_part(tensor: Tensor, rule: TensorRule, seed: int) -> None:
    """`scaling.model.draw` of the part of a tensor that this rank holds, on whatever device."""
    if not isinstance(tensor, DTensor) and tensor.is_cpu:
        draw(tensor, rule, seed)
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    draw(whole, rule, seed)
    whole = whole.to(tensor.device)
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    mesh = tensor.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    tensor.to_local().copy_(everywhere.redistribute(placements=tensor.placements).to_local())


def device_mesh(device: str, layout: Layout) -> DeviceMesh:
    """All processes by their place in each dimension of the layout; a collective call when it is the group's first."""
    sizes = (layout.pp, layout.dp, layout.fsdp, layout.tp)
    return once_a_group((device, sizes), lambda: _new_mesh(device, sizes))


def _new_mesh(device: str, sizes: tuple[int, ...]) -> DeviceMesh:
    # DTensor keeps what it found out by meshes that compare equal whatever group they are of, and gives out those of groups that have
    # ended ("Could not resolve the process group", torch 2.13).
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    return init_device_mesh(device, sizes, mesh_dim_names=("pp", "dp", "fsdp", "tp"))


def _shard(model: Transformer, run: RunConfig, layout: Layout) -> None:
    mesh = device_mesh(run.runtime.device, layout)
    if layout.stage_processes == 1:
        return  # a stage is whole
    if layout.tp > 1:
        share_sequences(model, mesh["tp"], layout.sp)
    # One shard is sharded too where tensors are: all gradients then pass the same way, also those of the tensors that tp leaves whole.
    shard_tensors(model, mesh["dp", "fsdp"] if layout.dp > 1 else mesh["fsdp"], run, layout)


def share_sequences(model: Transformer, tp: DeviceMesh, sequence: bool) -> None:
    """Heads and inner width of every block over the ranks of `tp`; the stream's context too when `sequence`."""
    for block in model.blocks:
        assert isinstance(block, Block)
        parallelize_module(block, tp, _block_plan(block, sequence))
        block.attention.heads //= tp.size()
        block.attention.kv_heads //= tp.size()
        for norm in (block.attention.query_norm, block.attention.key_norm):
            _sum_gain(norm, tp)  # a rank sees its own heads
        if sequence:
            _sum_gain(block.attention_norm, tp)
            _sum_gain(block.mlp_norm, tp)
    if sequence:
        # A stage of a pipeline may lack either.
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(lambda _module, _input, x: _redistributed(x, tp, Replicate(), Shard(1)))
        if hasattr(model, "final_norm"):
            _sum_gain(model.final_norm, tp)
            model.final_norm.register_forward_hook(lambda _module, _input, x: _redistributed(x, tp, Shard(1), Replicate()))


def _block_plan(block: Block, sequence: bool) -> dict[str, ParallelStyle]:
    stream = Shard(1) if sequence else Replicate()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=stream)
    plan: dict[str, ParallelStyle] = {
        # Gathered once for query, key and value, whose gradients are summed before they go between ranks.
        "attention": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None), use_local_output=False
        ),
        "attention.query": columns,
        "attention.key": columns,
        "attention.value": columns,
        "attention.output": rows,
        "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=False),
        "mlp.up": columns,
        "mlp.down": rows,
    }
    return plan if block.mlp.gate is None else plan | {"mlp.gate": columns}


def _redistributed(x: Tensor, tp: DeviceMesh, before: Any, after: Any) -> Tensor:
    local: Tensor = DTensor.from_local(x, tp, [before]).redistribute(placements=[after]).to_local()
    return local


def _sum_gain(norm: nn.Module, tp: DeviceMesh) -> None:
    """Have a norm's gain, of which each rank sees its own part of the tokens or heads, sum its gradient over the ranks."""
    if not isinstance(norm, RMSNorm) or norm.weight is None:
        return
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), tp, [Replicate()]))

    def forward(x: Tensor) -> Tensor:
        gain = norm.weight
        assert isinstance(gain, DTensor)
        return F.rms_norm(x, norm.length, gain.to_local(grad_placements=[Partial()]), eps=1e-6)

    norm.forward = forward  # type: ignore[method-assign]


def recompute_blocks(model: Transformer) -> None:
    """Keep each block's input alone for the backward pass."""
    for block in model.blocks:
        # Blocks draw no random numbers.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def shard_tensors(model: Transformer, mesh: DeviceMesh, run: RunConfig, layout: Layout) -> None:
    """FSDP2 around each block and around the rest. Under bf16 the matrices of blocks are gathered in bf16, as autocast would cast them."""
    reshard = layout.zero == 3
    bf16 = run.training.precision == "bf16" and not (run.model.norm_gain or run.model.qk_norm)
    blocks = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=blocks)
    # The logits are a view (scaling.matmul), which nothing here writes to.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # The rest is used again as the backward pass begins.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def accumulate(model: nn.Module, last: bool) -> None:
    """Before a micro-batch: whether its backward pass, being the last one, takes the gradients between ranks."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)


def split_groups(optimizer: AnyOptimizer) -> None:
    """Make groups of tensors of one mesh each, which torch's fused steps need; their settings stay."""
    for inner in inner_optimizers(optimizer):
        groups = []
        for group in inner.param_groups:
            for members in _by_mesh(zip(group["params"], group["names"], strict=True)):
                groups.append({**group, "params": [tensor for tensor, _ in members], "names": [name for _, name in members]})
        inner.param_groups[:] = groups


def _by_mesh(members: Iterable[tuple[Tensor, Any]]) -> list[list[tuple[Tensor, Any]]]:
    groups: dict[Any, list[tuple[Tensor, Any]]] = defaultdict(list)
    for tensor, word in members:
        groups[tensor.device_mesh if isinstance(tensor, DTensor) else None].append((tensor, word))
    return list(groups.values())


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, group: Group, stages: int = 1) -> float:
    """Scale all gradients so that their norm together is `limit` at most; return it as it was, the same on every rank of `group`.

    Each of `stages` equal parts of the group has tensors of its own.
    """
    holders = group.size // stages
    parts: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            parts[_copies(gradient, holders)].append(gradient.to_local())
        elif gradient is not None:
            parts[holders].append(gradient)
    total = math.sqrt(group.sum(sum(float(get_total_norm(tensors)) ** 2 / copies for copies, tensors in parts.items()))[0])
    factor = limit / (total + 1e-6)  # as torch's own clipping
    if factor < 1:
        torch._foreach_mul_([tensor for tensors in parts.values() for tensor in tensors], factor)
    return total


def _copies(tensor: DTensor, ranks: int) -> int:
    """How many ranks hold the same part of it."""
    mesh = tensor.device_mesh
    assert not any(placement.is_partial() for placement in tensor.placements), "FSDP2 has summed it"
    return ranks // math.prod(mesh.size(at) for at, placement in enumerate(tensor.placements) if not placement.is_replicate())
