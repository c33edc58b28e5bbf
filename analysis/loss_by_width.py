"""Best loss against width, and its prediction for a larger width, with the honest bracket when few widths were measured.

Pure numpy. Full scaling-law fits are another module's; this one serves the recommendation of a study with one token budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LossPrediction:
    """A predicted loss in nats per token; `interval` brackets it, `value` is its middle."""

    value: float
    interval: tuple[float, float]
    formula: str
    assumption: str


def predict_loss(losses: Mapping[int, float], width: int) -> LossPrediction:
    """Predict the best loss at `width` from the two largest measured widths.

    A law L = E + A * width^-a with E >= 0 and a > 0 is convex in log-log, so beyond the data it lies above the straight line
    through its last two points (E = 0) and below its last value (no further gain): a bracket that holds for every such law, and
    no fit of three constants to three or four points. NaN with fewer than two widths, or when the loss does not fall.
    """
    known = sorted((size, loss) for size, loss in losses.items() if math.isfinite(loss))
    assumption = "the loss follows E + A * width^-a with E >= 0; the noise of the two losses is not included"
    formula = "between the last measured loss and a power law through the two largest widths"
    if len(known) < 2 or known[-1][1] >= known[-2][1]:
        return LossPrediction(math.nan, (math.nan, math.nan), formula, "needs two widths with falling loss")
    (before, loss_before), (last, loss_last) = known[-2], known[-1]
    if width < last:
        # Between two widths the loss lies between theirs; below the smallest nothing bounds it from above.
        lower = next(loss for size, loss in known if size >= width)
        upper = next((loss for size, loss in reversed(known) if size <= width), math.nan)
        return LossPrediction((lower + upper) / 2, (lower, upper), "between the losses of the two neighbouring widths", "")
    exponent = np.log(loss_last / loss_before) / np.log(last / before)
    lower = float(loss_last * (width / last) ** exponent)
    return LossPrediction((lower + loss_last) / 2, (lower, loss_last), formula, assumption)
