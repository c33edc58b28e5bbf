"""The large run that a recommendation is for: `configs/targets/*.yaml`. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from scaling.config_base import Depth, Fraction, Frozen, Positive, PositiveFloat, fault_at


class TargetGpus(Frozen):
    """The machine; nothing is assumed about a GPU that is not stated."""

    count: Positive
    device: str | None = None
    """h100, a100, ... (analysis.hardware), for which layouts are searched; another needs peak_tflops and memory_gib."""
    peak_tflops: PositiveFloat | None = None
    """Dense peak of one GPU at the training precision, in TFLOP/s, from its data sheet."""
    memory_gib: PositiveFloat | None = None
    """Usable memory of one GPU, where it is not listed."""
    link_gb_s: PositiveFloat | None = None
    """To GPUs of its node, GB/s in one direction."""
    network_gb_s: PositiveFloat | None = None
    """To other nodes, GB/s in one direction."""
    memory_gb_s: PositiveFloat | None = None
    """Of a GPU's own memory, GB/s."""
    node_gpus: Positive | None = None
    """GPUs of a node; 8 where the device is not listed."""
    mfu: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the peak that training reaches, as measured; default: what the planner expects of `device`."""
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
    exponents: Literal["measured", "rule"] = "measured"
    """measured: where the study varied tokens, batch or depth, the LR's exponents are its own; rule: horizon_exponent alone."""
    betas: Literal["keep", "scale"] = "keep"
    """scale: 1 - beta goes with batch ratio / tokens ratio (Complete(d)P)."""

    @model_validator(mode="after")
    def _machine_is_named(self) -> Self:
        gpus = self.gpus
        if gpus is not None and gpus.device is None:
            for key in ("memory_gib", "link_gb_s", "network_gb_s", "memory_gb_s", "node_gpus"):
                if getattr(gpus, key) is not None:
                    raise fault_at("gpus", f"{key} is read with gpus.device alone; name the device")
        return self

    @model_validator(mode="after")
    def _range_holds_exponent(self) -> Self:
        low, high = self.horizon_exponent_range
        if not low <= self.horizon_exponent <= high:
            raise ValueError(f"horizon_exponent {self.horizon_exponent} lies outside horizon_exponent_range [{low}, {high}]")
        return self
