"""What a coordinate check sees of a forward pass: the modules' outputs, the attention logits, and the sizes of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scaling.coordinate_faults import fault_of


class Seen:
    """Outputs of a forward pass: the model's own, and every leaf module's when asked for."""

    def __init__(self, target: Any, model: nn.Module, record: bool) -> None:
        self.target, self.model, self.record = target, model, record
        self.sizes: dict[str, float] = {}
        """Mean |output|."""
        self.outputs: dict[str, Tensor] = {}
        """First eighth of the output's rows."""
        self._output: Tensor | None = None
        self._last: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """The model's output; where the model returns only its loss, the last module's."""
        output = self._last if self._output is None or self._output.numel() == 1 else self._output
        if output is None:
            what = "the forward pass goes through no module, so that the model's output is not seen"
            raise fault_of(
                self.target, "loss", what, "call the model or its modules (model(x), model.readout(x)), not their weights alone"
            )
        return output

    @contextmanager
    def watching(self) -> Iterator[None]:
        leaves = {name: module for name, module in self.model.named_modules() if not list(module.children())}
        handles = [module.register_forward_hook(self._hook(name)) for name, module in leaves.items()]
        handles.append(self.model.register_forward_hook(self._root))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                self._last = tensor.detach() if self.record else tensor
                if self.record:
                    self.sizes[name] = float(self._last.abs().mean())
                    # A copy, so that whole activations are not kept over the steps.
                    self.outputs[name] = self._last[: -(-len(self._last) // 8)].clone() if self._last.dim() else self._last

        return hook

    def _root(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = _first_tensor(output)
        self._output = tensor.detach() if self.record and tensor is not None else tensor


class AttentionLogits(TorchFunctionMode):
    """RMS of query . key x scale wherever scaled_dot_product_attention is called, by the module that calls it."""

    def __init__(self, model: nn.Module, head_dims: dict[str, dict[int, int]], width: int) -> None:
        super().__init__()
        self.sizes: dict[str, float] = {}
        self._stack: list[str] = []
        self._head_dims, self._width = head_dims, width
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entered(name)))
            self._handles.append(module.register_forward_hook(self._left))

    def _entered(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            self._stack.append(name)

        return hook

    def _left(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._stack.pop()

    def __exit__(self, *arguments: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is F.scaled_dot_product_attention:
            self._note(arguments[0], arguments[1], options.get("scale"))
        return function(*arguments, **options)

    def _note(self, query: Tensor, key: Tensor, scale: float | None) -> None:
        head_dim = query.shape[-1]
        query, key = query.detach(), key.detach()
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1) if query.dim() == 4 else key
        factor = 1.0 / math.sqrt(head_dim) if scale is None else scale
        name = self._stack[-1] if self._stack else ""
        self.sizes[name] = factor * rms(query @ keys.transpose(-1, -2))
        self._head_dims.setdefault(name, {})[self._width] = head_dim


def _first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a module's output, whatever it is wrapped in."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in values if (found := _first_tensor(item)) is not None), None)


def norm(tensor: Tensor) -> float:
    """Root of the sum of squares, in float32 at least."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32)))


def rms(tensor: Tensor) -> float:
    return norm(tensor) / math.sqrt(tensor.numel())


def rms_of_nonzero(tensor: Tensor) -> float:
    """RMS over the entries that are not zero: an embedding's untouched rows say nothing."""
    count = int(torch.count_nonzero(tensor.detach()))
    return norm(tensor) / math.sqrt(count) if count else 0.0
