"""What a coordinate check measures, as data: `scaling.coordinates` makes it, `analysis.coordinates` judges it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    @property
    def growing(self) -> int:
        """How many of the tensor's dimensions grow with width."""
        small, large = self.shapes[min(self.shapes)], self.shapes[max(self.shapes)]
        return sum(b > a for a, b in zip(small, large, strict=True))


@dataclass(frozen=True)
class Measurement:
    """Everything that `analysis.coordinates.judge` needs."""

    rows: tuple[Row, ...]
    tensors: tuple[TensorFacts, ...]
    steps: int
    head_dims: dict[str, dict[int, int]] = field(default_factory=dict)
    """Module -> width -> entries of a head, where attention was seen."""
