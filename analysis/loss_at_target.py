"""The loss that a large run should end with: measured at its width, bracketed over widths, or a scaling law's; or why none is predicted.

Owns TargetLoss and `loss_at_target`. Nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.loss_by_width import predict_loss
from analysis.recommendation import Quantity, Step
from analysis.results import interval_text
from scaling.accounting import parameter_counts
from scaling.config import RunConfig
from scaling.model_config import ModelConfig

if TYPE_CHECKING:
    from analysis.fit_result import ScalingLawFit

SAME = 0.01
"""Tokens and batches that differ by less count as the study's."""


@dataclass(frozen=True)
class TargetLoss:
    """A predicted loss, NaN without a step where nothing is predicted."""

    loss: Quantity
    step: Step | None = None
    warnings: tuple[str, ...] = ()


def loss_at_target(
    template: RunConfig,
    model: ModelConfig,
    tokens_ratio: float,
    batch_ratio: float,
    losses: Mapping[int, Quantity],
    law: ScalingLawFit | None,
) -> TargetLoss:
    """The loss of `model` trained as `template` at these ratios of tokens and batch; losses: width -> best loss of the study."""
    study = template.model
    differ = {
        "tokens": abs(tokens_ratio - 1) > SAME,
        "batch": abs(batch_ratio - 1) > SAME,
        "depth": model.depth != study.depth,
        "vocabulary": model.vocab_size != study.vocab_size,
        "context": model.context != study.context,
    }
    others = [name for name, found in differ.items() if found]
    if not others:
        return _by_width(losses, model.width)
    if law is not None and not {"vocabulary", "context"} & set(others):
        return _by_law(law, model, template.tokens * tokens_ratio, [name for name in others if name != "tokens"])
    reason = f"{', '.join(others)} of the target differ{'s' if len(others) == 1 else ''} from the study's"
    known = "which measured one" if law is None else "and the law was fitted to the study's"
    return TargetLoss(Quantity(math.nan), None, (f"no loss is predicted: {reason}, {known}",))


def _by_width(losses: Mapping[int, Quantity], width: int) -> TargetLoss:
    measured = losses.get(width)
    if measured is not None and math.isfinite(measured.value):
        value = f"{measured.value:.3f}, 90 % interval {interval_text(measured.interval, 3)} nats per token"
        return TargetLoss(
            measured, Step("Predicted loss", "the best loss at this width", value, "this study, measured at this width")
        )
    prediction = predict_loss({size: loss.value for size, loss in losses.items()}, width)
    low, high = prediction.interval
    bracket = f"between {low:.3f} and {high:.3f} nats per token (a bracket, not a 90 % interval)"
    value = "unknown" if math.isnan(prediction.value) else bracket
    step = Step("Predicted loss", prediction.formula, value, "this study's best losses by width", prediction.assumption)
    return TargetLoss(Quantity(prediction.value, prediction.interval), step)


def _by_law(law: ScalingLawFit, model: ModelConfig, tokens: float, unread: list[str]) -> TargetLoss:
    """unread: what differs and the law does not read."""
    counted = law.table.conventions.get("params", "not stated")
    counts = parameter_counts(model)
    params = float(counts.non_embedding if counted == "non-embedding" else counts.total)
    sizes = {"params": params, "tokens": tokens, "flops": 6.0 * params * tokens}
    (predicted,) = law.predict(**{name: value for name, value in sizes.items() if name in law.law.columns})
    low, high = predicted.run_interval
    value = f"{predicted.loss.value:.3f}, 90 % interval {interval_text((low, high), 3)} nats per token for one run"
    formula = f"law {law.law.name} at {params:.4g} parameters and {tokens:.4g} tokens"
    assumption = f"a law that does not read {' and '.join(unread)}" if unread else "the law goes on to this size"
    flags = [f"predicted loss: {flag}" for flag in (*law.flags, *predicted.flags)]
    step = Step("Predicted loss", formula, value, f"{law.law.source}; fitted to this table", assumption)
    return TargetLoss(Quantity(predicted.loss.value, (low, high)), step, tuple(flags))
