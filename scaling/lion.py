"""Lion (Chen et al. 2302.06675, Algorithm 2), which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Lion(torch.optim.Optimizer):
    """The sign of an interpolation of gradient and momentum, with decoupled weight decay.

    w <- (1 - lr * weight_decay) w - lr * sign(beta1 m + (1 - beta1) g), then m <- beta2 m + (1 - beta2) g.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """One update; `closure` recomputes the loss, as torch's optimizers take it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [tensor for tensor in group["params"] if tensor.grad is not None]
            if held:
                self._update(held, group)
        return loss

    def _update(self, tensors: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        momenta = [self._momentum(tensor) for tensor in tensors]
        directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(tensors, 1 - lr * decay)
        torch._foreach_add_(tensors, directions, alpha=-lr)
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)

    def _momentum(self, tensor: Tensor) -> Tensor:
        state = self.state[tensor]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(tensor)
        momentum: Tensor = state["momentum"]
        return momentum
