"""Squared norms of the gradient of a step's batch and of its parts: what the gradient noise scale is estimated from.

Owns the measuring, on torch's side; `analysis.noise_scale` has the estimates. Two ways: parts of a batch during training (`Parts` reads
them off an accumulation, `extra_passes` computes them), and the gradient of every example of one batch (`example_norms`). Gradients are
those of the mean loss, nats per token, before clipping; an example is a sequence. Nothing here writes to a parameter or its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import get_total_norm

PARTS = 4
"""A batch that no accumulation splits is split into this many parts at most, where its size divides."""


@dataclass(frozen=True)
class GradientNorms:
    """One step's squared gradient norms at two batch sizes; a row of metrics.jsonl holds them under `gradient_sq`."""

    batch_sequences: int
    batch: float
    """Of the batch's mean gradient."""
    part_sequences: int
    parts: float
    """Mean over the parts, of each part's mean gradient."""

    def row(self) -> dict[str, Any]:
        """Norms that are not finite are null."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def part_sequences(batch_sequences: int, ranks: int, micro_batch_size: int | None) -> int:
    """Sequences of the parts that a batch is measured in: its micro-batches, else a divisor of a rank's share that makes at most PARTS.

    A share without such a divisor (a large prime) is measured sequence by sequence. Raises ValueError for a batch of one sequence.
    """
    share = batch_sequences // ranks
    if micro_batch_size is not None and micro_batch_size < share and share % micro_batch_size == 0:
        return micro_batch_size
    sizes = [size for size in range(1, share + 1) if share % size == 0 and batch_sequences // size >= 2]
    if not sizes:
        raise ValueError("a batch of one sequence has no parts")
    return min((size for size in sizes if batch_sequences // size <= PARTS), default=1)


class Parts:
    """Reads the gradients of micro-batches off their accumulation, at the price of one more copy of the gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """To be made when no gradient is set."""
        self._parameters = parameters
        self._before: list[Tensor] | None = None
        self.sum_sq = 0.0
        """Over the micro-batches seen, of each one's mean gradient."""

    @torch.no_grad()
    def see(self, weight: float) -> None:
        """After a backward pass whose loss was multiplied by `weight`: take what it added."""
        now = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        added = now if self._before is None else [after - before for after, before in zip(now, self._before, strict=True)]
        self.sum_sq += squared_norm(added) / weight**2
        self._before = [gradient.clone() for gradient in now]


def extra_passes(loss: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], tokens: Tensor, size: int) -> float:
    """Sum over the parts of `size` sequences of `tokens` of their squared gradient norms, by a backward pass each."""
    # torch.autograd.grad leaves .grad alone, and the hooks by which DistributedDataParallel averages it.
    return sum(squared_norm(torch.autograd.grad(loss(part), parameters)) for part in torch.split(tokens, size))


def squared_norm(tensors: Sequence[Tensor]) -> float:
    return float(get_total_norm(tensors)) ** 2


class _Loss(nn.Module):
    """A model's loss as a module, which functional_call can give other parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(tokens)  # type: ignore[operator]
        return loss


def example_norms(model: nn.Module, tokens: Tensor, chunk_sequences: int = 8) -> tuple[GradientNorms, Tensor]:
    """Norms with parts of one example each, from one pass over `tokens` (B, T + 1), and the B squared norms.

    Exact, not an estimate of them: the gradient of every example is made (torch.func), `chunk_sequences` at a time, each as large as
    the model. `model` has a `loss` of (B, T + 1) tokens that is a mean over them, and no randomness.
    """
    module = _Loss(model)
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def loss(values: dict[str, Tensor], example: Tensor) -> Tensor:
        value: Tensor = functional_call(module, values, (example[None],))
        return value

    squares, sums = [], {name: torch.zeros_like(value) for name, value in parameters.items()}
    # The other kernels of attention have no rule for vmap.
    with sdpa_kernel(SDPBackend.MATH):
        for chunk in torch.split(tokens, chunk_sequences):
            gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, chunk)
            squares.append(torch.stack([value.flatten(1).double().square().sum(1) for value in gradients.values()]).sum(0))
            for name, value in gradients.items():
                sums[name] += value.sum(0)
    each, count = torch.cat(squares), len(tokens)
    batch = squared_norm(list(sums.values())) / count**2
    return GradientNorms(count, batch, 1, float(each.mean())), each
