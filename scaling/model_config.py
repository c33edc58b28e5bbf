"""The model's shape: a family without its width, and its members. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from scaling.config_base import Depth, Frozen, Positive, PositiveFloat, fault_at


class ModelFamily(Frozen):
    """A decoder transformer without its width: the shape that a study holds fixed while the width grows."""

    depth: Depth = 2
    """Number of blocks."""
    head_dim: Positive | None = None
    """Entries per attention head; heads grow with the width. Default 16, unless num_heads is given."""
    num_heads: Positive | None = None
    """Give this instead of head_dim to keep the number of heads and let head_dim grow with the width."""
    queries_per_kv: Positive = 1
    """Query heads that share one key/value head (grouped-query attention); 1 is multi-head attention."""
    mlp_ratio: Annotated[float, Field(gt=0, le=1024)] = 4.0
    """MLP width over model width; the product is rounded to a multiple of 8."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    norm_gain: bool = False
    """Whether the RMSNorms carry a trained gain per entry; Lingle (2404.05728) finds that such gains break transfer."""
    qk_norm: bool = False
    """RMSNorm with a gain on queries and keys, per head."""
    tied_embeddings: bool = False
    """The readout uses the embedding's matrix."""
    vocab_size: Positive | None = None
    """Default: the tokenizer's."""
    context: Annotated[int, Field(ge=2, le=2**31 - 1, strict=True)] = 128
    """Tokens a sequence."""
    rope_base: PositiveFloat = 10_000.0

    @model_validator(mode="after")
    def _one_head_rule(self) -> Self:
        if self.head_dim is not None and self.num_heads is not None:
            raise fault_at("num_heads", "give head_dim (heads grow with the width) or num_heads (head_dim grows), not both")
        if self.head_dim is not None and self.head_dim % 2:
            raise fault_at("head_dim", f"head_dim {self.head_dim} is odd; rotary positions rotate pairs of entries")
        return self

    def at(self, width: int, depth: int | None = None) -> ModelConfig:
        """The member of the family at `width` (and `depth`, when given)."""
        fields = {name: getattr(self, name) for name in ModelFamily.model_fields}
        return ModelConfig(**{**fields, "width": width, "depth": self.depth if depth is None else depth})

    def check_width(self, width: int) -> str | None:
        """Why this family has no member at `width`, in words with a cure, or None."""
        try:
            self.at(width)
        except ValueError as error:
            return _first_message(error)
        return None


class ModelConfig(ModelFamily):
    """A decoder transformer, every dimension known."""

    width: Positive
    """Entries of the residual stream (d_model)."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        unit, name = (self.num_heads, "num_heads") if self.num_heads else (self.head_size, "head_dim")
        if self.width % unit:
            below, above = self.width // unit * unit, (self.width // unit + 1) * unit
            near = f"{below} or {above}" if below else str(above)
            raise fault_at("width", f"width {self.width} is not divisible by {name} {unit}; nearest widths that are: {near}")
        if self.head_size % 2:
            raise fault_at("width", f"head_dim {self.head_size} is odd; rotary positions rotate pairs of entries")
        if self.heads % self.queries_per_kv:
            groups = f"groups of queries_per_kv {self.queries_per_kv}"
            what = f"{self.heads} query heads (width {self.width}) cannot be shared evenly by {groups}"
            raise fault_at("queries_per_kv", what)
        return self

    @property
    def head_size(self) -> int:
        """Entries per head."""
        return self.width // self.num_heads if self.num_heads else (self.head_dim or 16)

    @property
    def heads(self) -> int:
        return self.width // self.head_size

    @property
    def kv_heads(self) -> int:
        return self.heads // self.queries_per_kv

    @property
    def mlp_width(self) -> int:
        return 8 * max(1, round(self.mlp_ratio * self.width / 8))

    @property
    def vocabulary(self) -> int:
        """Vocabulary size, which planning resolves before a run is made."""
        assert self.vocab_size is not None, "vocab_size is resolved from the tokenizer before a model is built"
        return self.vocab_size


def _first_message(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return str(errors()[0]["msg"]).removeprefix("Value error, ")
