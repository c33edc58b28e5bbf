"""What each tensor of a user's module is: from the module that holds it and from which of its dimensions grow.

Owns `Shape` and `classify`; `scaling.parametrize` turns them into settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from scaling.config import ParametrizationConfig
from scaling.errors import Fault
from scaling.shapes import Role, TensorSpec
from scaling.tables import Ratio, Row, rows_of

UserRole = Literal["input", "hidden", "readout", "vector", "constant"]
"""How a tensor's dimensions grow: out only, both, in only, its one, none."""
ROWS: Mapping[UserRole, Role] = {"input": "embedding", "hidden": "hidden", "readout": "readout", "vector": "block_gain"}
CONSTANT = Row("does not grow: same value at every width", sgd_lr={})
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMALIZATIONS = (WeightNorm, SpectralNorm)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Shape:
    """How one tensor grows, and its rules' row."""

    role: UserRole
    m_in: float
    m_out: float
    form: Literal["table3", "table8"] = "table3"

    def row(self, dims: int) -> Row:
        """Its rules; dims: how many dimensions the tensor has. Vectors and scalars do not decay, growing or not."""
        if self.role == "constant":
            return CONSTANT if dims > 1 else replace(CONSTANT, decays=False)
        return rows_of(ParametrizationConfig(kind="mup", form=self.form))[ROWS[self.role]]

    @property
    def ratios(self) -> dict[Ratio, float]:
        """m_N is the dimension that the tensor shares with the residual stream."""
        return {"m_in": self.m_in, "m_out": self.m_out, "m_N": self.m_in if self.role == "readout" else self.m_out, "m_L": 1.0}

    def spec(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        """The tensor as the rules see it; fans in torch's layout, as torch.optim.Muon reads them."""
        fan_out, fan_in = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        return TensorSpec(name, shape, ROWS.get(self.role, "block_gain"), fan_in, fan_out)


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Every name of every tensor: a tied one has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names[id(tensor)].append(name)
    return names


@dataclass(frozen=True)
class Dimension:
    """One dimension of a tensor: its length over the base's, and whether it grows with width at all."""

    ratio: float
    grows: bool


def classify(
    model: nn.Module,
    name: str,
    tensor: Tensor,
    dims: Sequence[Dimension],
    roles: Mapping[str, UserRole],
    names: list[str],
    faults: list[Fault],
) -> Shape | None:
    """The tensor's role, from the module that holds it and from which of its dimensions grow."""
    owner = model.get_submodule(name.rpartition(".")[0])
    last = name.rpartition(".")[2]
    if any(isinstance(hook, NORMALIZATIONS) for hook in owner._forward_pre_hooks.values()) and last.startswith("weight_"):
        what = f"is part of a weight that {type(owner).__name__} normalizes in its forward pass: its size is not its own"
        faults.append(Fault(name, what, "take weight_norm or spectral_norm away, or leave this module out"))
        return None
    if len(dims) < 2:
        return Shape("vector" if any(dim.grows for dim in dims) else "constant", 1.0, math.prod(dim.ratio for dim in dims))
    if isinstance(owner, nn.MultiheadAttention) and last in ("bias_k", "bias_v"):
        fan_out, fan_in = [dims[-1]], []
    elif isinstance(owner, (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *CONVOLUTIONS)):
        fan_out, fan_in = [dims[0]], list(dims[1:])
    elif isinstance(owner, TRANSPOSED) and owner.groups == owner.in_channels:
        # Depthwise: every output channel reads one input channel.
        fan_out, fan_in = [dims[0]], list(dims[2:])
    elif isinstance(owner, TRANSPOSED):
        fan_out, fan_in = [dims[1]], [dims[0], *dims[2:]]
    elif isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        fan_out, fan_in = [dims[1]], []
    else:
        return _raw(name, tensor, dims, type(owner).__name__, roles, faults)
    reads_out = any(dim.grows for dim in fan_in) and not any(dim.grows for dim in fan_out)
    if len(names) > 1 and isinstance(owner, nn.Linear) and reads_out and any(is_embedding(model, other) for other in names):
        fan_out, fan_in = list(fan_in), []
    m_in, m_out = math.prod(dim.ratio for dim in fan_in), math.prod(dim.ratio for dim in fan_out)
    return Shape(_role(any(dim.grows for dim in fan_in), any(dim.grows for dim in fan_out)), m_in, m_out)


def takes_role(model: nn.Module, name: str) -> bool:
    """Whether the tensor's use cannot be read from the module that holds it."""
    owner = model.get_submodule(name.rpartition(".")[0])
    known = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *CONVOLUTIONS, *TRANSPOSED, nn.Embedding, nn.EmbeddingBag)
    return not isinstance(owner, known)


def is_embedding(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), (nn.Embedding, nn.EmbeddingBag))


def _role(grows_in: bool, grows_out: bool) -> UserRole:
    if grows_in and grows_out:
        return "hidden"
    return "input" if grows_out else "readout" if grows_in else "constant"


def _raw(
    name: str, tensor: Tensor, dims: Sequence[Dimension], owner: str, roles: Mapping[str, UserRole], faults: list[Fault]
) -> Shape | None:
    """A parameter that no module of torch explains: the user says what it is, unless it does not grow."""
    growing = [dim.ratio for dim in dims if dim.grows]
    if not growing:
        return Shape("constant", 1.0, 1.0)
    role = roles.get(name)
    larger = max(growing, key=lambda ratio: abs(math.log(ratio)))
    if role == "hidden":
        if len(growing) == 2 and growing[0] == growing[1]:
            return Shape("hidden", growing[0], growing[0])
    elif role is not None:
        return Shape(role, larger if role == "readout" else 1.0, 1.0 if role in ("readout", "constant") else larger)
    cure = f"say how it is used: roles={{{name!r}: 'input'}} (looked up or added), 'readout', 'vector', or 'hidden'"
    what = f"is a raw parameter of {owner} of shape {tuple(tensor.shape)}, of which {len(growing)} dimensions grow"
    faults.append(
        Fault(name, what, cure if role is None else "make it the weight of a Linear: its fan_in and fan_out are then known")
    )
    return None
