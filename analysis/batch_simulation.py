"""How often the intervals of the batch laws are right: tables with a known truth, fitted, counted.

`python -m analysis.batch_simulation` prints the coverage of 90 % intervals of exponents, predictions and noise scales
(docs/batch-size.md).
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

from analysis.batch_table import LrBatchTable, StepsTable, load_lr_batch_table
from analysis.critical_batch import NOISE_SCALE, fit_critical_batch
from analysis.lr_batch_law import fit_lr_batch

LR_EXPONENTS, BATCH_EXPONENTS = (-0.7, 0.25), (-0.1, 0.55)
SCALE_EXPONENT = 0.6
LARGE = (1e10, 2e11)
"""Parameters and tokens at which the best LR and batch are predicted."""


def optimum(params: float, tokens: float) -> tuple[float, float]:
    """True best lr and batch (tokens)."""
    lr = 2e-3 * (params / 3e8) ** LR_EXPONENTS[0] * (tokens / 1e10) ** LR_EXPONENTS[1]
    return lr, 4e5 * (params / 3e8) ** BATCH_EXPONENTS[0] * (tokens / 1e10) ** BATCH_EXPONENTS[1]


def simulate_grid(
    random: np.random.Generator, cells: int, noise: float = 1e-3, scatter: float = 0.05, knobs: tuple[str, ...] = ("lr", "batch_tokens")
) -> LrBatchTable:  # fmt: skip
    """A table of grids: noise of a run as a share of its loss; scatter of a size's optimum about the law, in logs."""
    return load_lr_batch_table(simulate_frame(random, cells, noise, scatter, knobs))


def simulate_frame(
    random: np.random.Generator, cells: int, noise: float, scatter: float, knobs: tuple[str, ...] = ("lr", "batch_tokens")
) -> pd.DataFrame:  # fmt: skip
    """Rows of params, tokens, the knobs and loss: asymmetric in lr, with a ridge between lr and batch."""
    rows = []
    for _ in range(cells):
        params, tokens = 10 ** random.uniform(8, 9.5), 10 ** random.uniform(9.5, 11)
        lr, batch = np.array(optimum(params, tokens)) * np.exp(scatter * random.standard_normal(2))
        for x in np.exp2(np.arange(-13, -4.9, 0.5)) if "lr" in knobs else [lr]:
            for b in np.exp2(np.arange(15, 23.1, 0.75)) if "batch_tokens" in knobs else [batch]:
                u, v = np.log(x / lr), np.log(b / batch)
                rise = 0.006 * u**2 - 0.005 * u * v + 0.006 * v**2 + 0.0008 * np.clip(u, -2, 4) ** 3
                rows.append({"params": params, "tokens": tokens, "lr": x, "batch_tokens": b, "rise": rise})
    frame = pd.DataFrame(rows)
    loss = (1.8 + 400 / frame["params"] ** 0.34 + 400 / frame["tokens"] ** 0.28) * (
        1 + frame["rise"] + noise * random.standard_normal(len(frame))
    )
    return frame[["params", "tokens", *knobs]].assign(loss=loss)


def simulate_steps(random: np.random.Generator, noise: float = 0.05) -> StepsTable:
    """Five sizes by nine batches, S = S_min (1 + B_n/B), noise in logs."""
    params, batch = np.repeat(np.geomspace(1e8, 1.2e9, 5), 9), np.tile(2.0 ** np.arange(6, 15), 5)
    steps = 0.02 * params**0.55 * (1 + noise_scale(params) / batch) * np.exp(noise * random.standard_normal(45))
    return StepsTable({"params": params}, batch, steps, "sequences")


def noise_scale(params: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """True B_n, sequences."""
    return np.asarray(0.03 * params**SCALE_EXPONENT)


def _inside(interval: tuple[float, float], truth: float) -> bool:
    return interval[0] <= truth <= interval[1]


def coverage_of_grids(cells: int, tables: int, method: str = "joint") -> dict[str, float]:
    """Share of 90 % intervals that hold the truth."""
    random = np.random.default_rng(cells)
    truths = dict(zip(("lr_params", "lr_tokens", "batch_params", "batch_tokens"), (*LR_EXPONENTS, *BATCH_EXPONENTS), strict=True))
    hits: dict[str, list[bool]] = {name: [] for name in (*truths, "predicted lr", "predicted batch")}
    for _ in range(tables):
        fit = fit_lr_batch(simulate_grid(random, cells), method=method, draws=100, left_out=False)
        for name, truth in truths.items():
            hits[name].append(_inside(fit.intervals[f"{name}_exponent"], truth))
        found = fit.predict(params=LARGE[0], tokens=LARGE[1])
        for name, knob, truth in zip(("predicted lr", "predicted batch"), ("lr", "batch_tokens"), optimum(*LARGE), strict=True):
            hits[name].append(_inside(found.knobs[knob].interval, truth))
    return {name: float(np.mean(values)) for name, values in hits.items()}


def coverage_of_steps(loss: str, tables: int) -> dict[str, float]:
    """Share of 90 % intervals that hold the truth."""
    random = np.random.default_rng(1)
    hits: dict[str, list[bool]] = {"B_n": [], "exponent of B_n": []}
    for _ in range(tables):
        fit = fit_critical_batch(simulate_steps(random), loss, definition=NOISE_SCALE)
        hits["B_n"] += [
            _inside(curve.noise_scale.interval, float(noise_scale(np.array(curve.sizes["params"])))) for curve in fit.curves
        ]
        hits["exponent of B_n"].append(_inside(fit.intervals["params_exponent"], SCALE_EXPONENT))
    return {name: float(np.mean(values)) for name, values in hits.items()}


def main() -> None:
    tables = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for loss in ("huber-log", "least-squares-log"):
        print(
            f"critical batch, {loss}:",
            *(f"{name} {100 * share:.1f}" for name, share in coverage_of_steps(loss, tables).items()),
            flush=True,
        )
    for method in ("joint", "two-stage"):
        for cells in (6, 9, 16):
            found = coverage_of_grids(cells, tables, method)
            print(
                f"lr and batch, {method}, {cells} sizes:",
                *(f"{name} {100 * share:.1f}" for name, share in found.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
