"""The shape and the tokens that a budget of FLOP is best spent on: a fitted law's split, in a width that the model family has.

Owns BudgetShape and `shape_of_budget`. FLOP are counted as 6 N D, as in the fit; N by the fit's own convention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.recommendation import Step
from scaling.accounting import parameter_counts
from scaling.errors import DataError, Fault
from scaling.model_config import ModelConfig

if TYPE_CHECKING:
    from analysis.fit_result import ScalingLawFit, Split

FLOP_PER_PARAM_TOKEN = 6.0
WIDEST = 2**20


@dataclass(frozen=True)
class BudgetShape:
    """A width whose parameters are nearest to the best ones, and the tokens that the budget pays for with them."""

    width: int
    tokens: int
    step: Step
    warnings: tuple[str, ...]
    trusted: bool = True
    """Whether nothing casts doubt on the law or on its split, as `budget` judges it."""


def shape_of_budget(result: ScalingLawFit, flops: float, how: str, family: ModelConfig, batch_tokens: int) -> BudgetShape:
    """Split `flops` by `result`, and find the width of `family`, at its depth, that is nearest in the log of the parameters.

    how: where the budget comes from, in words; batch_tokens: tokens come in steps of it. Raises DataError where the law splits nothing, and
    where no width of the family is near.
    """
    split = result.optimal(flops)
    counted = result.table.conventions.get("params", "not stated")
    width, params = nearest_width(family, split.params.value, counted == "non-embedding")
    tokens = math.floor(flops / (FLOP_PER_PARAM_TOKEN * params) / batch_tokens) * batch_tokens
    if tokens < batch_tokens:
        raise DataError(
            Fault(f"budget {flops:g} FLOP", f"pays for less than one batch of {batch_tokens} tokens", "a larger budget")
        )
    flags, trusted = (*result.flags, *split.flags), result.trusted and not split.flags
    warnings = [] if trusted else ["the split of the budget is not to be trusted, and width and tokens with it: exit code 1"]
    warnings += [f"the budget's split: {flag}" for flag in flags]
    if counted == "not stated":
        what = "whether the law's parameters count embeddings is not stated: all tensors are counted in the width"
        warnings.append(f"{what} (--params-include embedding or non-embedding)")
    away = params / split.params.value
    if not 0.8 < away < 1.25:
        near = f"the nearest width at depth {family.depth} has {params:,} parameters, {away:.3g} times the best"
        warnings.append(f"{near}: give another depth")
    return BudgetShape(width, tokens, _step(result, split, flops, how, f"width {width}: {params:,} parameters, {tokens:,} tokens"),
                       tuple(warnings), trusted)  # fmt: skip


def _step(result: ScalingLawFit, split: Split, flops: float, how: str, value: str) -> Step:
    formula = f"{flops:.4g} FLOP = 6 N D ({how}); best {split.params.value:.4g} parameters {split.params.cells()[2]}"
    formula += f" and {split.tokens.value:.4g} tokens {split.tokens.cells()[2]} by the law {result.law.name}"
    assumption = "depth is the target's; the law goes on to this budget"
    return Step("Size and tokens of the budget", formula, value, f"{result.law.source}; fitted to this table", assumption)


def nearest_width(family: ModelConfig, params: float, non_embedding: bool) -> tuple[int, int]:
    """The width whose parameters are nearest to `params` in the log, and how many it has. Raises DataError where the smallest has more
    than twice as many.
    """
    # Heads come in groups; with a fixed number of heads, head_dim is even for rotary positions.
    unit = 2 * family.num_heads if family.num_heads else family.head_size * family.queries_per_kv
    depth = family.depth

    def count(parts: int) -> int:
        counts = parameter_counts(family.at(parts * unit, depth))
        return counts.non_embedding if non_embedding else counts.total

    low, high = 1, max(WIDEST // unit, 1)
    if count(low) > 2 * params:
        what = f"of {params:.3g} parameters are fewer than half of the smallest model at depth {depth}, {count(low):,}"
        raise DataError(Fault("the budget's best size", what, "a larger budget, or a smaller depth or vocabulary"))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= params else (low, middle)
    best = min((low, high), key=lambda parts: abs(math.log(count(parts) / params)))
    return best * unit, count(best)
