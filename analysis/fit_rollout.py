"""Which law predicts the largest runs best from the smaller ones: the score that chooses between laws.

Owns the roll-out (fit below a cut in compute, predict everything above it, for several cuts) and the comparison of laws by it. A fit
to all rows always favours the law with more parameters; a prediction of what was not seen does not. The scores' intervals come from a
paired bootstrap: the sizes that are predicted are drawn again, the same ones for every law, and the fits stay. They say how much a
score, or the gap between two laws, hangs on which large sizes were run, and nothing of the noise of the small runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from analysis.fit_left_out import levels
from analysis.fit_search import DELTA, checked_law, checked_loss, search_minimum
from analysis.fit_table import FitTable
from analysis.laws import LAWS, Array, Inputs, Law
from analysis.results import UNKNOWN, Interval, text_table
from scaling.errors import DataError, Fault

SHARES = (0.5, 0.6, 0.7, 0.8)
"""Of the distinct sizes, from small to large, that are fitted in turn; the rest is predicted."""
COMPARED_STARTS = 16
DRAWS = 2000
FEW_SIZES = 5
"""Fewer sizes among the predicted runs, and drawing them again says nothing."""


@dataclass(frozen=True)
class Cut:
    """One roll-out: rows fitted and predicted, mean and largest |log error| of the predictions."""

    size: float
    fitted: int
    predicted: int
    mean_error: float
    max_error: float


@dataclass(frozen=True)
class LawScore:
    """One law's roll-outs. error: mean of the cuts' mean errors, NaN where `reason` says why it could not be scored.

    misses (cuts, n): |log error| of each row of the table, NaN where it is fitted. interval, behind (the error minus the best law's) and
    better (share of draws in which the law beats the best one): by the paired bootstrap, unknown outside of a comparison.
    """

    law: str
    parameters: int
    cuts: tuple[Cut, ...]
    reason: str = ""
    misses: Array | None = field(default=None, repr=False)
    interval: Interval = UNKNOWN
    behind: Interval = UNKNOWN
    better: float = float("nan")

    @property
    def error(self) -> float:
        return float(np.mean([cut.mean_error for cut in self.cuts])) if self.cuts else float("nan")

    @property
    def worst(self) -> float:
        return max((cut.max_error for cut in self.cuts), default=float("nan"))

    def to_dict(self) -> dict[str, Any]:
        cuts = [vars(cut) for cut in self.cuts]
        return {
            "law": self.law,
            "parameters": self.parameters,
            "error": self.error,
            "interval": list(self.interval),
            "behind": list(self.behind),
            "better": self.better,
            "worst": self.worst,
            "cuts": cuts,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Comparison:
    """Laws ordered by their roll-out error, those that could not be scored last."""

    scores: tuple[LawScore, ...]

    @property
    def best(self) -> str:
        return self.scores[0].law

    def to_dict(self) -> dict[str, Any]:
        return {"best": self.best, "scores": [score.to_dict() for score in self.scores]}

    def __str__(self) -> str:
        head = ["law", "parameters", "error on larger runs", "90 % interval", "behind the best by", "better in", "worst"]
        scored = [score for score in self.scores if not score.reason]
        rows = [
            [s.law, str(s.parameters), f"{100 * s.error:.3f} %", _percent(s.interval), _percent(s.behind) if s.law != self.best else "",
             f"{100 * s.better:.0f} %" if np.isfinite(s.better) and s.law != self.best else "", f"{100 * s.worst:.2f} %"]
            for s in scored
        ]  # fmt: skip
        without = [f"not compared: {score.law}: {score.reason}" for score in self.scores if score.reason]
        return "\n".join([text_table(head, rows), *without])


def _percent(interval: Interval) -> str:
    return f"[{100 * interval[0]:.3f}, {100 * interval[1]:.3f}] %" if np.isfinite(interval[0]) else "unknown"


def roll_out(
    table: FitTable, law: str | Law, loss: str = "huber-log", delta: float = DELTA, shares: Sequence[float] = SHARES
) -> LawScore:
    """Fit the rows of the smallest sizes (by compute) and predict the others, at each of `shares` of the distinct sizes.

    Cuts that leave fewer rows than parameters + 1, or a column of the law at one level, are left out; the reason says when all are.
    """
    chosen, summed = checked_law(law), checked_loss(loss, delta)
    table.require(chosen.columns)
    sizes = np.unique(table.size)
    cuts, misses = [], [np.empty((0, len(table)))]
    for share in shares:
        last = int(np.floor(share * len(sizes))) - 1
        if last < 0 or last >= len(sizes) - 1:
            continue
        below = table.size <= sizes[last]
        small, large = table.rows(below), table.rows(~below)
        enough = len(small) > len(chosen.parameters) and all(len(np.unique(small.columns[name])) > 1 for name in chosen.columns)
        if not enough:
            continue
        search = search_minimum(chosen, small, summed, COMPARED_STARTS)
        centres = Inputs.of({name: small.columns[name] for name in chosen.columns}).centres
        predicted = chosen.value(search.theta[None], Inputs.of({name: large.columns[name] for name in chosen.columns}, centres))[
            0
        ][0]
        errors = np.abs(np.log(predicted) - np.log(large.loss))
        missed = np.full((1, len(table)), np.nan)
        missed[0, ~below] = errors
        misses.append(missed)
        cuts.append(Cut(float(sizes[last]), len(small), len(large), float(errors.mean()), float(errors.max())))
    reason = "" if cuts else f"no cut leaves the {len(chosen.parameters) + 1} smaller runs at several sizes that it needs"
    return LawScore(chosen.name, len(chosen.parameters), tuple(cuts), reason, np.concatenate(misses))


def compare_laws(table: FitTable, laws: Sequence[str] | None = None, loss: str = "huber-log", delta: float = DELTA) -> Comparison:
    """Score laws by their roll-outs on the same cuts; default: every law whose columns all vary in the table.

    Laws that could be scored at fewer cuts than another are not compared, since their errors are of other runs. Raises DataError where
    none can be scored.
    """
    names = list(laws) if laws is not None else [name for name, law in LAWS.items() if _applies(table, law)]
    scores = [roll_out(table, name, loss, delta) for name in names]
    most = max((len(score.cuts) for score in scores), default=0)
    if most == 0:
        words = "; ".join(f"{score.law}: {score.reason}" for score in scores) or "no law reads columns that all vary here"
        raise DataError(Fault("law auto", f"no law can be scored on this table: {words}", "name a law with --law"))
    fair = [
        s if len(s.cuts) == most else LawScore(s.law, s.parameters, (), s.reason or "too few smaller runs at some cuts")
        for s in scores
    ]
    ordered = sorted(fair, key=lambda score: (np.isnan(score.error), score.error))
    return Comparison(tuple(_with_intervals(table, ordered)))


def _with_intervals(table: FitTable, scores: Sequence[LawScore]) -> list[LawScore]:
    """Scores, best first, with 90 % intervals from sizes drawn again: levels of params, since a law misses runs of one size alike."""
    scored = [score for score in scores if not score.reason and score.misses is not None]
    misses = np.stack([score.misses for score in scored if score.misses is not None])
    level = levels(table.columns.get("params", table.size))[0]
    _, group = np.unique(np.where(np.isfinite(misses[0]).any(axis=0), level, -1), return_inverse=True)
    seen = np.isfinite(misses[0])
    members = (group == np.arange(group.max() + 1)[:, None]).astype(float)
    predicted = members[(members @ seen.any(axis=0)) > 0]
    if len(predicted) < FEW_SIZES:
        return list(scores)
    counts = np.random.default_rng(0).multinomial(len(predicted), np.full(len(predicted), 1 / len(predicted)), size=DRAWS)
    sums = np.einsum("lcn,gn->lcg", np.nan_to_num(misses), predicted) @ counts.T
    runs = np.einsum("cn,gn->cg", seen, predicted) @ counts.T
    with np.errstate(invalid="ignore", divide="ignore"):
        # A draw without any run above the last cut is scored at the others.
        errors = np.nanmean(np.where(runs > 0, sums / runs, np.nan), axis=1)
    ends = np.quantile(errors, [0.05, 0.95], axis=1).T
    gaps = np.quantile(errors - errors[:1], [0.05, 0.95], axis=1).T
    better = (errors < errors[:1]).mean(axis=1)
    found = {
        score.law: replace(
            score, interval=(float(end[0]), float(end[1])), behind=(float(gap[0]), float(gap[1])), better=float(share)
        )
        for score, end, gap, share in zip(scored, ends, gaps, better, strict=True)
    }
    return [found.get(score.law, score) for score in scores]


def _applies(table: FitTable, law: Law) -> bool:
    """Whether every column that the law reads varies in the table."""
    columns: Mapping[str, Any] = table.columns
    return all(name in columns and len(np.unique(columns[name])) > 1 for name in law.columns)
