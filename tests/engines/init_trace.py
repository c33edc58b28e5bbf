"""The std that an engine's own init code hands to each draw, read while it draws; exact, where a measured std has sampling error.

    with InitTrace() as trace:
        model = build()
    trace.init_of(model.get_parameter("a.weight"))

A draw is followed through copies and products with a number. Anything else that changes a tensor makes its init unknown, and the measured
std stands in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("aten::clone", "aten::_to_copy", "aten::detach", "aten::cat", "aten::lift_fresh", "aten::contiguous")
QUIET = ("aten::empty", "aten::detach", "aten::view", "aten::as_strided", "aten::slice", "aten::split", "aten::alias")


@dataclass(frozen=True)
class Init:
    """How a tensor starts: `std` and `how` it is known; for a tensor filled with one value, `constant`."""

    how: str
    """set: the std that the draw was given; constant: filled with one value; measured: std of the entries."""
    std: float | None = None
    constant: float | None = None
    error: float | None = None
    """measured: standard error of `std`, as a share of it."""


class InitTrace(TorchDispatchMode):
    """Follows normal draws and fills from storage to storage."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Init | None] = {}
        self._alive: list[torch.Tensor] = []  # a freed storage's address may be given to another tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::normal_":
            mean, std = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
            self._put(args[0], Init("set", std=float(std)) if mean == 0 else None)
        elif name in ("aten::fill_", "aten::zero_"):
            value = args[1] if len(args) > 1 else 0.0
            self._put(args[0], Init("constant", constant=float(value)))
        elif name in ("aten::ones", "aten::zeros", "aten::ones_like", "aten::zeros_like"):
            self._put(result, Init("constant", constant=float("ones" in name)))
        elif name == "aten::mul_" and isinstance(args[1], float):
            self._put(args[0], self._of(args[0]), times=args[1])
        elif name == "aten::copy_":
            self._put(args[0], self._of(args[1]))
        elif name in COPIES:
            inits = {self._of(tensor) for tensor in _tensors(args)}
            self._put(result, inits.pop() if len(inits) == 1 else None)
        elif func._schema.is_mutable and not name.startswith(QUIET):
            for tensor in _tensors(args[:1]):
                self._put(tensor, None)
        return result

    def _put(self, tensor: torch.Tensor, init: Init | None, times: float = 1.0) -> None:
        if tensor.device.type == "meta":
            return
        if init is not None and times != 1.0:
            std, constant = (None if value is None else value * times for value in (init.std, init.constant))
            init = replace(init, std=std, constant=constant)
        storage = tensor.untyped_storage()
        # A draw into part of a storage says nothing of the rest.
        self._known[storage.data_ptr()] = init if _whole(tensor) else None
        self._alive.append(tensor)

    def _of(self, tensor: torch.Tensor) -> Init | None:
        return None if tensor.device.type == "meta" else self._known.get(tensor.untyped_storage().data_ptr())

    def init_of(self, parameter: torch.Tensor) -> Init:
        """How `parameter` starts. Raises ValueError where its entries are not what was read."""
        read, entries = self._of(parameter), parameter.detach().double()
        std, error = float(entries.pow(2).mean().sqrt()), 1 / math.sqrt(2 * entries.numel())
        if read is None:
            same = bool((entries == entries.flatten()[0]).all())
            return Init("constant", constant=float(entries.flatten()[0])) if same else Init("measured", std=std, error=error)
        if read.constant is not None and not torch.allclose(
            entries, torch.full_like(entries, read.constant), rtol=1e-6, atol=0.0
        ):
            raise ValueError(f"entries are not {read.constant}")
        if read.std is not None and abs(std - read.std) > 5 * error * read.std:
            raise ValueError(f"entries have std {std}, the draw was given {read.std}")
        return read


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
