"""How the LR follows the batch when a run's tokens stay the same: named rules as pure functions. Torch-free.

Owns the three rules and their sources. That of the square root is the horizon's at a fixed number of tokens, and is read from there.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from scaling.horizon import horizon_factors

BatchRule = Literal["sqrt", "linear", "surge"]
BATCH_RULES: tuple[BatchRule, ...] = get_args(BatchRule)
BATCH_RULE_SOURCES: dict[BatchRule, str] = {
    "sqrt": "LR with batch^1/2: Malladi et al. (2205.10287), for Adam-like optimizers below the critical batch",
    "linear": "LR with batch^1: Goyal et al. (1706.02677), for SGD below the critical batch",
    "surge": "LR largest at B_noise and falling on both sides of it: Li et al. (2405.14578), for Adam-like optimizers",
}


def lr_factor_at_batch(rule: BatchRule, ratio: float, noise_ratio: float | None = None) -> float:
    """LR at `ratio` times the base batch over the LR at the base batch.

    surge: lr(B) = lr_max / (0.5 (sqrt(B_noise / B) + sqrt(B / B_noise))); noise_ratio is B_noise over the base batch.
    Raises ValueError for a ratio that is not positive, and for surge without noise_ratio.
    """
    if not (0 < ratio < math.inf):
        raise ValueError(f"a batch ratio is a positive number, not {ratio:g}")
    if rule == "sqrt":
        return horizon_factors(1 / ratio, 0.5)["lr"]
    if rule == "linear":
        return ratio
    if noise_ratio is None or not (0 < noise_ratio < math.inf):
        raise ValueError("surge needs the batch at which the LR is largest (B_noise), a positive number")
    return surge(ratio / noise_ratio) / surge(1 / noise_ratio)


def surge(batch_over_noise: float) -> float:
    """lr(B) / lr_max at B / B_noise (Li et al. 2405.14578)."""
    return 2 / (math.sqrt(1 / batch_over_noise) + math.sqrt(batch_over_noise))
