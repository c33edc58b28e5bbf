"""The step that carries a study's LR to a target's tokens, batch and depth: which rule there is, its source, and the words.

Owns HorizonRule and `carried_lr`. The exponents themselves are `analysis.lr_exponents`'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from analysis.lr_exponents import WORDS, LrExponent, doubts, lr_at_target
from analysis.measured import factor_text
from analysis.recommendation import Quantity, Step, lr_range
from analysis.results import Interval, number
from analysis.target import TargetConfig
from scaling.config import OptimizerConfig, RunConfig
from scaling.parametrization import HORIZON_SOURCE

LETTERS: Mapping[str, str] = {"tokens": "a", "batch_tokens": "b", "depth": "c"}


@dataclass(frozen=True)
class HorizonRule:
    """What is known of other numbers of steps S. exponent: of S^-exponent on the LR that was swept, with its range; carried: on weight
    decay and eps, and where `own` on the run's own LR too; fault: why no rule is known, empty where one is."""

    exponent: float
    interval: Interval
    carried: float
    source: str
    own: bool = False
    """Whether the run itself follows the rule (base.steps), so that `exponent` is what is left beside it."""
    fault: str = ""


def horizon_rule(optimizer: OptimizerConfig, base_steps: int | None, target: TargetConfig) -> HorizonRule:
    """The target's exponent, or the run's own where it has base.steps; all zeros for an optimizer without a known rule."""
    if optimizer.horizon_fault:
        return HorizonRule(0.0, (0.0, 0.0), 0.0, "as in the study", fault=optimizer.horizon_fault)
    low, high = target.horizon_exponent_range
    if base_steps:
        own = optimizer.horizon_exponent
        source = HORIZON_SOURCE if own == 0.5 else f"the study's optimizer.horizon_exponent {own:g}"
        # What is left beside the run's own rule is how far off that rule's exponent may be.
        return HorizonRule(0.0, (min(low - own, 0.0), max(high - own, 0.0)), own, source, own=True)
    fields = TargetConfig.model_fields
    stated = (target.horizon_exponent, target.horizon_exponent_range)
    published = stated == (fields["horizon_exponent"].default, fields["horizon_exponent_range"].default)
    source = HORIZON_SOURCE if published else f"the target file: horizon_exponent {stated[0]:g}, between {low:g} and {high:g}"
    return HorizonRule(target.horizon_exponent, (low, high), target.horizon_exponent, source)


def carried_lr(base_lr: Quantity, exponents: Mapping[str, LrExponent], rule: HorizonRule) -> tuple[Quantity, Step, list[str]]:
    """The LR at the target, the step that says so, and what casts doubt on it."""
    moved, (low, high) = lr_at_target(exponents, rule.exponent, rule.interval)
    lr = Quantity(base_lr.value * 2**moved, (base_lr.interval[0] * 2**low, base_lr.interval[1] * 2**high))
    named = {axis: item for axis, item in exponents.items() if axis != "depth" or item.measured}
    changed = [item for item in named.values() if item.ratio != 1]
    measured, ruled = [item for item in changed if item.measured], [item for item in changed if not item.measured]
    by_rule = base_lr.value * 2 ** sum(item.default * math.log2(item.ratio) for item in changed)
    without = (
        "without them it would be" if rule.fault or not any(item.ruled for item in measured) else "the rule alone would give"
    )
    value = f"{lr.value:.3g}; {lr_range(lr.interval)} with the study's 90 % intervals"
    if ruled and not rule.fault:
        value += f" and exponents {number(rule.interval[0])} to {number(rule.interval[1])} of the rule"
    value += f"; {without} {by_rule:.3g}" if measured else ""
    powers = " * ".join(f"({WORDS[axis]} ratio)^{LETTERS[axis]}" for axis in named)
    ratios = ", ".join(f"{WORDS[axis]} x{factor_text(item.ratio)}" for axis, item in named.items())
    formula = f"base LR * {powers}; {ratios}; exponents: {'; '.join(map(str, named.values()))}"
    places = "tokens, batch and depth" if "depth" in named else "tokens and batch"
    step = Step(
        f"LR at the target's {places}", formula, value, _source(measured, ruled, rule), _assumption(measured, ruled, rule)
    )
    return lr, step, [*_apart(lr.value, by_rule, measured, rule), *doubts(exponents, rule.interval)]


def _source(measured: list[LrExponent], ruled: list[LrExponent], rule: HorizonRule) -> str:
    """Where the exponents come from."""
    parts = ["this study"] if measured else []
    return "; ".join([*parts, rule.source] if ruled or not parts else parts)


def _assumption(measured: list[LrExponent], ruled: list[LrExponent], rule: HorizonRule) -> str:
    parts = ["what is measured goes on as it did"] if measured else []
    if ruled and rule.fault:
        parts.append(f"over {_list(ruled)} the LR stays: {rule.fault}")
    elif ruled:
        parts.append("the rest follows a published rule" if measured else "a published rule, not measured in this study")
    batch = any(item.axis != "depth" for item in (*measured, *ruled))
    return "; ".join([*parts, "the batch stays below the critical batch"] if batch else parts)


def _apart(lr: float, by_rule: float, measured: list[LrExponent], rule: HorizonRule) -> list[str]:
    """An LR that the measured exponents move by more than an octave beside what the rule, or leaving it, would give."""
    octaves = abs(math.log2(lr / by_rule))
    if not measured or octaves <= 1:
        return []
    known = not rule.fault and any(item.ruled for item in measured)
    other = f"by the rule, {by_rule:.3g}," if known else f"without them, {by_rule:.3g},"
    what = f"the LR by the study's exponents, {lr:.3g}, and {other} are x{2**octaves:.3g} apart"
    nearer = f"measure nearer to the target's {_list(measured)}"
    return [f"{what}: {nearer}, or say exponents: rule in the target" if known else f"{what}: {nearer}"]


def _list(items: list[LrExponent]) -> str:
    return " and ".join(WORDS[item.axis] for item in items)


def own_rule_step(run: RunConfig, lr: float) -> Step | None:
    """What the run's own rule makes of its base LR at its number of steps; None without base.steps."""
    if run.base.steps is None:
        return None
    ratio, exponent = run.training.steps / run.base.steps, run.optimizer.horizon_exponent
    value = f"{lr * ratio**-exponent:.3g}; the config holds {lr:.3g}, the value at {run.base.steps:,} steps"
    formula = f"base LR * S^-{exponent:g}, S = {run.training.steps:,} / {run.base.steps:,} = {ratio:.4g}"
    return Step("LR at the run's number of steps", formula, value, "the run's own rule, base.steps", "")
