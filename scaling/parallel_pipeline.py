"""Pipeline parallel: one stage of a model, and the 1F1B schedule that passes micro-batches through the stages, by torch.

Owns the cut by blocks (the embedding goes with the first stage, final norm and readout with the last) and the passes of a batch. A
stage keeps the full model's names of its tensors, so that rules, groups and checkpoints know nothing of stages. Sends, receives and
their order are torch.distributed.pipelining's. `scaling.parallel_model` lays a stage over the processes that share it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from scaling.config import RunConfig
from scaling.matmul import linear
from scaling.model import Transformer, times
from scaling.parallel import Layout
from scaling.parallel_model import device_mesh
from scaling.parametrization import forward_rules


class Stage(Transformer):
    """One stage's blocks, named as in the whole model: token ids or the stream before them to the stream after them, or logits."""

    def __init__(self, run: RunConfig, index: int, stages: int) -> None:
        super().__init__(run.model, forward_rules(run))
        self.first, self.last = index == 0, index == stages - 1
        # Entered here, since schedules run backward passes between forward ones, and those are not to be under it.
        self.autocast = partial(torch.autocast, run.runtime.device, torch.bfloat16, enabled=run.training.precision == "bf16")
        blocks, count = nn.ModuleList(), run.model.depth // stages
        for layer in range(index * count, (index + 1) * count):
            blocks.add_module(str(layer), self.blocks[layer])
        self.blocks = blocks
        if not self.first:
            del self.embedding
        if not self.last:
            del self.final_norm, self.readout

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            if self.first:
                x = times(self.embedding(x), self.rules.embedding)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            if not self.last:
                return x
            assert self.readout is not None, "tied embeddings have no pipeline"
            return linear(times(self.final_norm(x), self.rules.readout), self.readout.weight)


def stage_of(rank: int, layout: Layout) -> int:
    """Index of the stage that a rank holds a part of: neighbours share one."""
    return rank // layout.stage_processes


def outline_stage(run: RunConfig, rank: int) -> Stage:
    """The stage of a rank under runtime.parallel, on torch's meta device (scaling.model.materialize)."""
    layout = run.runtime.parallel
    assert layout is not None, "a stage is a layout's"
    with torch.device("meta"):
        return Stage(run, stage_of(rank, layout), layout.pp)


class Pipeline:
    """A stage at work with those before and after it; every process of the run calls the same at the same time."""

    def __init__(self, stage: nn.Module, run: RunConfig, rank: int, device: torch.device) -> None:
        """stage: on `device`, as its processes share it (scaling.parallel_model.build_part)."""
        assert isinstance(stage, Stage), "a layout of several stages makes one"
        layout = run.runtime.parallel
        assert layout is not None, "a pipeline is a layout's"
        self._stage, self._model, self._layout, self._device = stage, run.model, layout, device
        self._index = stage_of(rank, layout)
        self._group = device_mesh(run.runtime.device, layout)["pp"].get_group()
        share = run.training.batch_size // layout.data_ranks
        micro = run.training.micro_batch_size
        assert micro is not None, "require_layout has seen to it"
        self._passes = share // micro
        self._train = Schedule1F1B(self._piped(micro), self._passes, self._share_of_mean, scale_grads=False)
        self._validate: dict[int, ScheduleGPipe] = {}
        """By the number of sequences."""

    def gradient(self, tokens: Tensor) -> float:
        """Add the gradient of the mean loss over `tokens` (B, T + 1) to this stage's; return that loss, 0 where it is not the last's."""
        losses: list[Tensor] = []
        self._run(self._train.step, tokens, losses)
        return sum(float(loss.detach()) for loss in losses)

    @torch.no_grad()
    def loss_sum(self, tokens: Tensor) -> float:
        """The loss of `tokens` (B, T + 1) summed over them, nats, in a forward pass; 0 where the stage is not the last."""
        rows = len(tokens)
        if rows not in self._validate:
            self._validate[rows] = ScheduleGPipe(self._piped(rows), 1, summed_loss, scale_grads=False)
        losses: list[Tensor] = []
        self._run(self._validate[rows].eval, tokens, losses)
        return sum(float(loss) for loss in losses)

    def _run(self, step: Callable[..., object], tokens: Tensor, losses: list[Tensor]) -> None:
        inputs = (tokens[:, :-1],) if self._stage.first else ()
        target = tokens[:, 1:] if self._stage.last else None
        step(*inputs, target=target, losses=losses, return_outputs=False)

    def _piped(self, rows: int) -> PipelineStage:
        """The stage for passes of `rows` sequences, whose shapes torch is told instead of trying."""
        context, parts = self._model.context, self._layout.tp if self._layout.sp else 1
        stream = torch.empty(rows, context // parts, self._model.width, device="meta", requires_grad=True)
        ids = torch.empty(rows, context, dtype=torch.int64, device="meta")
        logits = torch.empty(rows, context, self._model.vocabulary, device="meta", requires_grad=True)
        return PipelineStage(
            self._stage,
            self._index,
            self._layout.pp,
            self._device,
            input_args=ids if self._stage.first else stream,
            output_args=logits if self._stage.last else stream,
            group=self._group,
        )

    def _share_of_mean(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's part in the mean over all: they are of one size."""
        return summed_loss(logits, targets, "mean") * (1 / self._passes)


def summed_loss(logits: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    """Cross-entropy, nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)
