"""muP for any nn.Module: what grows is read from two instances, the init is carried over, the groups are ordinary ones.

Owns `parametrize`. The rules are those of `scaling.parametrization`; a readout takes Tensor Programs V's (2203.03466) Table 3 form, which
needs no multiplier in the forward pass, so that nothing can be lost by deepcopy, state_dict, torch.compile or FSDP. Only a readout that
is tied to an embedding needs one (Table 8): a forward pre-hook of the readout module.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scaling.config import ParametrizationConfig
from scaling.errors import ConfigError, Fault, raise_all
from scaling.shapes import Role
from scaling.tables import Powers, Ratio, Row, formula, rows_of, value

UserRole = Literal["input", "hidden", "readout", "vector", "constant"]
"""How a tensor's dimensions grow: out only, both, in only, its one, none."""
OptimizerKind = Literal["adamw", "sgd", "lion"]
ROWS: Mapping[UserRole, Role] = {"input": "embedding", "hidden": "hidden", "readout": "readout", "vector": "block_gain"}
CONSTANT = Row("does not grow: same value at every width", sgd_lr={}, decays=False)
MARK = "_mutransfer_rescaled"
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class ParametrizedTensor:
    """What one tensor is and gets."""

    name: str
    shape: tuple[int, ...]
    role: UserRole
    m_in: float
    """fan_in over the base model's; 1 for what has none."""
    m_out: float
    lr: float
    weight_decay: float
    eps: float
    rescaled: float
    """Factor put on its initial values."""
    multiplier: float
    """Factor on the readout's input; 1 but for a tied one."""
    formula: str
    source: str


@dataclass(frozen=True)
class Parametrized:
    """Parameter groups for an ordinary torch optimizer, and the table of what every tensor got."""

    groups: list[dict[str, Any]]
    tensors: tuple[ParametrizedTensor, ...]

    def __str__(self) -> str:
        head = ("tensor", "shape", "role", "m_in", "m_out", "lr", "lr rule", "weight decay", "eps", "init x", "input x")
        rows = [
            (
                item.name, "x".join(map(str, item.shape)) or "scalar", item.role, f"{item.m_in:g}", f"{item.m_out:g}", f"{item.lr:.4g}",
                item.formula, f"{item.weight_decay:.4g}", f"{item.eps:.3g}", f"{item.rescaled:.4g}", f"{item.multiplier:.4g}",
            )
            for item in self.tensors
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
        )


def parametrize(
    model: nn.Module, *, base: nn.Module, lr: float, weight_decay: float = 0.0, eps: float = 1e-8, optimizer: OptimizerKind = "adamw",
    roles: Mapping[str, UserRole] | None = None, rescale: bool = True,
) -> Parametrized:  # fmt: skip
    """Bring `model` under muP, with hyperparameters that were found on `base`.

    base: the same model at the base width, freshly initialized; lr, weight_decay and eps are the values there, and `base` itself is
    trained with them unchanged. roles: for raw parameters of two or more dimensions, by name. rescale: put the factors on the
    initial values; False for weights that were trained. A second call changes no values. Raises ConfigError with everything that
    cannot be classified and the cure.
    """
    model, base = _unwrapped(model), _unwrapped(base)
    shapes = {name: tuple(tensor.shape) for name, tensor in base.named_parameters()}
    names = _names(model)
    _require_same_tensors(model, shapes)
    faults: list[Fault] = []
    found = [
        (name, tensor, _classify(model, name, tensor, shapes[name], roles or {}, names[id(tensor)], faults))
        for name, tensor in model.named_parameters()
    ]
    raise_all(faults)
    rescale = rescale and not getattr(model, MARK, False)
    start = dict(base.named_parameters())
    settings = (lr, weight_decay, eps)
    tensors = []
    for name, tensor, shape in found:
        assert shape is not None, "faults were raised"
        tied = len(names[id(tensor)]) > 1 and shape.role == "input"
        factor = _rescale(name, tensor, start[name], shape) if rescale else 1.0
        multiplier = _scale_tied_readout(model, names[id(tensor)], shape) if tied else 1.0
        tensors.append(_tensor(name, tensor, shape, settings, optimizer, factor, multiplier))
    setattr(model, MARK, True)
    return Parametrized(_groups(dict(model.named_parameters()), tensors, optimizer), tuple(tensors))


@dataclass(frozen=True)
class _Shape:
    role: UserRole
    m_in: float
    m_out: float

    @property
    def row(self) -> Row:
        if self.role == "constant":
            return CONSTANT
        return rows_of(ParametrizationConfig(kind="mup", form="table3"))[ROWS[self.role]]

    @property
    def ratios(self) -> dict[Ratio, float]:
        """m_N is the dimension that the tensor shares with the residual stream."""
        return {"m_in": self.m_in, "m_out": self.m_out, "m_N": self.m_in if self.role == "readout" else self.m_out, "m_L": 1.0}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's or DistributedDataParallel's wrapper, whose names it changes."""
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and len(list(model.children())) == 1:
            return _unwrapped(inner)
    return model


def _names(model: nn.Module) -> dict[int, list[str]]:
    """Every name of every tensor: a tied one has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names[id(tensor)].append(name)
    return names


def _require_same_tensors(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    faults = [
        Fault(name, "is in the model and not in `base`", "build both by one function") for name in own.keys() - shapes.keys()
    ]
    faults += [
        Fault(name, "is in `base` and not in the model", "build both by one function") for name in shapes.keys() - own.keys()
    ]
    faults += [
        Fault(
            name, f"has shape {own[name]}, and {shapes[name]} in `base`", "only lengths may differ, not the number of dimensions"
        )
        for name in own.keys() & shapes.keys()
        if len(own[name]) != len(shapes[name])
    ]
    raise_all(faults)


def _classify(
    model: nn.Module,
    name: str,
    tensor: Tensor,
    base: tuple[int, ...],
    roles: Mapping[str, UserRole],
    names: list[str],
    faults: list[Fault],
) -> _Shape | None:
    """The tensor's role, from the module that holds it and from which of its dimensions differ from the base's."""
    grow = [now / before for now, before in zip(tensor.shape, base, strict=True)]
    owner = model.get_submodule(name.rpartition(".")[0])
    if len(grow) < 2:
        ratio = math.prod(grow)
        return _Shape("vector" if ratio != 1 else "constant", 1.0, ratio)
    if isinstance(owner, (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *CONVOLUTIONS)):
        m_out, m_in = grow[0], math.prod(grow[1:])
    elif isinstance(owner, TRANSPOSED):
        m_out, m_in = grow[1], grow[0] * math.prod(grow[2:])
    elif isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        m_out, m_in = grow[1], 1.0
    else:
        return _raw(name, tensor, grow, type(owner).__name__, roles, faults)
    if len(names) > 1 and isinstance(owner, nn.Linear) and m_out == 1 and any(_is_embedding(model, other) for other in names):
        m_in, m_out = 1.0, m_in
    return _Shape(_role(m_in, m_out), m_in, m_out)


def _is_embedding(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), (nn.Embedding, nn.EmbeddingBag))


def _role(m_in: float, m_out: float) -> UserRole:
    if m_in != 1 and m_out != 1:
        return "hidden"
    return "input" if m_out != 1 else "readout" if m_in != 1 else "constant"


def _raw(
    name: str, tensor: Tensor, grow: list[float], owner: str, roles: Mapping[str, UserRole], faults: list[Fault]
) -> _Shape | None:
    """A parameter that no module of torch explains: the user says what it is, unless nothing or only one reading is possible."""
    if all(ratio == 1 for ratio in grow):
        return _Shape("constant", 1.0, 1.0)
    role = roles.get(name)
    larger = max(grow, key=lambda ratio: abs(math.log(ratio)))
    if role == "hidden":
        two = [ratio for ratio in grow if ratio != 1]
        if len(two) == 2 and two[0] == two[1]:
            return _Shape("hidden", two[0], two[0])
    elif role is not None:
        return _Shape(role, larger if role == "readout" else 1.0, 1.0 if role in ("readout", "constant") else larger)
    cure = f"say how it is used: roles={{{name!r}: 'input'}} (looked up or added), 'readout', 'vector', or 'hidden'"
    what = f"is a raw parameter of {owner} of shape {tuple(tensor.shape)}, of which {sum(r != 1 for r in grow)} dimensions grow"
    faults.append(
        Fault(name, what, cure if role is None else "make it the weight of a Linear: its fan_in and fan_out are then known")
    )
    return None


def _rescale(name: str, tensor: Tensor, base: Tensor, shape: _Shape) -> float:
    """Bring the initial values to what the rule says, from the sizes that the user's own init gave here and at the base."""
    if base.is_meta:
        raise ConfigError(
            Fault(name, "`base` holds no values (it is on the meta device)", "build it on the CPU, or rescale=False")
        )
    before, now = _rms(base), _rms(tensor)
    if before == 0 or now == 0 or shape.role == "constant":
        return 1.0
    factor = value(shape.row.init_std, shape.ratios) / _power_seen(now / before, tensor, base, shape)
    if factor != 1.0:
        with torch.no_grad():
            tensor.mul_(factor)
    return factor


def _power_seen(ratio: float, tensor: Tensor, base: Tensor, shape: _Shape) -> float:
    """How the user's init changed with width: a half power of a fan where the draws allow it, else the ratio as it is."""
    candidates = [m**power for m in (shape.m_in, shape.m_out) for power in (0.0, -0.5, -1.0, 0.5)]
    near = min(candidates, key=lambda candidate: abs(math.log(ratio / candidate)))
    error = math.sqrt(0.5 / tensor.numel() + 0.5 / base.numel())
    return near if abs(math.log(ratio / near)) < 5 * error else ratio


def _rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


class _ScaleInput:
    """A forward pre-hook that multiplies a module's input; a class, so that it can be copied and pickled."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] * self.factor, *inputs[1:])


def _scale_tied_readout(model: nn.Module, names: list[str], shape: _Shape) -> float:
    """The forward multiplier of Table 8 on the module that reads out with the embedding's matrix."""
    power: Powers = rows_of(ParametrizationConfig(kind="mup"))["readout"].multiplier
    factor = value(power, shape.ratios)
    readouts = [model.get_submodule(name.rpartition(".")[0]) for name in names if not _is_embedding(model, name)]
    for module in readouts:
        if not any(isinstance(hook, _ScaleInput) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(_ScaleInput(factor))
    return factor


def _tensor(
    name: str,
    tensor: Tensor,
    shape: _Shape,
    settings: tuple[float, float, float],
    optimizer: OptimizerKind,
    factor: float,
    multiplier: float,
) -> ParametrizedTensor:
    lr, weight_decay, eps = settings
    row, ratios = shape.row, shape.ratios
    powers = row.sgd_lr if optimizer == "sgd" else row.lr
    assert powers is not None, "muP has a rule for SGD for every role"
    rate = value(powers, ratios)
    # Whatever the optimizer, lr * weight_decay is kept constant; under AdamW that is the row's own rule.
    decay = weight_decay * (value(row.weight_decay, ratios) if optimizer != "sgd" else 1 / rate) if row.decays else 0.0
    return ParametrizedTensor(
        name, tuple(tensor.shape), shape.role, shape.m_in, shape.m_out, lr * rate, decay, eps * value(row.eps, ratios), factor,
        multiplier, formula("lr", powers), row.source,
    )  # fmt: skip


def _groups(
    parameters: Mapping[str, Tensor], tensors: list[ParametrizedTensor], optimizer: OptimizerKind
) -> list[dict[str, Any]]:
    """Groups of tensors with equal settings: few, so that the optimizer's step stays fast."""
    merged: dict[tuple[float, float, float], list[str]] = defaultdict(list)
    for item in tensors:
        merged[item.lr, item.weight_decay, item.eps if optimizer == "adamw" else 0.0].append(item.name)
    return [
        {"params": [parameters[name] for name in names], "names": names, "lr": lr, "weight_decay": decay}
        | ({"eps": eps} if optimizer == "adamw" else {})
        for (lr, decay, eps), names in merged.items()
    ]
