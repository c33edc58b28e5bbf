"""The loss that a large run should end with: measured at its size, bracketed over widths, or a scaling law's; or why none is predicted.

Owns TargetLoss and `loss_at_target`. A law predicts only along axes that it has read: those that vary in the rows that it was fitted to.
Nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.loss_by_width import predict_loss
from analysis.measured import Measured
from analysis.recommendation import Quantity, Step
from analysis.results import interval_text
from scaling.accounting import parameter_counts
from scaling.config import RunConfig
from scaling.model_config import ModelConfig

if TYPE_CHECKING:
    from analysis.fit_result import Prediction, ScalingLawFit

SAME = 0.01
"""Tokens, batches and parameters that differ by less count as the study's."""
PARAMS_NOT_STATED = (
    "whether the law's parameters count embeddings is not stated: all tensors of the target are counted "
    "(--params-include embedding or non-embedding)"
)


@dataclass(frozen=True)
class TargetLoss:
    """A predicted loss, NaN where nothing is predicted, with the steps that derive it."""

    loss: Quantity
    steps: tuple[Step, ...] = ()
    warnings: tuple[str, ...] = ()


NOTHING = Quantity(math.nan)


def loss_at_target(
    template: RunConfig,
    model: ModelConfig,
    tokens: float,
    batch_tokens: float,
    losses: Mapping[int, Quantity],
    measured: Measured,
    law: ScalingLawFit | None,
) -> TargetLoss:
    """The loss of `model` trained as `template` on `tokens` in batches of `batch_tokens`.

    losses: width -> best loss at the template's tokens, batch and depth; law: fitted to runs at the template's batch.
    """
    study = template.model
    differ = {
        "tokens": not _same(tokens, template.tokens),
        "batch": not _same(batch_tokens, template.batch_tokens),
        "depth": model.depth != study.depth,
        "vocabulary": model.vocab_size != study.vocab_size,
        "context": model.context != study.context,
    }
    others = [name for name, found in differ.items() if found]
    data = [name for name in ("vocabulary", "context") if name in others]
    if not others:
        return _with_law(_by_width(losses, model.width), law, model, tokens)
    cell = None if data else measured.at(model.width, model.depth, batch_tokens, tokens)
    if cell is not None:
        loss = Quantity(cell.best_loss, cell.best_loss_interval)
        return _with_law(_as_measured(loss, "size"), law, model, tokens)
    if law is None or data:
        return TargetLoss(NOTHING, (), (_unknown(others, data, measured),))
    return _by_law(law, template, model, tokens, others, measured)


def _same(value: float, own: float) -> bool:
    return abs(value / own - 1) <= SAME


def _unknown(others: Sequence[str], data: Sequence[str], measured: Measured) -> str:
    """Why no loss is predicted without a law that could."""
    known = "; ".join(f"{name} {measured.words(name)}" for name in others if name in measured.levels)
    reason = (
        f"{_list(others)} of the target {'differs' if others == ['depth'] or others == ['batch'] else 'differ'} from the study's"
    )
    if data:
        return f"no loss is predicted: {reason}, and no law reads {_list(data)}"
    cure = "" if "batch" in others else "; --law auto asks a law that is fitted to all of them"
    helps = all(measured.several(name) for name in others)
    return f"no loss is predicted: {reason}, at which its losses are compared ({known}){cure if helps else ''}"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _as_measured(loss: Quantity, what: str) -> TargetLoss:
    value = f"{loss.value:.3f}, 90 % interval {interval_text(loss.interval, 3)} nats per token"
    step = Step("Predicted loss", f"the best loss at this {what}", value, f"this study, measured at this {what}")
    return TargetLoss(loss, (step,))


def _by_width(losses: Mapping[int, Quantity], width: int) -> TargetLoss:
    measured = losses.get(width)
    if measured is not None and math.isfinite(measured.value):
        return _as_measured(measured, "width")
    prediction = predict_loss({size: loss.value for size, loss in losses.items()}, width)
    low, high = prediction.interval
    bracket = f"between {low:.3f} and {high:.3f} nats per token (a bracket, not a 90 % interval)"
    value = "unknown" if math.isnan(prediction.value) else bracket
    step = Step("Predicted loss", prediction.formula, value, "this study's best losses by width", prediction.assumption)
    return TargetLoss(Quantity(prediction.value, prediction.interval), (step,))


def _with_law(found: TargetLoss, law: ScalingLawFit | None, model: ModelConfig, tokens: float) -> TargetLoss:
    """What the study says of this size comes first; a law that was asked for stands beside it."""
    if law is None or _unread(law, model, ("width",), None):
        note = () if law is None else (f"the law {law.law.name} says nothing here: {_unread(law, model, ('width',), None)[0]}",)
        return TargetLoss(found.loss, found.steps, (*found.warnings, *note))
    predicted = _predict(law, model, tokens)
    title = "Loss by the law, beside it"
    step = _law_step(law, predicted, title, "what the study measured at the target's tokens, batch and depth is taken")
    return TargetLoss(found.loss, (*found.steps, step), (*found.warnings, *_law_warnings(law, predicted)))


def _by_law(
    law: ScalingLawFit, template: RunConfig, model: ModelConfig, tokens: float, others: Sequence[str], measured: Measured
) -> TargetLoss:
    """The law's loss, where it has read all that differs; else why there is none, and the law's at the study's batch."""
    unread = _unread(law, model, ("width", *others), measured)
    if unread:
        return TargetLoss(NOTHING, (), tuple(f"no loss is predicted: {reason}" for reason in unread))
    predicted = _predict(law, model, tokens)
    if "batch" in others:
        at = f"{predicted.loss.value:.3f} {interval_text(predicted.run_interval, 3)}"
        reason = f"no law reads the batch; at the study's, {template.batch_tokens:,} tokens, the law {law.law.name} has {at}"
        return TargetLoss(NOTHING, (), (f"no loss is predicted: {reason}", *_law_warnings(law, predicted)))
    step = _law_step(law, predicted, "Predicted loss", "the law goes on to this size")
    return TargetLoss(Quantity(predicted.loss.value, predicted.run_interval), (step,), _law_warnings(law, predicted))


SIZES: Mapping[str, str] = {"width": "params", "depth": "params", "tokens": "tokens"}
"""By which column of its table a law reads an axis; the batch by none."""


def _unread(law: ScalingLawFit, model: ModelConfig, axes: Sequence[str], measured: Measured | None) -> list[str]:
    """Why the law says nothing along some of `axes`: it lacks their size, or its rows have one of it."""
    name, table = law.law.name, law.table.columns
    reasons = []
    for axis in (name for name in axes if name in SIZES):
        size = SIZES[axis]
        if not {size, "flops"} & set(law.law.columns):
            reasons.append(f"the law {name} does not read {axis}")
        elif size not in table:
            reasons.append(f"the law {name} is of FLOP alone, and its table does not say their {size}")
        elif _same(np.max(table[size]), np.min(table[size])):
            if axis != "width" or not _same(np.max(table[size]), _counted(law, model)):
                one = "number of tokens" if size == "tokens" else "model size"
                reasons.append(f"the law {name} was fitted to runs of one {one}, and has not read {axis}")
        elif axis == "depth" and measured is not None and not measured.several("depth"):
            reasons.append(
                f"the law {name} was fitted to runs of one depth, whose parameters grow by width, and has not read depth"
            )
    return reasons


def _counted(law: ScalingLawFit, model: ModelConfig) -> float:
    """Parameters of `model` as the law's table counts them."""
    counts = parameter_counts(model)
    non_embedding = law.table.conventions.get("params") == "non-embedding"
    return float(counts.non_embedding if non_embedding else counts.total)


def _predict(law: ScalingLawFit, model: ModelConfig, tokens: float) -> Prediction:
    params = _counted(law, model)
    sizes = {"params": params, "tokens": tokens, "flops": 6.0 * params * tokens}
    (predicted,) = law.predict(**{name: value for name, value in sizes.items() if name in law.law.columns})
    return predicted


def _law_step(law: ScalingLawFit, predicted: Prediction, title: str, assumption: str) -> Step:
    value = f"{predicted.loss.value:.3f}, 90 % interval {interval_text(predicted.run_interval, 3)} nats per token for one run"
    at = " and ".join(f"{size:.4g} {name}" for name, size in predicted.at.items())
    return Step(title, f"law {law.law.name} at {at}", value, f"{law.law.source}; fitted to this table", assumption)


def _law_warnings(law: ScalingLawFit, predicted: Prediction) -> tuple[str, ...]:
    stated = law.table.conventions.get("params", "not stated") != "not stated" or law.law.columns == ("tokens",)
    flags = tuple(f"predicted loss: {flag}" for flag in (*law.flags, *predicted.flags))
    return flags if stated else (*flags, PARAMS_NOT_STATED)
