"""How one run is laid over several processes: the sizes of the mesh, how they are written, and what cannot be laid out. Torch-free.

Owns `Layout` (the value of runtime.parallel and of `train --parallel fsdp=2,tp=1`) and the faults of a layout, which are all found before
any process starts. `scaling.parallel_model` puts a layout on a model, `scaling.parallel_checkpoint` saves and loads what it made.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from scaling.config_base import Frozen, Positive
from scaling.errors import Fault, raise_all

if TYPE_CHECKING:
    from scaling.config import RunConfig

SHARDABLE_OPTIMIZERS = ("adamw", "adam", "sgd")
"""Optimizers whose update of an entry needs that entry alone, and which torch has rules for on sharded tensors."""


class Layout(Frozen):
    """A mesh of pp x dp x fsdp x tp processes, tp innermost: ranks that are next to each other share a sequence."""

    pp: Positive = 1
    """Stages of consecutive blocks, each held by processes of its own, through which micro-batches pass (pipeline parallel, 1F1B)."""
    dp: Positive = 1
    """Replicas that average their gradients; with fsdp, each is a group of sharded processes (HSDP)."""
    fsdp: Positive = 1
    """Processes over which parameters, gradients and optimizer state are sharded (FSDP2)."""
    tp: Positive = 1
    """Processes that share each attention's heads and each MLP's inner width (tensor parallel)."""
    sp: bool = False
    """Sequence parallel: between the products of tensor parallel, activations are sharded over the context."""
    zero: Literal[2, 3] = 3
    """fsdp: whether parameters stay gathered between forward and backward (ZeRO-2) or are gathered twice (ZeRO-3)."""
    recompute: Literal["none", "full"] = "none"
    """Activation checkpointing: full keeps each block's input alone and computes the block again on the way back."""

    @property
    def processes(self) -> int:
        return self.pp * self.stage_processes

    @property
    def stage_processes(self) -> int:
        """Processes that hold the same blocks."""
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """Processes with different sequences."""
        return self.dp * self.fsdp

    @property
    def sharded(self) -> bool:
        """Whether a process holds a part of the tensors; replicas alone are DistributedDataParallel's."""
        return self.pp > 1 or self.fsdp > 1 or self.tp > 1


def parse_layout(text: str) -> Layout:
    """A Layout from `fsdp=2,tp=1`. Raises ConfigError with every key and value that is wrong."""
    values: dict[str, Any] = {}
    faults = []
    known = list(Layout.model_fields)
    for part in text.split(","):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            cure = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
            faults.append(Fault("--parallel", f"{key!r} is no part of a layout", cure))
        elif not separator or not value:
            faults.append(Fault(f"--parallel {key}", "has no value", f"write {key}=VALUE"))
        elif key in values:
            faults.append(Fault(f"--parallel {key}", "is given twice", "give it once"))
        else:
            values[key] = int(value) if value.isdecimal() else value
    try:
        layout = Layout.model_validate(values)
    except ValidationError as error:
        faults += [Fault(f"--parallel {item['loc'][0]}", f"{item['input']!r}: {item['msg']}") for item in error.errors()]
    raise_all(faults)
    return layout


def require_layout(run: RunConfig, processes: int | None = None) -> None:
    """Raise ConfigError with everything that keeps `run` from its layout, or asks what only a layout can.

    processes: how many there are, where torchrun started them; else runtime.processes, which the run starts by itself.
    """
    layout, faults = run.runtime.parallel, _write_faults(run)
    if layout is None:
        raise_all(faults)
        return
    faults += (
        _size_faults(layout, processes, run.runtime.processes)
        + _division_faults(layout, run)
        + _stage_faults(layout, run)
        + _unknown_faults(layout, run)
    )
    raise_all(faults)


def _write_faults(run: RunConfig) -> list[Fault]:
    runtime = run.runtime
    if not runtime.checkpoint_async:
        return []
    where, cure, faults = "runtime.checkpoint_async", "leave it out", []
    if runtime.parallel is None or not runtime.parallel.sharded:
        faults.append(Fault(where, "is for sharded layouts: this run's checkpoint is one file", f"{cure}, or set fsdp, tp or pp"))
    if runtime.checkpoint_every_steps is None:
        faults.append(Fault(where, "is set, and no checkpoint is written", f"{cure}, or set runtime.checkpoint_every_steps"))
    return faults


def _size_faults(layout: Layout, given: int | None, asked: int) -> list[Fault]:
    faults = []
    what = f"pp {layout.pp} x dp {layout.dp} x fsdp {layout.fsdp} x tp {layout.tp} is {layout.processes} processes"
    if given is not None and given != layout.processes:
        faults.append(
            Fault(
                "--parallel",
                f"{what}, and torchrun started {given}",
                f"torchrun --nproc-per-node {layout.processes}, or other sizes",
            )
        )
    if given is None and asked != layout.processes:
        faults.append(
            Fault("runtime.parallel", f"{what}, and runtime.processes is {asked}", f"set runtime.processes to {layout.processes}")
        )
    if layout.sp and layout.tp == 1:
        faults.append(Fault("sp", "is on, and shards what tensor parallel leaves whole; tp is 1", "leave sp out, or set tp"))
    if layout.zero != 3 and layout.fsdp == 1:
        faults.append(Fault("zero", f"is {layout.zero}, and nothing is sharded: fsdp is 1", "leave zero out, or set fsdp"))
    return faults


def _division_faults(layout: Layout, run: RunConfig) -> list[Fault]:
    """What a layout divides and leaves a remainder of."""
    model, tp = run.model, layout.tp
    divided = [
        ("tp", f"{model.heads} attention heads (width {model.width})", model.heads, tp),
        ("tp", f"{model.kv_heads} key/value heads (model.queries_per_kv {model.queries_per_kv})", model.kv_heads, tp),
        ("tp", f"the MLP's inner width {model.mlp_width}", model.mlp_width, tp),
        ("pp", f"model.depth {model.depth} (blocks)", model.depth, layout.pp),
        ("dp x fsdp", f"training.batch_size {run.training.batch_size}", run.training.batch_size, layout.data_ranks),
    ]
    if layout.sp:
        divided.append(("sp", f"model.context {model.context}", model.context, tp))
    return [
        Fault(f"--parallel {key}", f"{what} cannot be shared equally by {by}", f"{key} must divide {number}")
        for key, what, number, by in divided
        if number % by
    ]


def _stage_faults(layout: Layout, run: RunConfig) -> list[Fault]:
    """What a pipeline of several stages cannot do."""
    if layout.pp == 1:
        return []
    faults = _micro_batch_faults(layout, run)
    if run.model.tied_embeddings:
        what = "is true, and the first stage and the last would each hold the tensor"
        faults.append(Fault("model.tied_embeddings", what, "untie them, or leave pp out"))
    return faults


def _micro_batch_faults(layout: Layout, run: RunConfig) -> list[Fault]:
    """Of a data rank's sequences: a pipeline passes micro-batches of one size, and as many as it has stages at least."""
    share, rest = divmod(run.training.batch_size, layout.data_ranks)
    micro = run.training.micro_batch_size
    if rest:
        return []  # said as such
    where, of = "training.micro_batch_size", f"the {share} sequences of a data rank's share"
    if micro and share % micro:
        return [Fault(where, f"{micro} leaves a remainder of {of}", f"set a divisor of {share}")]
    made = share // (micro or share)
    if made >= layout.pp:
        return []
    what = f"{micro or 'is not set, and'} makes {made} of {of}: {layout.pp} stages need {layout.pp} micro-batches"
    fitting = [size for size in range(1, share // layout.pp + 1) if share % size == 0]
    larger = f"set training.batch_size to {layout.pp * layout.data_ranks} or more"
    return [Fault(where, what, f"set it to {fitting[-1]} or less" if fitting else larger)]


def _unknown_faults(layout: Layout, run: RunConfig) -> list[Fault]:
    """Settings whose results under a layout are not known to be those of one process."""
    optimizer, training, runtime = run.optimizer, run.training, run.runtime
    if not layout.sharded:
        return []
    faults = []
    if optimizer.kind not in SHARDABLE_OPTIMIZERS:
        what = f"{optimizer.kind} is not known to make the same update on sharded tensors"
        faults.append(Fault("optimizer.kind", what, f"use {', '.join(SHARDABLE_OPTIMIZERS)}, or dp alone"))
    if training.precision == "fp16":
        faults.append(Fault("training.precision", "fp16's loss scaling was not tried on shards", "use bf16 or fp32"))
    if training.compile:
        faults.append(Fault("training.compile", "was not tried on shards", "set it to false, or use dp alone"))
    if runtime.noise_scale_every_steps is not None:
        faults.append(Fault("runtime.noise_scale_every_steps", "cannot be measured on shards", "leave it out, or use dp alone"))
    if runtime.keep_checkpoints_at_steps:
        what = "keeps checkpoints in one file, and this layout's are sharded"
        faults.append(Fault("runtime.keep_checkpoints_at_steps", what, "leave it out, or use dp alone"))
    if run.branch is not None:
        faults.append(Fault("branch", "starts from a checkpoint in one file, and this layout's are sharded", "use dp alone"))
    return faults
