"""What a study varies beside width and LR: levels, at each of which the LR is swept anew, and lines through a cell's best LR.

Owns Axis, its names, and how a value of one enters a run's settings. Torch-free.

Depth, batch and tokens change what the best LR is, so each of their values is a cell with an LR curve of its own. Weight decay, warm-up,
betas and the factors on LRs are taken to be separable from the LR near its optimum: each is searched along a line, the LR held at its
best, and has an optimum and a transfer verdict of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from scaling.config_base import Frozen, Positive, PositiveFloat, fault_at
from scaling.hyperparameters import HYPERPARAMETERS, Hyperparameter

AxisName = Literal[
    "depth", "batch_size", "steps", "weight_decay", "beta1", "beta2", "eps", "clip_norm", "warmup_fraction", "decay_fraction",
    "lr_multipliers.embedding", "lr_multipliers.hidden", "lr_multipliers.gain", "lr_multipliers.readout",
    "embedding_multiplier", "readout_multiplier", "attention_multiplier", "residual_multiplier", "embedding_std", "readout_std",
]  # fmt: skip
LEVELS: Mapping[AxisName, str] = {"depth": "depth", "batch_size": "batch_tokens", "steps": "tokens"}
"""Axes of levels, with the column of a table that tells their levels apart. batch_size: at the same number of tokens, steps follow."""

LATTICE = 0.25
"""Between values that a line's search may try, in units of Hyperparameter.octaves."""

At = tuple[tuple[AxisName, float], ...]
"""Where a run lies off the study's own settings: (axis, value) pairs."""


class Axis(Frozen):
    """One axis of a study."""

    values: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    """depth, batch_size, steps: the levels beside the study's own."""
    low: PositiveFloat | None = None
    """Others: the line's end, never left."""
    high: PositiveFloat | None = None
    widths: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    """Where it is varied; default: at every width of the study."""
    precision: PositiveFloat = 0.5
    """Lines: octaves; done when half the 90 % interval of the best value is as small."""
    max_runs: Annotated[int, Field(ge=3, le=10_000, strict=True)] = 6
    """Lines: runs at most, at each width."""

    @field_validator("values", "widths")
    @classmethod
    def _distinct(cls, values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if values is not None and len(set(values)) != len(values):
            raise ValueError(f"a value is given twice: {list(values)}")
        return None if values is None else tuple(sorted(values))

    @model_validator(mode="after")
    def _levels_or_line(self) -> Self:
        if self.values is None and (self.low is None or self.high is None):
            raise fault_at("low", "an axis has values (depth, batch_size, steps), or low and high")
        if self.values is not None and (self.low is not None or self.high is not None):
            raise fault_at("values", "an axis has values (depth, batch_size, steps), or low and high, not both")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise fault_at("low", f"low {self.low:g} does not lie below high {self.high:g}")
        return self

    def check(self, name: AxisName, widths: Iterable[int]) -> str | None:
        """Why this is no axis called `name` of a study with these widths, or None."""
        if name in LEVELS and self.values is None:
            return "the LR is swept anew at each of its levels: give values, a list"
        if name not in LEVELS and self.values is not None:
            return "is searched along a line: give low and high instead of values"
        strange = sorted(set(self.widths or ()) - set(widths))
        return f"its widths {strange} are none of the study's" if strange else None


class Line:
    """A hyperparameter's line at one parametrization: positions in octaves from the study's own value, which is position 0."""

    def __init__(self, name: AxisName, axis: Axis, own: float) -> None:
        """own: the study's value. Raises ValueError where no line goes through it."""
        assert axis.low is not None, "a line has ends"
        assert axis.high is not None, "a line has ends"
        self.name: AxisName = name
        self.own = own
        self.hyperparameter: Hyperparameter = HYPERPARAMETERS[name]
        if self.hyperparameter.complement and axis.high >= 1:
            raise ValueError(f"high {axis.high:g} is not below 1")
        if not axis.low <= own <= axis.high:
            raise ValueError(
                f"the study's own value {own:g} lies outside of {axis.low:g} to {axis.high:g}: a line goes through it"
            )
        self.lattice = LATTICE * self.hyperparameter.octaves
        """Octaves: positions are multiples of it."""
        low, high = sorted(self.position(value) for value in (axis.low, axis.high))
        self.low, self.high = (
            math.ceil(low / self.lattice - 1e-9) * self.lattice,
            math.floor(high / self.lattice + 1e-9) * self.lattice,
        )
        if self.high - self.low < 1.5 * self.lattice:
            step = 2.0**self.lattice
            raise ValueError(
                f"{axis.low:g} to {axis.high:g} holds fewer than three values a factor of {step:.3g} apart: widen it"
            )

    def position(self, value: float) -> float:
        return self.hyperparameter.coordinate(value) - self.hyperparameter.coordinate(self.own)

    def value(self, position: float) -> float:
        """The value at a position; the study's own, to the last bit, at 0."""
        return self.own if position == 0 else self.hyperparameter.value(self.hyperparameter.coordinate(self.own) + position)


def describe(at: At) -> str:
    """ "weight_decay 0.1, depth 8", or nothing for the study's own settings."""
    return ", ".join(f"{name} {value:.4g}" for name, value in at)
