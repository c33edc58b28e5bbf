"""What every config shares: immutable models that refuse unknown keys, numbers with bounds, complaints at a key. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

# Bounds keep a slip of the keyboard from filling the memory; strict, since YAML's `yes` is no number.
Positive = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Depth = Annotated[int, Field(ge=1, le=4096, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# Products of several of these stay finite.
Factor = Annotated[float, Field(ge=1e-9, le=1e9)]
LearningRate = Annotated[float, Field(ge=1e-30, le=1e32)]


def fault_at(key: str, message: str) -> PydanticCustomError:
    """A validator's complaint about several keys, to be shown at `key`."""
    return PydanticCustomError("rule", "{message}", {"message": message, "key": key})


class Frozen(BaseModel):
    """Base of every config: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)
