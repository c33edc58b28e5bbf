"""What a coordinate check measures, as data: `scaling.coordinates` makes it, `analysis.coordinates` judges it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

NOT_OPTIMIZED = "none"
"""Optimizer of a tensor that no group holds."""


@dataclass(frozen=True)
class Row:
    """One measured number."""

    width: int
    seed: int
    kind: str
    """"tensor" or "module"."""
    name: str
    statistic: str
    value: float


@dataclass(frozen=True)
class TensorFacts:
    """What does not depend on the seed: a tensor's shape at each width, its owner, and how its optimizer treats it."""

    name: str
    shapes: dict[int, tuple[int, ...]]
    owner: str
    """Class of the module that holds it."""
    optimizer: str
    """Class of the optimizer that holds it at the largest width."""
    not_optimized: set[int] = field(default_factory=set)
    """Widths at which no optimizer's group holds it."""

    @property
    def growing(self) -> int:
        """How many of the tensor's dimensions grow with width."""
        small, large = self.shapes[min(self.shapes)], self.shapes[max(self.shapes)]
        return sum(b > a for a, b in zip(small, large, strict=False))

    @property
    def raw(self) -> bool:
        """Whether it is a parameter of the user's own, not a layer's weight or bias."""
        return self.name.rpartition(".")[2] not in ("weight", "bias")


@dataclass(frozen=True)
class Measurement:
    """Everything that `analysis.coordinates.judge` needs."""

    rows: tuple[Row, ...]
    tensors: tuple[TensorFacts, ...]
    steps: int
    head_dims: dict[str, dict[int, int]] = field(default_factory=dict)
    """Module -> width -> entries of a head, where attention was seen."""
