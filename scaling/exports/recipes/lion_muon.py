"""Lion, and Muon with AdamW beside it, for param_groups.py's build_optimizer. Needs torch, for Muon 2.9 or newer.

torch has no Lion. Its Muon moves hidden matrices alone, and AdamW the rest: `Together` is both as one optimizer, for schedulers and loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def build(groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
    """The optimizer over groups of param_groups.py. settings: plan.json's `optimizer`. Raises RuntimeError for a torch without Muon."""
    betas = (settings["beta1"], settings["beta2"])
    if settings["kind"] == "lion":
        return Lion(groups, betas)
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"torch {torch.__version__} has no Muon: pip install 'torch>=2.9'")
    hidden = [group for group in groups if group["optimizer"] == "muon"]
    rest = [group for group in groups if group["optimizer"] != "muon"]
    muon = torch.optim.Muon(hidden, momentum=settings["muon_momentum"], weight_decay=0.0, adjust_lr_fn="original")
    return Together([muon, torch.optim.AdamW(rest, betas=betas, fused=fused)])


class Lion(torch.optim.Optimizer):
    """Chen et al. (2302.06675), Algorithm 2, with decoupled weight decay as torch's AdamW has it.

    w <- (1 - lr * weight_decay) w - lr * sign(beta1 m + (1 - beta1) g), then m <- beta2 m + (1 - beta2) g.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            pairs = [(tensor, tensor.grad) for tensor in group["params"] if tensor.grad is not None]
            if pairs:
                self._update([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs], group)
        return loss

    def _update(self, tensors: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        momenta = [self._momentum(tensor) for tensor in tensors]
        directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(tensors, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(tensors, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)

    def _momentum(self, tensor: Tensor) -> Tensor:
        state = self.state[tensor]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(tensor)
        momentum: Tensor = state["momentum"]
        return momentum


class Together(torch.optim.Optimizer):
    """Several optimizers as one. Its groups are theirs, not copies: an LR that a scheduler sets reaches them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """One update of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        # Loading gives each optimizer new groups.
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
