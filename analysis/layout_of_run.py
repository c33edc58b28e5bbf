"""What a run's config says to the planner: its optimizer's states, its micro-batch, and what it states that no plan reads.

Owns `search_of_run` and `plan_of_run`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from analysis.hardware import Arithmetic, Device
from analysis.layouts import LayoutPlan, LayoutSearch, search_layouts
from analysis.memory_plan import TWO_MOMENTS
from scaling.config import OptimizerConfig, OptimizerKind, RunConfig
from scaling.model_config import ModelConfig

MOMENT_BYTES: Mapping[OptimizerKind, tuple[int, int]] = {
    "adamw": TWO_MOMENTS,
    "adam": TWO_MOMENTS,
    "lion": (4, 4),
    "sgd": (4, 4),
    "muon": (4, 8),
}
"""Of a block's matrices, and of all else; fp32. Muon keeps a momentum of matrices, and AdamW moves the rest."""


def moment_bytes_of(optimizer: OptimizerConfig) -> tuple[int, int]:
    """Bytes a parameter; SGD without momentum keeps nothing."""
    return (0, 0) if optimizer.kind == "sgd" and not optimizer.beta1 else MOMENT_BYTES[optimizer.kind]


def search_of_run(run: RunConfig, search: LayoutSearch) -> LayoutSearch:
    """`search` for this run: its optimizer's states, and its own micro-batch where none is asked for."""
    micro = search.micro_batch_size or run.training.micro_batch_size
    return replace(search, moment_bytes=moment_bytes_of(run.optimizer), micro_batch_size=micro)


def unplanned(run: RunConfig, asked_micro: int | None) -> tuple[str, ...]:
    """What the run states that the plan does not go by, and that its own micro-batch was taken. asked_micro: where one was asked for."""
    notes, training = [], run.training
    if training.precision == "fp32":
        what = "training.precision is fp32, and the plan is of 16-bit products and activations"
        notes.append(f"{what}: in fp32 activations and logits take up to twice the memory, and the hours do not hold")
    if run.optimizer.kind == "muon":
        notes.append("the products that orthogonalize muon's updates, and the whole matrices that they need, are not counted")
    if training.micro_batch_size and asked_micro is None:
        notes.append(f"the run's own training.micro_batch_size {training.micro_batch_size} is taken, and no other is searched")
    return tuple(notes)


def plan_of_run(
    run: RunConfig, model: ModelConfig, device: Device, devices: int, search: LayoutSearch, arithmetic: Arithmetic = "bf16"
) -> LayoutPlan:
    """Layouts of `run` with `model` in place of its own, by `search_of_run`."""
    own = search_of_run(run, search)
    plan = search_layouts(model, device, devices, run.training.batch_size, run.tokens, own, arithmetic)
    return replace(plan, unplanned=unplanned(run, search.micro_batch_size))
