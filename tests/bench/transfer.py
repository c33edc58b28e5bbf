"""How long `transfer` takes on a large table: 10,560 simulated runs in 80 cells, two parametrizations over widths, depths and batches."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd

from analysis.table import load_table
from analysis.transfer import transfer

TARGET_S = 5.0
COLUMNS = ("parametrization", "width", "depth", "batch_tokens", "tokens", "lr", "loss", "seed")


def report() -> None:
    """Print seconds to read the table and to judge it."""
    frame = runs()
    started = time.perf_counter()
    table = load_table(frame)
    read = time.perf_counter()
    fits = transfer(table)
    judged = time.perf_counter()
    print(
        f"\ntransfer on {len(frame):,} runs: {read - started:.2f} s to read, {judged - read:.2f} s to judge (target {TARGET_S:g} s)"
    )
    for fit in fits.values():
        print(f"  {fit.sentence()}")


def runs() -> pd.DataFrame:
    """muP's optimum stays, SP's falls by 0.8 octaves a doubling; a seed's noise is 0.003 nats."""
    random = np.random.default_rng(0)
    rows = [
        (
            kind,
            width,
            depth,
            batch_tokens,
            1e8,
            2.0**log2_lr,
            _loss(log2_lr, width, slope) + 0.003 * random.standard_normal(),
            seed,
        )
        for kind, slope in (("mup", 0.0), ("sp", -0.8))
        for width in (64, 128, 256, 512, 1024)
        for depth in (2, 4)
        for batch_tokens in (8_192, 16_384, 32_768, 65_536)
        for log2_lr in np.arange(-14.0, -3.0, 0.5)
        for seed in range(6)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _loss(log2_lr: float, width: int, slope: float) -> float:
    u = log2_lr + 9 - slope * np.log2(width / 64)
    return float(2 + width**-0.2 + 0.03 * u**2 / (1 + 0.1 * abs(u)))
