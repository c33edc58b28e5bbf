"""Rows of an equality table: what the rules say of a tensor, what the engine holds, and how far they are apart.

`Table.of` joins both by the engine's names, and a tensor that stands on one side alone is an error. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from scaling.parametrization import TensorRule

QUANTITIES = ("lr", "weight_decay", "eps", "init")
PRECISION = 1e-12
"""Values that were read and are nearer than this, relatively, are equal: a product of two doubles in another order."""
SIGMAS = 5.0
"""A measured std may be this many standard errors from the rule's."""


@dataclass(frozen=True)
class Held:
    """What an engine holds for a tensor: the peak LR, decay and eps of its group, and how it starts (`init_trace.Init` as a dict)."""

    lr: float
    weight_decay: float
    eps: float
    init: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One quantity of one tensor. `error`: standard error of a measured value as a share of it; None where it was read, not measured."""

    rules: float
    engine: float
    error: float | None = None

    @property
    def difference(self) -> float:
        """(engine - rules) / rules; 0 is equality of double-precision numbers."""
        if self.engine == self.rules:
            return 0.0
        return (self.engine - self.rules) / self.rules if self.rules else math.inf

    @property
    def differs(self) -> bool:
        """Whether it is another value: read and further apart than `PRECISION`, or measured and beyond `SIGMAS` standard errors."""
        return abs(self.difference) > (PRECISION if self.error is None else SIGMAS * self.error)


@dataclass(frozen=True)
class Row:
    """A tensor in the engine, the toolkit's tensor that it is or holds, and the four quantities."""

    tensor: str
    ours: str
    multiplier: float
    """The factor that the folded form moved into the tensor; 1 where the model applies it."""
    gain: bool
    """init is the value that a gain starts at, not a std."""
    lr: Cell
    weight_decay: Cell
    eps: Cell
    init: Cell


@dataclass(frozen=True)
class Table:
    """One run in one engine. expected: the quantities that the export itself says are otherwise there, with the reason."""

    engine: str
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        engine: str,
        title: str,
        rules: Iterable[tuple[str, TensorRule, float]],
        held: Mapping[str, Held],
        notes: Iterable[str] = (),
        expected: Mapping[str, str] | None = None,
    ) -> Table:
        """rules: the engine's name of a tensor, its rule in the exported form, and the folded multiplier. Raises ValueError for strays."""
        rows = tuple(_row(name, rule, factor, held) for name, rule, factor in rules)
        strays = set(held) - {row.tensor for row in rows}
        if strays:
            raise ValueError(f"{engine}: no rule for {sorted(strays)}")
        return cls(engine, title, rows, tuple(notes), expected or {})

    def largest(self, quantity: str) -> float:
        """Largest relative difference, by size, of what was read; measured stds are left to `largest_measured`."""
        return max((abs(cell.difference) for cell in self.cells(quantity) if cell.error is None), default=0.0)

    def largest_measured(self, quantity: str) -> float | None:
        """Largest difference of measured values in standard errors, or None where all were read."""
        found = [abs(cell.difference) / cell.error for cell in self.cells(quantity) if cell.error is not None]
        return max(found, default=None)

    def cells(self, quantity: str) -> list[Cell]:
        return [getattr(row, quantity) for row in self.rows]

    def unexpected(self) -> list[str]:
        """Quantities that differ without a stated reason, and stated reasons that nothing differs by, in words."""
        found = []
        for quantity in QUANTITIES:
            differs = any(cell.differs for cell in self.cells(quantity))
            if differs and quantity not in self.expected:
                found.append(f"{self.engine}, {self.title}: {quantity} differs by {self.largest(quantity):.3g}")
            if quantity in self.expected and not differs:
                found.append(f"{self.engine}, {self.title}: {quantity} is said to differ and does not")
        return found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Table:
        rows = [Row(**row | {name: Cell(**row[name]) for name in QUANTITIES}) for row in values["rows"]]
        return cls(values["engine"], values["title"], tuple(rows), tuple(values["notes"]), values["expected"])


def _row(name: str, rule: TensorRule, factor: float, held: Mapping[str, Held]) -> Row:
    if name not in held:
        raise ValueError(f"the engine has no tensor {name}")
    theirs, gain = held[name], math.isnan(rule.init_std)
    return Row(
        tensor=name,
        ours=rule.name,
        multiplier=factor,
        gain=gain,
        lr=Cell(rule.lr, theirs.lr),
        weight_decay=Cell(rule.weight_decay, theirs.weight_decay),
        eps=Cell(rule.eps, theirs.eps),
        init=_init(rule, factor, theirs.init),
    )


def _init(rule: TensorRule, factor: float, init: Mapping[str, Any]) -> Cell:
    if math.isnan(rule.init_std):
        if init["constant"] is None:
            raise ValueError(f"{rule.name} starts at {factor} by the rules, and is drawn in the engine")
        return Cell(factor, init["constant"])
    if init["constant"] is not None:
        # Filled with zeros is the draw of std 0.
        return Cell(rule.init_std, 0.0 if init["constant"] == 0 else math.nan)
    return Cell(rule.init_std, init["std"], init["error"])
