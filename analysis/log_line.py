"""A power law of one or several sizes, log y = k + a log N + b log D: fitted robustly or by least squares, with exact
intervals.

Owns `LogLine` (a law of analysis.fit_engine) and `PowerLaw`, its fit. y is in any unit; sizes are positive. Intervals are by
profile likelihood with n - p degrees of freedom (the F test for least squares), so that they hold the scatter of y about the
law, whatever it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.fit_engine import Loss, minimise
from analysis.fit_result import Estimate, estimates
from analysis.fit_uncertainty import LEVEL, Fitted, profile
from analysis.law import Array, Inputs, Law

FAR = 1e3
"""Bound of |theta|, in logs: none that a table of sizes could meet."""


@dataclass(frozen=True)
class LogLine(Law):
    """exp(theta_0 + sum theta_i (log x_i - centre_i)); public: the factor k, and one exponent for each column."""

    @classmethod
    def of(cls, columns: tuple[str, ...]) -> LogLine:
        return cls("power law", "k " + " ".join(f"{name}^{name}_exponent" for name in columns), "", columns)

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("k", *self.columns)

    @property
    def positive(self) -> frozenset[str]:
        return frozenset({"k"})

    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        rows = self.design(np.empty(0), x)
        values = np.exp(np.clip(theta @ rows.T, -600, 600))
        return values, values[:, :, None] * rows

    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        middle = np.array([centres[name] for name in self.columns])
        k = np.exp(np.clip(theta[:, 0] - theta[:, 1:] @ middle, -600, 600))
        return np.concatenate([k[:, None], theta[:, 1:]], axis=1)

    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:  # noqa: ARG002
        ends = np.full(1 + len(self.columns), FAR)
        return -ends, ends

    def shapes(self, x: Inputs) -> Array:  # noqa: ARG002
        return np.empty((1, 0))

    def design(self, shape: Array, x: Inputs) -> Array:  # noqa: ARG002
        logs = [x[name] for name in self.columns]
        return np.stack([np.ones_like(logs[0]), *logs], axis=1)

    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:  # noqa: ARG002
        return np.asarray(weights)


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """k N^a ...: k and exponents with intervals; noise: scatter of one point about it, in logs; points: how many it was fitted
    to.
    """

    columns: tuple[str, ...]
    k: Estimate
    exponents: Mapping[str, Estimate]
    noise: float
    points: int
    success: bool
    level: float
    fitted: Fitted = field(repr=False)

    def __call__(self, **sizes: float | Array) -> Array:
        """Values at sizes, without intervals."""
        return np.asarray(
            self.k.value
            * np.prod([np.asarray(sizes[name], dtype=float) ** self.exponents[name].value for name in self.columns], axis=0)
        )

    def predict(self, **sizes: float | Array) -> list[Estimate]:
        """Values of the law at sizes, with intervals of the law (not of one more point about it)."""
        x = Inputs.of({name: sizes[name] for name in self.columns}, self.fitted.x.centres)
        found = profile(self.fitted, lambda theta: np.asarray(np.log(self.fitted.law.value(theta, x)[0])), self.level)
        return estimates(found, [True] * len(found.values))

    def formula(self, unit: str = "") -> str:
        powers = " ".join(f"{name}^{self.exponents[name].value:.4g}" for name in self.columns)
        return f"{self.k.value:.4g} {powers}{' ' + unit if unit else ''}"

    def to_dict(self) -> dict[str, Any]:
        exponents = {name: estimate.to_dict() for name, estimate in self.exponents.items()}
        return {"k": self.k.to_dict(), "exponents": exponents, "scatter": self.noise, "points": self.points}


def power_law(sizes: Mapping[str, Array], values: Array, loss: Loss, level: float = LEVEL) -> PowerLaw:
    """Fit values (n,) to a power of each size (n,); n must be at least the number of exponents plus one."""
    columns = tuple(sizes)
    law, x = LogLine.of(columns), Inputs.of(sizes)
    bounds, weights = law.bounds(0.0, x), np.ones(len(values))
    theta = np.asarray(np.linalg.lstsq(law.design(np.empty(0), x), np.log(values), rcond=None)[0], dtype=np.float64)[None]
    for step in loss.path:
        minima = minimise(law, x, values, weights, theta, step, bounds)
        theta = minima.theta
    fitted = Fitted(law, x, values, weights, loss, bounds, theta[0])

    def quantities(batch: Array) -> Array:
        public = law.public(batch, x.centres)
        return np.concatenate([np.log(public[:, :1]), public[:, 1:]], axis=1)

    k, *exponents = estimates(profile(fitted, quantities, level), [True] + [False] * len(columns))
    named = dict(zip(columns, exponents, strict=True))
    return PowerLaw(columns, k, named, fitted.noise(), len(values), bool(minima.converged[0]), level, fitted)
