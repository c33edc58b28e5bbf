"""What a scaling law is: the interface `Law`, the inputs that laws read, and the limits that they share.

A law works on a batch of internal parameters theta, shape (S, p), at once: S starts, refits or points of a profile. Inputs enter as
natural logs about their mean (`Inputs`), levels as logs, so that theta is well scaled; `public` turns theta into the numbers that
papers print (A, alpha, ...). Losses are in nats per token, whatever the table's unit is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MAX_EXPONENT = 4.0
"""No published exponent comes near; a fit that ends here has found no power law."""
LOWEST_E = 1e-7
"""E, over the smallest loss, that counts as 0."""
ABOVE = 0.05
"""How far, in logs, E may lie above the smallest loss: runs scatter below it where the law is flat."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Natural logs of the columns that a law reads, minus `centres`; arrays of shape (n,)."""

    logs: Mapping[str, Array]
    centres: Mapping[str, float]

    @classmethod
    def of(cls, columns: Mapping[str, Any], centres: Mapping[str, float] | None = None) -> Inputs:
        """From plain values (floats, so that no product can overflow). centres: those of the fit, to predict with it."""
        logs = {name: np.log(np.atleast_1d(np.asarray(values, dtype=np.float64))) for name, values in columns.items()}
        chosen = dict(centres) if centres is not None else {name: float(value.mean()) for name, value in logs.items()}
        return cls({name: value - chosen[name] for name, value in logs.items()}, chosen)

    def __getitem__(self, name: str) -> Array:
        return self.logs[name]

    def whole(self, name: str) -> Array:
        """Log of the column itself."""
        return np.asarray(self.logs[name] + self.centres[name])


@dataclass(frozen=True)
class Law(ABC):
    """One law.

    columns: what it reads of a table. formula: as papers write it. source: paper.
    """

    name: str
    formula: str
    source: str
    columns: tuple[str, ...]

    @property
    @abstractmethod
    def parameters(self) -> tuple[str, ...]:
        """Names of the public parameters, in the order of `public`."""

    @property
    @abstractmethod
    def positive(self) -> frozenset[str]:
        """Public parameters whose interval is taken in logs."""

    @abstractmethod
    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        """Losses (S, n) and their gradient by theta (S, n, p); the inputs of the laws that split a budget may be (S, n) too."""

    @abstractmethod
    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        """Public parameters (S, q)."""

    @abstractmethod
    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:
        """Lower and upper ends of theta; lowest: the smallest loss of the table."""

    @abstractmethod
    def shapes(self, x: Inputs) -> Array:
        """Grid of the nonlinear parameters to start from (G, s)."""

    @abstractmethod
    def design(self, shape: Array, x: Inputs) -> Array:
        """Columns (n, k) whose non-negative combination is `target`, for one point of the grid."""

    @abstractmethod
    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        """theta (p,) from a point of the grid and the combination's weights."""

    def target(self, shape: Array, losses: Array) -> Array:  # noqa: ARG002
        """What the linear part is fitted to; the losses, unless a law is linear in something else."""
        return losses

    def optimum(self, theta: Array, centres: Mapping[str, float], log_product: float) -> Array | None:  # noqa: ARG002
        """log N_opt (S,) where N D = exp(log_product); None where the law has no such split."""
        return None


def log_at_least(value: float, floor: float) -> float:
    return float(np.log(max(value, floor)))


def stack(parts: Sequence[Array]) -> Array:
    """Gradient (S, n, p) from its p parts."""
    # Each part stays in one piece of memory: what is computed from them goes through them one by one.
    return np.moveaxis(np.stack(np.broadcast_arrays(*parts)), 0, -1)
