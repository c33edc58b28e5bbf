"""Whether wider models train better at one learning rate: the second gate of a coordinate check.

Tensor Programs V (2203.03466, section 8): under maximal update a wider model's training loss is never worse, at any step. Owns `Wider` and
`judge_wider`. Losses are those that the target returns, at fresh batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from analysis.results import number, text_table

FLOOR = 0.005
"""Rise of the loss, relative to it, that counts as none."""
TAIL = 0.1
"""Share of the steps, the last ones, whose mean loss is compared."""
CONFIDENCE = 0.9
"""Of the one-sided test."""


@dataclass(frozen=True)
class Step:
    """From one width to the next: the rise of the loss, mean over paired seeds, and its lower bound."""

    small: int
    large: int
    rise: float
    lower: float
    """Lower 90 % bound of the rise; infinite where the wider model diverged."""
    worse: bool


@dataclass(frozen=True)
class Wider:
    """Mean loss over the last tenth of the steps at every width, and each step to the next width."""

    verdict: Literal["pass", "fail", "inconclusive"]
    steps: int
    losses: Mapping[int, tuple[float, ...]]
    """Width -> a loss a seed, seeds paired over widths."""
    rises: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        rises = [vars(item) for item in self.rises]
        losses = [
            {"width": width, "loss": float(np.mean(values)), "seeds": list(values)} for width, values in self.losses.items()
        ]
        return {"verdict": self.verdict, "steps": self.steps, "losses": losses, "rises": rises}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows, as text: a width a row, the rise from the width before."""
        rows = []
        for width, values in self.losses.items():
            before = next((item for item in self.rises if item.large == width), None)
            change = (
                ["", "", ""]
                if before is None
                else [number(before.rise, 4), number(before.lower, 4), "worse" if before.worse else ""]
            )
            rows.append([str(width), f"{float(np.mean(values)):.4f}", *change])
        return ["width", "loss", "rise", "at least", ""], rows

    def sentence(self) -> str:
        return {
            "pass": f"wider is not worse after {self.steps} steps at one learning rate",
            "fail": f"wider is worse after {self.steps} steps at one learning rate",
            "inconclusive": "whether wider is worse cannot be said: the smallest model diverged or there is one seed",
        }[self.verdict]

    def __str__(self) -> str:
        return "\n".join([self.sentence(), text_table(*self.table())])


def tail_mean(losses: list[float]) -> float:
    """Mean of the last tenth, infinite where a loss is not finite: a run that diverged is worse than any that did not."""
    tail = losses[-max(1, round(TAIL * len(losses))) :]
    mean = float(np.mean(tail))
    return mean if math.isfinite(mean) else math.inf


def judge_wider(curves: Mapping[int, Mapping[int, list[float]]], steps: int) -> Wider:
    """curves: width -> seed -> the loss at every step.

    A rise counts when its lower bound (paired over seeds, one-sided, 90 %) is above half a percent of the loss.
    """
    losses = {width: tuple(tail_mean(curves[width][seed]) for seed in sorted(curves[width])) for width in sorted(curves)}
    pairs = list(pairwise(losses))
    differences = [np.subtract(losses[large], losses[small]) for small, large in pairs]
    usual = [float(np.var(item, ddof=1)) for item in differences if len(item) > 1 and np.isfinite(item).all()]
    rises = tuple(_step(small, large, losses[small], losses[large], usual) for small, large in pairs)
    worse, unknown = any(item.worse for item in rises), any(math.isnan(item.lower) for item in rises)
    return Wider("fail" if worse else "inconclusive" if unknown else "pass", steps, losses, rises)


def _step(small: int, large: int, before: tuple[float, ...], after: tuple[float, ...], usual: list[float]) -> Step:
    """usual: variance over seeds of every step's rise; that of two or three seeds is drawn towards their median (Smyth 2004)."""
    if not np.isfinite(before).all():
        return Step(small, large, math.nan, math.nan, worse=False)
    if not np.isfinite(after).all():
        return Step(small, large, math.inf, math.inf, worse=True)
    from scipy.special import stdtrit

    differences = np.subtract(after, before)
    rise, count = float(differences.mean()), len(differences)
    if count < 2:
        return Step(small, large, rise, math.nan, worse=False)
    own, prior = count - 1, (len(usual) - 1) * (count - 1)
    variance = (own * float(differences.var(ddof=1)) + prior * float(np.median(usual))) / (own + prior)
    lower = rise - float(stdtrit(own + prior, CONFIDENCE)) * math.sqrt(variance / count)
    return Step(small, large, rise, lower, worse=lower > FLOOR * abs(float(np.mean(before))))
