"""A recommendation for a large run as a result: quantities, numbered steps, warnings, and its views.

Owns Quantity, Step and Recommendation. `analysis.recommend` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from analysis.batch_choice import BatchChoice
from analysis.layouts import LayoutPlan
from analysis.lr_exponents import LrExponent
from analysis.target import TargetConfig
from scaling.config import RunConfig
from scaling.parametrization import TensorRule

Interval = tuple[float, float]
NO_INTERVAL: Interval = (math.nan, math.nan)


@dataclass(frozen=True)
class Quantity:
    """A recommended value; the interval is at 90 %, NaN when the study does not determine one."""

    value: float
    interval: Interval = NO_INTERVAL

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "interval": list(self.interval)}


@dataclass(frozen=True)
class Step:
    """One line of the derivation."""

    title: str
    formula: str
    value: str
    source: str
    assumption: str = ""


@dataclass(frozen=True)
class Recommendation:
    """What to type into the large run, how it was derived, and how far to trust it."""

    run: RunConfig
    """The large run; its optimizer holds the values at the base shape, as `mutransfer train` and `explain` take them."""
    target: TargetConfig
    parametrization: str
    hyperparameters: Mapping[str, Quantity]
    tensors: tuple[TensorRule, ...]
    predicted_loss: Quantity
    extrapolation: Mapping[str, float]
    """Target over the largest measured, or over the smallest where it lies below; 1 in between; an axis each."""
    warnings: tuple[str, ...]
    steps: tuple[Step, ...]
    wrong_lr_costs: Mapping[str, float] = field(default_factory=dict)
    """Loss given up at twice and at half the LR, nats, measured at the largest width."""
    lr_exponents: Mapping[str, LrExponent] = field(default_factory=dict)
    """Over tokens, batch and depth: what was measured and what is a published rule."""
    batch: BatchChoice | None = None
    """What was measured of the batch, where something was."""
    layout: LayoutPlan | None = None
    """How the run may lie on its devices; None without their name."""

    @property
    def fits(self) -> bool:
        """Whether a layout surely fits the devices; True where they are not named."""
        return self.layout is None or bool(self.layout.ranked and self.layout.ranked[0].fits == "yes")

    def _interval_of(self) -> str:
        """What the LR's interval is made of."""
        moved = [item for item in self.lr_exponents.values() if item.ratio != 1]
        parts = ["the study's 90 % interval"]
        parts += ["those of its exponents"] if any(item.measured for item in moved) else []
        parts += ["the horizon exponent's range"] if any(not item.measured and item.ruled for item in moved) else []
        return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target.model_dump(mode="json"),
            "parametrization": self.parametrization,
            "hyperparameters": {name: quantity.to_dict() for name, quantity in self.hyperparameters.items()},
            "tensors": [rule.to_dict() for rule in self.tensors],
            "predicted_loss": self.predicted_loss.to_dict(),
            "extrapolation": dict(self.extrapolation),
            "wrong_lr_costs": dict(self.wrong_lr_costs),
            "lr_exponents": {axis: exponent.to_dict() for axis, exponent in self.lr_exponents.items()},
            "batch": self.batch.to_dict() if self.batch else None,
            "layout": self.layout.to_dict(3) if self.layout else None,
            "warnings": list(self.warnings),
            "steps": [vars(step) for step in self.steps],
            "run": self.run.model_dump(mode="json"),
        }

    def __str__(self) -> str:
        lr = self.hyperparameters["lr"]
        lines = [
            f"Recommended for {self.target.name} (width {self.run.model.width}, depth {self.run.model.depth}, "
            f"{self.run.tokens:,} tokens): base LR 2^{math.log2(lr.value):.2f} = {lr.value:.3g} "
            f"({lr_range(lr.interval)}: {self._interval_of()}), {self.parametrization}",
            "",
        ]
        for index, step in enumerate(self.steps, start=1):
            lines.append(f"{index:2}. {step.title}: {step.value}")
            lines.append(f"      {step.formula}   [{step.source}]")
            if step.assumption:
                lines.append(f"      assumes: {step.assumption}")
        if self.warnings:
            lines += ["", "Warnings", *(f"  ! {warning}" for warning in self.warnings)]
        return "\n".join(lines)


def lr_range(interval: Interval) -> str:
    """Ends of an interval of learning rates in words; an end of 0 or infinity is no bound."""
    low, high = interval
    return f"{f'{low:.2g}' if low > 0 else 'unbounded'} to {f'{high:.2g}' if math.isfinite(high) else 'unbounded'}"
