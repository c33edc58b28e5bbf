"""muP for any nn.Module: what grows is read from two instances, the init is carried over, the groups are ordinary ones.

Owns `parametrize`. The rules are those of `scaling.parametrization`; a readout takes Tensor Programs V's (2203.03466) Table 3 form, which
needs no multiplier in the forward pass, so that nothing can be lost by deepcopy, state_dict, torch.compile or FSDP. Only a readout that
is tied to an embedding needs one (Table 8): a forward pre-hook of the readout module.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from scaling.base_shapes import BaseShapes, base_shapes, is_mup_readout
from scaling.config import OptimizerConfig, OptimizerKind, ParametrizationConfig, WeightDecayRule
from scaling.errors import ConfigError, Fault, raise_all
from scaling.optimizer import WITH_EPS, AnyOptimizer, flattened
from scaling.parametrization import optimizer_rule
from scaling.tables import rows_of, value
from scaling.user_roles import CONVOLUTIONS, TRANSPOSED, Dimension, Shape, UserRole, classify, is_embedding, names_of, takes_role

MARK = "_mutransfer_rescaled"


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
    optimizer: OptimizerKind = "adamw"
    """What moves it: under muon, AdamW moves all but the hidden matrices."""


@dataclass(frozen=True)
class Parametrized:
    """Parameter groups for an ordinary torch optimizer, and the table of what every tensor got."""

    groups: list[dict[str, Any]]
    """With `names`, and `peak_lr`, the group's LR before any schedule."""
    tensors: tuple[ParametrizedTensor, ...]

    def groups_of(self, optimizer: OptimizerKind) -> list[dict[str, Any]]:
        """The groups that one optimizer moves: under muon torch.optim.Muon takes those of "muon", AdamW those of "adamw"."""
        return [group for group in self.groups if group["optimizer"] == optimizer]

    @staticmethod
    def check(optimizer: AnyOptimizer) -> None:
        """Raise ConfigError when a scheduler has taken the groups' ratios away; to be called after its step."""
        bare = [at for at, group in enumerate(optimizer.param_groups) if "peak_lr" not in group or "names" not in group]
        if bare:
            what = f"group {bare[0]} was not made by parametrize: it has no `peak_lr` and `names`"
            raise ConfigError(Fault("optimizer", what, "give parametrize the whole model, and its optimizer all of .groups"))
        faults = [
            Fault(
                ", ".join(group["names"][:3]),
                f"has learning rate {group['lr']:.4g}, which is not its peak {group['peak_lr']:.4g} times the others' common factor",
                "use a scheduler that multiplies each group's own learning rate (torch's LambdaLR does)",
            )
            for group in flattened(optimizer)
        ]
        raise_all(faults)

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
    model: nn.Module, *, base: nn.Module | str | Path | None = None, delta: nn.Module | None = None,
    lr: float, weight_decay: float = 0.0, eps: float = 1e-8,
    optimizer: OptimizerKind = "adamw", weight_decay_rule: WeightDecayRule = "constant", adamw_lr_factor: float = 1.0,
    roles: Mapping[str, UserRole] | None = None, rescale: bool = True,
) -> Parametrized:  # fmt: skip
    """Bring `model` under muP, with hyperparameters that were found on `base`.

    base: the same model at the base width, freshly initialized, or a base-shapes file of the mup package; left out for a model that is
    built of mup's layers and has been given its base shapes. lr, weight_decay and eps are the values at the base width, and `base` itself
    is trained with them unchanged. delta: the same model at any other width, by which dimensions are known to grow where `model` has the
    base's width itself (muon needs to know). adamw_lr_factor: under muon, AdamW's LR over Muon's. roles: for raw parameters of two or more
    dimensions, by name. rescale: put the factors on the initial values; False for weights that were trained. A second call changes no
    values. Raises ConfigError with everything that cannot be classified and the cure.
    """
    model, base = _unwrapped(model), _unwrapped(base) if isinstance(base, nn.Module) else base
    delta = None if delta is None else _unwrapped(delta)
    _refuse_unready(model, base, delta)
    settings = _settings(
        kind=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        weight_decay_rule=weight_decay_rule,
        adamw_lr_factor=adamw_lr_factor,
    )
    names = names_of(model)
    known = base_shapes(model, base, delta)
    _refuse_another_base(model, known)
    faults = _mup_readouts_with_a_base(model, known) + _refuse_roles(model, roles or {})
    if optimizer == "muon" and not any(any(grows) for grows in known.grows.values()) and not faults:
        cure = "give delta=: the same model at another width"
        faults.append(Fault("muon", "needs the hidden matrices, and the model has the width of `base`: nothing grows", cure))
    found = [
        (name, tensor, classify(model, name, tensor, _dimensions(tensor, name, known), roles or {}, names[id(tensor)], faults))
        for name, tensor in model.named_parameters()
    ]
    raise_all(faults)
    if optimizer == "muon" and not any(
        shape.role == "hidden" and tensor.dim() == 2 for _, tensor, shape in found if shape is not None
    ):
        raise ConfigError(Fault("muon", "moves hidden matrices, and the model has none", "use adamw"))
    rescale = rescale and not known.by_mup and not getattr(model, MARK, False)
    tensors = []
    for name, tensor, shape in found:
        assert shape is not None, "faults were raised"
        if known.by_mup:
            shape = Shape(shape.role, shape.m_in, shape.m_out, form="table8")
        factor = _rescale(model, name, tensor, known, shape) if rescale else 1.0
        multiplier = _multiplier(model, names[id(tensor)], shape)
        tensors.append(_tensor(name, tensor, known.shapes[name], shape, settings, factor, multiplier))
    setattr(model, MARK, dict(known.shapes))
    return Parametrized(_groups(dict(model.named_parameters()), tensors), tuple(tensors))


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's or a data-parallel wrapper, whose names it changes."""
    # torch.compile's wrapper by name: its module takes a second to import.
    compiled = type(model).__name__ == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), nn.Module)
    if not compiled and not isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return model
    inner = model.get_submodule("_orig_mod" if compiled else "module")
    return _unwrapped(inner)


def _refuse_unready(model: nn.Module, base: object, delta: object) -> None:
    """Raise ConfigError for arguments of another kind, and for tensors that have no values or no finite ones."""
    faults = []
    if not isinstance(base, nn.Module | str | Path | None):
        faults.append(
            Fault("base", f"is a {type(base).__name__}", "give the same model at the base width, or a base-shapes file")
        )
    if not isinstance(delta, nn.Module | None):
        faults.append(Fault("delta", f"is a {type(delta).__name__}", "give the same model at another width"))
    for where, module in (("model", model), ("base", base), ("delta", delta)):
        if isinstance(module, nn.Module):
            lazy = [name for name, tensor in module.named_parameters() if isinstance(tensor, UninitializedParameter)]
            faults += [Fault(f"{where}: {name}", "has no shape yet", "pass a batch through the model first") for name in lazy]
    raise_all(faults)
    empty = [
        Fault(name, "has no values (it is on the meta device)", "build the model on a device")
        for name, t in model.named_parameters()
        if t.is_meta
    ]
    raise_all(empty)
    bad = [name for name, tensor in model.named_parameters() if not bool(torch.isfinite(tensor.detach()).all())]
    raise_all([Fault(name, "has values that are not finite", "initialize it first") for name in bad])


def _refuse_roles(model: nn.Module, roles: Mapping[str, UserRole]) -> list[Fault]:
    """Roles are for raw parameters of two or more dimensions: what would be ignored is an error."""
    own, faults = dict(model.named_parameters()), []
    known = ", ".join(get_args(UserRole))
    for name, role in roles.items():
        where = f"roles[{name!r}]"
        if name not in own:
            near = difflib.get_close_matches(name, own, n=1)
            faults.append(Fault(where, "names no parameter", f"did you mean {near[0]!r}?" if near else ""))
        elif role not in get_args(UserRole):
            faults.append(Fault(where, f"{role!r} is no role", f"use one of {known}"))
        elif own[name].dim() < 2:
            faults.append(
                Fault(
                    where, "is a vector or scalar: it is added or multiplied", "make a readout the weight of nn.Linear(width, 1)"
                )
            )
        elif not takes_role(model, name):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            faults.append(
                Fault(
                    where, f"is a parameter of {owner}, whose use is known", "leave it out, or hold the tensor as a raw parameter"
                )
            )
    return faults


def _settings(**values: Any) -> OptimizerConfig:
    try:
        return OptimizerConfig.model_validate(values)
    except ValidationError as error:
        names = {"kind": "optimizer"}
        faults = []
        for item in error.errors():
            key = str(item.get("ctx", {}).get("key") or (item["loc"][0] if item["loc"] else ""))
            faults.append(Fault(names.get(key, key), str(item["msg"])))
        raise ConfigError(*faults) from None


def _refuse_another_base(model: nn.Module, known: BaseShapes) -> None:
    """Values and hooks were made for one base: settings for another one would not fit them."""
    before = getattr(model, MARK, None)
    if isinstance(before, dict) and before != dict(known.shapes):
        name = next(name for name, shape in known.shapes.items() if before.get(name) != shape)
        what = f"was parametrized with base shape {before.get(name)}, and now with {known.shapes[name]}"
        raise ConfigError(Fault(name, what, "build the model anew"))


def _dimensions(tensor: Tensor, name: str, known: BaseShapes) -> list[Dimension]:
    lengths = zip(tensor.shape, known.shapes[name], known.grows[name], strict=True)
    return [Dimension(now / before, grows) for now, before, grows in lengths]


def _mup_readouts_with_a_base(model: nn.Module, known: BaseShapes) -> list[Fault]:
    """mup's readouts scale their input by themselves: with shapes from elsewhere that would be done twice or by other ratios."""
    if known.by_mup:
        return []
    names = [name for name, module in model.named_modules() if is_mup_readout(module)]
    return [Fault(name, "is a readout of the mup package", "leave `base` out, or make it nn.Linear") for name in names]


def _rescale(model: nn.Module, name: str, tensor: Tensor, known: BaseShapes, shape: Shape) -> float:
    """Bring the initial values to what the rule says, from the sizes that the user's own init gave here and at the base."""
    base = known.values.get(name)
    if base is not None and base.is_meta:
        raise ConfigError(
            Fault(name, "`base` holds no values (it is on the meta device)", "build it on the CPU, or rescale=False")
        )
    now = _rms(tensor)
    before = now if base is None else _rms(base)
    if before == 0 or now == 0 or shape.role == "constant":
        return 1.0
    if base is None:
        seen = _power_of_torchs_init(model, name, tensor, known)
    else:
        seen = _power_seen(model, name, tensor, base, shape, known.shapes)
    factor = value(shape.row(tensor.dim()).init_std, shape.ratios) / seen
    if factor != 1.0:
        with torch.no_grad():
            tensor.mul_(factor)
    return factor


def _fans(model: nn.Module, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """fan_in and fan_out as torch.nn.init counts them, of a weight or of the weight beside a bias; None for other tensors."""
    prefix, _, last = name.rpartition(".")
    owner = model.get_submodule(prefix)
    if last not in ("weight", "bias") or not isinstance(owner, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)):
        return None
    shape = shapes[f"{prefix}." * bool(prefix) + "weight"]
    return math.prod(shape[1:]), shape[0] * math.prod(shape[2:])


def _torchs_std(fan_in: int, _fan_out: int) -> float:
    """Uniform within 1 / sqrt(fan_in): what Linear and the convolutions start with, weight and bias."""
    return math.sqrt(1 / (3 * fan_in))


KNOWN_INITS: tuple[Callable[[int, int], float], ...] = (
    _torchs_std,
    lambda fan_in, _: math.sqrt(1 / fan_in),
    lambda fan_in, _: math.sqrt(2 / fan_in),
    lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)),
)
"""Standard deviations of torch's own init, of LeCun's, He's and Glorot's."""


def _has_size(tensor: Tensor, std: float) -> bool:
    """Whether its RMS is `std`, as far as its entries can tell."""
    return abs(math.log(max(_rms(tensor), 1e-300) / std)) < 5 * math.sqrt(0.5 / tensor.numel())


def _power_of_torchs_init(model: nn.Module, name: str, tensor: Tensor, known: BaseShapes) -> float:
    """How torch's own init changes with width, where the base's values are not known. Raises ConfigError for another init."""
    now, before = _fans(model, name, _own_shapes(model)), _fans(model, name, known.shapes)
    if now is None or before is None:
        return 1.0
    if not _has_size(tensor, _torchs_std(*now)):
        what = f"does not start as torch starts it (RMS {_rms(tensor):.3g}), and {known.where} does not say how it starts at the base width"
        raise ConfigError(Fault(name, what, "give base=: the same model at the base width, or rescale=False"))
    return _torchs_std(*now) / _torchs_std(*before)


def _own_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes by every name that a tensor has."""
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters(remove_duplicate=False)}


def _power_seen(
    model: nn.Module, name: str, tensor: Tensor, base: Tensor, shape: Shape, shapes: Mapping[str, tuple[int, ...]]
) -> float:
    """How the user's init changed with width.

    Inits with a name are recognized by their size at both widths, which one noisy ratio cannot tell apart in a small tensor; others
    have one std at every width if the draws allow it, else a half power of a fan, else the ratio as it is.
    """
    now, before = _fans(model, name, _own_shapes(model)), _fans(model, name, shapes)
    if now is not None and before is not None:
        for std in KNOWN_INITS:
            if _has_size(tensor, std(*now)) and _has_size(base, std(*before)):
                return std(*now) / std(*before)
    ratio = _rms(tensor) / _rms(base)
    error = math.sqrt(0.5 / tensor.numel() + 0.5 / base.numel())
    if abs(math.log(ratio)) < 5 * error:
        return 1.0
    candidates = [m**power for m in (shape.m_in, shape.m_out) for power in (0.0, -0.5, -1.0, 0.5)]
    near = min(candidates, key=lambda candidate: abs(math.log(ratio / candidate)))
    return near if abs(math.log(ratio / near)) < 5 * error else ratio


def _rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


class _ScaleInput:
    """A forward pre-hook that multiplies a module's input; a class, so that it can be copied and pickled."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(
        self, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (inputs[0] * self.factor, *inputs[1:]), named
        return inputs, named | {name: value * self.factor for name, value in named.items() if name == "input"}


def _multiplier(model: nn.Module, names: list[str], shape: Shape) -> float:
    """Factor on a readout's input: mup's own module applies it, one that is tied to an embedding gets Table 8's as a hook."""
    owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    factor = value(rows_of(ParametrizationConfig(kind="mup"))["readout"].multiplier, shape.ratios)
    if any(is_mup_readout(owner) for owner in owners):
        return factor if shape.role in ("readout", "input") else 1.0
    if shape.role != "input" or len(names) == 1:
        return 1.0
    for name, owner in zip(names, owners, strict=True):
        hooked = any(isinstance(hook, _ScaleInput) for hook in owner._forward_pre_hooks.values())
        if not is_embedding(model, name) and not hooked:
            owner.register_forward_pre_hook(_ScaleInput(factor), with_kwargs=True)
    return factor


def _tensor(
    name: str, tensor: Tensor, base: tuple[int, ...], shape: Shape, settings: OptimizerConfig, factor: float, multiplier: float
) -> ParametrizedTensor:
    own = tuple(tensor.shape)
    row = shape.row(tensor.dim())
    rule = optimizer_rule(shape.spec(name, own), shape.spec(name, base), row, settings, shape.ratios)
    return ParametrizedTensor(
        name, own, shape.role, shape.m_in, shape.m_out, rule.lr, rule.weight_decay, rule.eps, factor, multiplier, rule.formulas["lr"],
        row.source, rule.optimizer,
    )  # fmt: skip


def _groups(parameters: Mapping[str, Tensor], tensors: list[ParametrizedTensor]) -> list[dict[str, Any]]:
    """Groups of tensors with equal settings: few, so that the optimizer's step stays fast."""
    merged: dict[tuple[OptimizerKind, float, float, float], list[str]] = defaultdict(list)
    for item in tensors:
        merged[item.optimizer, item.lr, item.weight_decay, item.eps if item.optimizer in WITH_EPS else 0.0].append(item.name)
    return [
        {"params": [parameters[name] for name in names], "names": names, "lr": lr, "peak_lr": lr, "weight_decay": decay}
        | {"optimizer": kind}
        | ({"eps": eps} if kind in WITH_EPS else {})
        for (kind, lr, decay, eps), names in merged.items()
    ]
