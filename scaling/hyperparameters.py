"""The hyperparameters beside the LR that a study may vary along a line, by name: where they stand in a RunConfig, and their scale.

Owns HYPERPARAMETERS. Torch-free. A record carries their values, a table has columns of these names, and everything that fits, plots
or searches them works in octaves of `Hyperparameter.coordinate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from scaling.config import OptimizerKind, RunConfig


@dataclass(frozen=True)
class Hyperparameter:
    """One named value of a RunConfig, swept on a logarithmic scale."""

    name: str
    path: tuple[str, ...]
    words: str
    """What its coordinate is the log2 of."""
    complement: bool = False
    """The scale is that of 1 - value: 0.9, 0.95 and 0.975 are an octave apart."""
    octaves: float = 1.0
    """Over which a loss is expected to change as much as over one octave of the LR; only says how far apart a search looks."""
    unused_by: tuple[OptimizerKind, ...] = ()

    def of(self, run: RunConfig) -> float | None:
        """Its value in `run`; None where it is turned off."""
        value = reduce(getattr, self.path, run)
        return float(value) if isinstance(value, int | float) else None

    def coordinate(self, value: float) -> float:
        """log2 of the value, or of 1 - value."""
        return math.log2(1.0 - value) if self.complement else math.log2(value)

    def value(self, coordinate: float) -> float:
        """The value at a coordinate."""
        exact = math.exp2(coordinate)
        return 1.0 - exact if self.complement else exact


_LR_MULTIPLIERS = tuple(
    Hyperparameter(f"lr_multipliers.{group}", ("optimizer", "lr_multipliers", group), f"{group} LR multiplier")
    for group in ("embedding", "hidden", "gain", "readout")
)
_MULTIPLIERS = tuple(
    Hyperparameter(name, ("parametrization", name), name.replace("_", " "))
    for name in ("embedding_multiplier", "readout_multiplier", "attention_multiplier", "residual_multiplier")
)
_STDS = tuple(
    Hyperparameter(name, ("parametrization", "init", name), name.replace("_std", " init std"), octaves=2.0)
    for name in ("embedding_std", "readout_std")
)
HYPERPARAMETERS: dict[str, Hyperparameter] = {
    item.name: item
    for item in (
        Hyperparameter("weight_decay", ("optimizer", "weight_decay"), "weight decay", octaves=2.0),
        Hyperparameter("beta1", ("optimizer", "beta1"), "1 - beta1", complement=True),
        Hyperparameter("beta2", ("optimizer", "beta2"), "1 - beta2", complement=True, octaves=2.0, unused_by=("sgd",)),
        Hyperparameter("eps", ("optimizer", "eps"), "eps", octaves=4.0, unused_by=("sgd", "lion")),
        Hyperparameter("clip_norm", ("optimizer", "clip_norm"), "clipping norm", octaves=2.0),
        Hyperparameter("warmup_fraction", ("schedule", "warmup_fraction"), "warm-up fraction", octaves=2.0),
        Hyperparameter("decay_fraction", ("schedule", "decay_fraction"), "decay fraction"),
        *_LR_MULTIPLIERS,
        *_MULTIPLIERS,
        *_STDS,
    )
}


def hyperparameters(run: RunConfig) -> dict[str, float]:
    """Name -> value of all that are turned on in `run`."""
    values = {name: item.of(run) for name, item in HYPERPARAMETERS.items()}
    return {name: value for name, value in values.items() if value is not None}


def with_values(run: RunConfig, values: Mapping[str, float]) -> RunConfig:
    """`run` with hyperparameters set by name. Raises pydantic's ValidationError where the run would not exist."""
    settings = run.model_dump()
    for name, value in values.items():
        *parents, key = HYPERPARAMETERS[name].path
        reduce(dict.__getitem__, parents, settings)[key] = value
    return RunConfig.model_validate(settings)
