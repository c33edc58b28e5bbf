"""The critical batch by branched training: the largest batch whose loss, after the same tokens, is near the base's. Torch-free.

Owns the definition, the comparison of branches and what it says. The idea is Merrill et al.'s (2505.23971): branch a run at a checkpoint
into several batch sizes, the LR scaled by a rule. Here all branches read the same sequences in the same order and are evaluated after
the same tokens on the same validation windows; the smoothed loss is the mean of the evaluations in the last quarter of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.results import UNKNOWN, Interval, json_safe, text_table
from analysis.shapes import Array

TOLERANCE = 0.01
"""Nats per token."""
WINDOW = 0.25
"""Share of the tokens, at the end, over which the loss is smoothed."""


@dataclass(frozen=True)
class BranchLosses:
    """One branch: its batch and its validation losses, nats per token."""

    run_id: str
    batch_sequences: int
    lr: float
    steps: int
    sequences: Array
    """Seen since the branching point, at each evaluation."""
    loss: Array

    @property
    def diverged(self) -> bool:
        return not len(self.loss) or not math.isfinite(float(self.loss[-1]))


def branch_losses(run_id: str, batch_sequences: int, lr: float, steps: int, rows: Iterable[Mapping[str, Any]]) -> BranchLosses:
    """From rows of its metrics: each has the step it followed, the last one, without a training loss, the number of steps."""
    found = [row for row in rows if "validation_loss" in row]
    done = [row["step"] + ("loss" in row) for row in found]
    losses = [math.nan if row["validation_loss"] is None else float(row["validation_loss"]) for row in found]
    return BranchLosses(run_id, batch_sequences, lr, steps, np.array(done, dtype=float) * batch_sequences, np.array(losses))


@dataclass(frozen=True)
class Compared:
    """One branch beside the base branch."""

    branch: BranchLosses
    loss: float
    """Smoothed, nats per token; NaN for a branch that diverged."""
    excess: float
    """Over the base's, nats per token; infinite for a branch that diverged."""
    interval: Interval
    """Of the excess, from the scatter of the evaluations in the window; (0, 0) for the base itself."""
    within: bool

    def to_dict(self) -> dict[str, Any]:
        names = ("run_id", "batch_sequences", "lr", "steps", "diverged")
        document = {name: getattr(self.branch, name) for name in names}
        keys = ("loss", "excess", "interval", "within")
        return dict(json_safe(document | {key: getattr(self, key) for key in keys}))


@dataclass(frozen=True)
class BranchedBatch:
    """What the branches say of the critical batch; batches in sequences."""

    branches: tuple[Compared, ...]
    """Ordered by batch; the first is the base's."""
    tolerance: float
    tokens: int
    """Each branch was trained for."""
    context: int
    lr_rule: str
    from_step: int
    level: float

    @property
    def critical(self) -> int:
        """The largest batch that is within the tolerance, and all smaller ones too."""
        return self._last(lambda item: item.within)

    @property
    def censored(self) -> bool:
        """Whether the largest batch that was tried is within the tolerance: the critical batch is at least that."""
        return self.critical == self.branches[-1].branch.batch_sequences

    @property
    def bracket(self) -> Interval:
        """The largest batch up to which all are surely within, and the smallest that is surely not (infinite when none is)."""
        low = self._last(lambda item: item.interval[1] <= self.tolerance)
        beyond = [item.branch.batch_sequences for item in self.branches if item.interval[0] > self.tolerance]
        return float(low), float(min(beyond, default=math.inf))

    @property
    def crossing(self) -> float:
        """Where a line through the excess over log batch meets the tolerance, after the critical batch; infinite when censored."""
        place = [item.branch.batch_sequences for item in self.branches].index(self.critical)
        if self.censored:
            return math.inf
        below, above = self.branches[place : place + 2]
        if not math.isfinite(above.excess):
            return math.nan
        share = (self.tolerance - below.excess) / (above.excess - below.excess)
        return float(self.critical * (above.branch.batch_sequences / self.critical) ** share)

    def _last(self, holds: Callable[[Compared], bool]) -> int:
        batch = self.branches[0].branch.batch_sequences
        for item in self.branches[1:]:
            if not holds(item):
                break
            batch = item.branch.batch_sequences
        return batch

    @property
    def definition(self) -> str:
        return (
            f"largest batch whose validation loss, mean over the last {100 * WINDOW:g} % of {self.tokens:,} tokens after step "
            f"{self.from_step}, is at most {self.tolerance:g} nats above the base batch's, constant LR by the rule {self.lr_rule!r} "
            "(branched training, after Merrill et al. 2505.23971)"
        )

    def to_dict(self) -> dict[str, Any]:
        document = {
            "definition": self.definition,
            "critical_batch": {"sequences": self.critical, "tokens": self.critical * self.context},
            "at_least": self.censored,
            "bracket": self.bracket,
            "crossing": self.crossing,
            "level": self.level,
            "branches": [item.to_dict() for item in self.branches],
        }
        return dict(json_safe(document))

    def __str__(self) -> str:
        header = ["batch", "steps", "LR", "loss", "excess", f"{100 * self.level:g} % interval", "within"]
        rows = [_row(item) for item in self.branches]
        tokens = self.critical * self.context
        least = "at least " if self.censored else ""
        low, high = (f"{end:g}" if math.isfinite(end) else "unbounded" for end in self.bracket)
        lines = [f"critical batch: {least}{self.critical} sequences ({tokens:,} tokens), surely between {low} and {high}"]
        if math.isfinite(self.crossing):
            lines[0] += f"; the excess meets the tolerance near {self.crossing:.3g}"
        return "\n".join([text_table(header, rows), *lines, f"definition: {self.definition}"])


def _row(item: Compared) -> list[str]:
    branch = item.branch
    head = [str(branch.batch_sequences), str(branch.steps), f"{branch.lr:.4g}"]
    if branch.diverged:
        return [*head, "diverged", "", "", "no"]
    low, high = (f"{end:+.4f}" if math.isfinite(end) else "unknown" for end in item.interval)
    return [*head, f"{item.loss:.4f}", f"{item.excess:+.4f}", f"[{low}, {high}]", "yes" if item.within else "no"]


def compare(
    branches: Sequence[BranchLosses], *, tolerance: float, tokens: int, context: int, lr_rule: str, from_step: int, level: float = 0.9
) -> BranchedBatch:  # fmt: skip
    """Compare finished branches with that of the smallest batch. All must have been evaluated after the same tokens."""
    ordered = sorted(branches, key=lambda branch: branch.batch_sequences)
    start = (1 - WINDOW) * tokens / context
    compared = tuple(_compared(branch, ordered[0], start, tolerance, level) for branch in ordered)
    return BranchedBatch(compared, tolerance, tokens, context, lr_rule, from_step, level)


def _compared(branch: BranchLosses, base: BranchLosses, start: float, tolerance: float, level: float) -> Compared:
    from scipy.stats import t

    if branch.diverged or base.diverged:
        return Compared(branch, math.nan, math.inf, (math.inf, math.inf), False)
    own, other = (item.loss[item.sequences > start] for item in (branch, base))
    assert np.array_equal(branch.sequences, base.sequences), "branches are evaluated after the same tokens"
    difference = own - other
    excess, interval = float(difference.mean()), UNKNOWN
    if branch is base:
        interval = (0.0, 0.0)
    elif len(difference) > 1:
        half = float(t.ppf(0.5 + level / 2, len(difference) - 1) * difference.std(ddof=1) / math.sqrt(len(difference)))
        interval = (excess - half, excess + half)
    return Compared(branch, float(own.mean()), excess, interval, excess <= tolerance)
