"""The large run that a recommendation is for: `configs/targets/*.yaml`. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from scaling.config_base import Depth, Fraction, Frozen, Positive, PositiveFloat


class TargetGpus(Frozen):
    """The machine; nothing is assumed about a GPU that is not stated."""

    count: Positive
    peak_tflops: PositiveFloat | None = None
    """Dense peak of one GPU at the training precision, in TFLOP/s, from its data sheet."""
    mfu: Fraction | None = None
    """Share of the peak that training reaches; measure it, or leave it out."""
    micro_batch_size: Positive | None = None
    """Sequences that one GPU holds at once."""


class TargetConfig(Frozen):
    """Shape and budget of the large run. What is left out is as in the study."""

    name: str = "target"
    width: Annotated[int, Field(ge=1, le=2**20, strict=True)]
    depth: Depth | None = None
    context: Annotated[int, Field(ge=2, le=2**31 - 1, strict=True)] | None = None
    vocab_size: Positive | None = None
    tokens: Annotated[int, Field(ge=1, le=10**16, strict=True)]
    """Training tokens in all."""
    batch_tokens: Positive | None = None
    """Tokens a step."""
    gpus: TargetGpus | None = None
    horizon_exponent: Annotated[float, Field(ge=0, le=1)] = 0.5
    """LR goes with (tokens ratio / batch ratio)^-exponent; Complete(d)P (2512.22382) Table 1."""
    horizon_exponent_range: tuple[Fraction, Fraction] = (0.3, 0.7)
    """What the exponent may be (Bjorck et al. 2409.19913); widens the LR's interval."""
    betas: Literal["keep", "scale"] = "keep"
    """scale: 1 - beta goes with batch ratio / tokens ratio (Complete(d)P)."""

    @model_validator(mode="after")
    def _range_holds_exponent(self) -> Self:
        low, high = self.horizon_exponent_range
        if not low <= self.horizon_exponent <= high:
            raise ValueError(f"horizon_exponent {self.horizon_exponent} lies outside horizon_exponent_range [{low}, {high}]")
        return self
