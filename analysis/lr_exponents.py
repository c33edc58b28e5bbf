"""How the best LR goes on from a study's tokens, batch and depth to a target's: measured exponents where there are some, else the rule.

Owns LrExponent and `lr_at_target`. Over every axis the LR goes with (target / study)^exponent. A study that varied tokens, batch or depth
has measured its exponent: the slope of log2 LR* over log2 of the size. The others follow the published rule, (tokens ratio / batch
ratio)^-1/2; no rule moves the LR with depth. Ratios are target over study; log2 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.axes import AxisFit
from analysis.results import Interval, interval_text, number

SIGNS: Mapping[str, float] = {"tokens": -1.0, "batch_tokens": 1.0, "depth": 0.0}
"""The default exponents, in units of the rule's."""
WORDS: Mapping[str, str] = {"tokens": "tokens", "batch_tokens": "batch", "depth": "depth"}


@dataclass(frozen=True)
class LrExponent:
    """One axis: the exponent that is used, with its 90 % interval where it was measured, and the rule's."""

    axis: str
    ratio: float
    value: float
    interval: Interval
    default: float
    measured: bool
    levels: tuple[float, ...] = ()
    """Sizes that were measured."""
    ruled: bool = True
    """Whether a published rule speaks of this axis: of depth none does, and of some optimizers none."""

    @property
    def octaves(self) -> float:
        """By which it moves log2 LR."""
        return self.value * math.log2(self.ratio)

    @property
    def ends(self) -> Interval:
        """`octaves` at the ends of the interval, ordered."""
        moved = sorted(
            end * math.log2(self.ratio) if math.isfinite(end) else _unbounded(end, self.ratio) for end in self.interval
        )
        return moved[0], moved[1]

    def __str__(self) -> str:
        name = WORDS[self.axis]
        if not self.measured:
            return f"{name} {number(self.default)} ({'rule' if self.ruled else 'no rule is known'})"
        sizes = ", ".join(f"{level:,.0f}" for level in self.levels)
        rule = f"rule {number(self.default)}" if self.ruled else "no rule"
        return f"{name} {number(self.value)} {interval_text(self.interval)} (measured at {sizes}; {rule})"

    def to_dict(self) -> dict[str, object]:
        names = ("axis", "ratio", "value", "interval", "default", "measured", "levels")
        return {name: list(found) if isinstance(found := getattr(self, name), tuple) else found for name in names}


def _unbounded(end: float, ratio: float) -> float:
    return 0.0 if ratio == 1 else end * math.copysign(1.0, math.log2(ratio))


def _slope(fit: AxisFit) -> tuple[float, Interval, str]:
    """Slope, interval, and why it is not used (empty where it is)."""
    levels = [optimum.cell for optimum in fit.transfer.optima]
    slope = fit.transfer.slope
    if len({cell.others(fit.name) for cell in levels}) > 1:
        return math.nan, slope.interval, "other sizes change along with it"
    if not math.isfinite(slope.value):
        return math.nan, slope.interval, "fewer than two of its levels have an interior best LR"
    return slope.value, slope.interval, ""


def lr_exponents(
    ratios: Mapping[str, float], rule: float, levels: Sequence[AxisFit], use_measured: bool = True, known: bool = True
) -> tuple[dict[str, LrExponent], list[str]]:
    """Exponents by axis, and warnings. ratios: of every axis in SIGNS; rule: the published exponent of (tokens / batch)^-rule.

    use_measured: False takes the rule for all, and warns of nothing. known: whether there is a rule for the optimizer.
    """
    fits, found, warnings = {fit.name: fit for fit in levels}, {}, []
    for axis, sign in SIGNS.items():
        default, ruled = sign * rule, known and sign != 0
        found[axis] = LrExponent(axis, ratios[axis], default, (default, default), default, False, ruled=ruled)
        fit = fits.get(axis)
        if fit is None or not use_measured:
            continue
        value, interval, fault = _slope(fit)
        if fault:
            left = f"the rule's {number(default)} holds" if ruled else "the LR stays"
            warnings.append(f"{WORDS[axis]} was varied, and gives the LR no exponent ({fault}): {left}")
            continue
        sizes = tuple(fit.transfer.sizes())
        found[axis] = LrExponent(axis, ratios[axis], value, interval, default, True, sizes, ruled)
    return found, warnings


def doubts(exponents: Mapping[str, LrExponent], rule_range: Interval) -> list[str]:
    """What casts doubt on measured exponents that are used: fewer than three levels, and intervals wider than the rule's range."""
    said = []
    for item in exponents.values():
        if not item.measured or item.ratio == 1:
            continue
        name, (low, high) = WORDS[item.axis], item.interval
        if len(item.levels) < 3:
            said.append(f"the LR's exponent over {name} rests on {len(item.levels)} levels: measure a third")
        if item.ruled and high - low > rule_range[1] - rule_range[0]:
            published = f"the rule's range is {number(rule_range[1] - rule_range[0])} wide"
            said.append(
                f"the LR's exponent over {name} is measured to {interval_text(item.interval)}, and {published}: "
                "vary it further, or say exponents: rule in the target"
            )
    return said


def lr_at_target(exponents: Mapping[str, LrExponent], rule: float, rule_range: Interval) -> tuple[float, Interval]:
    """Octaves from the study's LR to the target's, and their interval: axes that follow the rule share one unknown exponent."""
    ruled = [item for item in exponents.values() if not item.measured]
    # log2 of the tokens' ratio over the batch's, of what the rule carries: the exponent is one unknown, not two.
    distance = sum(-SIGNS[item.axis] * math.log2(item.ratio) for item in ruled)
    ends = sorted(-distance * end for end in rule_range)
    low, high, middle = ends[0], ends[1], -distance * rule
    for item in exponents.values():
        if item.measured:
            middle, low, high = middle + item.octaves, low + item.ends[0], high + item.ends[1]
    return middle, (low, high)
