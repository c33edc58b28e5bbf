"""Where `scaling.parametrize` learns which dimensions of a user's model grow: a second instance, a base-shapes file, or mup's layers.

Owns `BaseShapes`. A dimension grows when its length differs from the base's. Files are those of the mup package (Tensor Programs V,
2203.03466): YAML, tensor name -> base length of every dimension, null where the dimension does not grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from torch import Tensor, nn

from scaling.errors import ConfigError, Fault, raise_all

MUP_READOUTS = ("MuReadout", "MuSharedReadout")


@dataclass(frozen=True)
class BaseShapes:
    """Shapes at the base width, and what else is known of it."""

    shapes: Mapping[str, tuple[int, ...]]
    grows: Mapping[str, tuple[bool, ...]]
    """Which dimensions grow with width."""
    where: str
    """In words, for messages."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """Initial values at the base width; empty where only shapes are known, and then the init is taken to be torch's own (fan-in)."""
    by_mup: bool = False
    """The mup package has put its factors on the initial values, and its readouts scale their input."""


def base_shapes(model: nn.Module, base: nn.Module | str | Path | None, delta: nn.Module | None) -> BaseShapes:
    """The base shapes of `model`, from `base` or, without one, from what the mup package left on the parameters.

    A dimension grows where `model` differs from `base`, or `delta` does. Raises ConfigError when there is nothing to learn from, or
    when tensors differ in name or number of dimensions.
    """
    if isinstance(base, nn.Module):
        values = dict(base.named_parameters())
        shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
        others = [own_shapes(model)] if delta is None else [own_shapes(model), own_shapes(delta)]
        for other in others:
            _require_same_tensors(other, shapes, "`base`")
        grows = {
            name: tuple(any(other[name][axis] != length for other in others) for axis, length in enumerate(shape))
            for name, shape in shapes.items()
        }
        return BaseShapes(shapes, grows, "`base`", values)
    if base is not None:
        return _read(model, Path(base))
    return _from_mup(model)


def own_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def is_mup_readout(module: nn.Module) -> bool:
    """Whether mup's readout, which multiplies its input by 1 / m_in itself, or a subclass of it."""
    return any(kind.__name__ in MUP_READOUTS and kind.__module__.startswith("mup.") for kind in type(module).__mro__)


def _read(model: nn.Module, path: Path) -> BaseShapes:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(Fault(str(path), f"cannot be read as a base-shapes file: {error}")) from None
    own = own_shapes(model)
    good = isinstance(values, dict) and all(
        isinstance(lengths, list) and all(length is None or (isinstance(length, int) and length > 0) for length in lengths)
        for lengths in values.values()
    )
    if not good:
        raise ConfigError(
            Fault(str(path), "is no base-shapes file", "write one with mup.make_base_shapes(base, delta, savefile=...)")
        )
    _require_same_tensors(own, {name: tuple(length or 0 for length in lengths) for name, lengths in values.items()}, str(path))
    shapes = {
        name: tuple(now if length is None else length for now, length in zip(own[name], values[name], strict=True))
        for name in own
    }
    grows = {name: tuple(length is not None for length in values[name]) for name in own}
    return BaseShapes(shapes, grows, str(path))


def _from_mup(model: nn.Module) -> BaseShapes:
    """From the shapes that mup.set_base_shapes left; a model without them, or with a readout that is not mup's, is refused."""
    bare = [name for name, tensor in model.named_parameters() if not hasattr(tensor, "infshape")]
    if bare:
        cure = "give base=: the same model at the base width, or a base-shapes file"
        raise ConfigError(Fault(bare[0], "has no base shape, and no `base` was given", cure))
    shapes, grows, faults = {}, {}, []
    for name, tensor in model.named_parameters():
        dims = list(getattr(tensor, "infshape"))  # noqa: B009  # set by mup, unknown to torch
        shapes[name] = tuple(
            int(now if dim.base_dim is None else dim.base_dim) for now, dim in zip(tensor.shape, dims, strict=True)
        )
        grows[name] = tuple(dim.base_dim is not None for dim in dims)
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Linear) and grows[name] == (False, True) and not is_mup_readout(owner):
            faults.append(Fault(name, "is a readout of torch's Linear in a model of mup's layers", "make it a mup.MuReadout"))
    raise_all(faults)
    return BaseShapes(shapes, grows, "the mup package's base shapes", by_mup=True)


def _require_same_tensors(own: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    cure = "build both by one function"
    faults = [Fault(name, f"is in the model and not in {where}", cure) for name in own.keys() - shapes.keys()]
    faults += [Fault(name, f"is in {where} and not in the model", cure) for name in shapes.keys() - own.keys()]
    faults += [
        Fault(
            name, f"has shape {own[name]}, and {shapes[name]} in {where}", "only lengths may differ, not the number of dimensions"
        )
        for name in own.keys() & shapes.keys()
        if len(own[name]) != len(shapes[name])
    ]
    raise_all(sorted(faults, key=lambda fault: fault.where))
