"""How long 1,000 robust refits of a table of 240 runs take, and how many of them converge, beside scipy's L-BFGS one by one.

The table is that of 2404.10102 where it lies beside the checkout, else a simulated one of the same size; targets: under 1 s, aim 0.5 s.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from analysis.fit import ScalingLawFit, fit
from analysis.fit_engine import LOSSES
from analysis.fit_simulation import true_loss
from analysis.fit_table import FitTable, load_fit_table

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "chinchilla_epoch" / "data.csv"
REFITS, PLAIN, REPEATS = 1000, 20, 5


def table() -> tuple[FitTable, str]:
    """The public table, or one of its size."""
    if PUBLIC.exists():
        columns = {"params": "N", "tokens": "D", "flops": "C"}
        return load_fit_table(PUBLIC, columns, where=["epoch_excluded=0"]), "the 240 runs of 2404.10102"
    params, tokens = (part.ravel() for part in np.meshgrid(np.geomspace(5e7, 1.6e10, 12), np.geomspace(1e9, 3e11, 20)))
    loss = true_loss(params, tokens) * np.exp(0.005 * np.random.default_rng(0).standard_t(3, len(params)))
    return FitTable({"params": params, "tokens": tokens}, loss), "240 simulated runs (../shared/data is absent)"


def report() -> None:
    """Print seconds of the refits for every loss, those that failed, and what one refit costs scipy."""
    rows, name = table()
    print(
        f"\n{REFITS} bootstrap refits (pairs) of Chinchilla's law, {name}: wall s (fastest of {REPEATS}), processor s, not converged"
    )
    for kind in LOSSES:
        found = fit(rows, loss=kind, starts=8)
        wall, processor, failed = _refits(found)
        target = "   target 1 s, aim 0.5 s" if kind == "huber-log" else ""
        print(f"  {kind:17}  {wall:.2f}  {processor:.2f}  {failed}{target}")
        if kind == "huber-log":
            plain, unconverged = _plain(found)
            print(
                f"  {'scipy, L-BFGS-B':17}  {REFITS / PLAIN * plain:.1f} (from {PLAIN} refits, the same gradient), "
                f"x{REFITS / PLAIN * plain / wall:.0f}; {unconverged} of {PLAIN} not converged"
            )


def _refits(found: ScalingLawFit) -> tuple[float, float, int]:
    times = []
    for _ in range(REPEATS):
        wall, processor = time.perf_counter(), time.process_time()
        failed = found.bootstrap("pairs", REFITS).failed
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    return min(times)[0], min(times)[1], failed


def _plain(found: ScalingLawFit) -> tuple[float, int]:
    """Seconds of PLAIN refits one after the other, at tolerances that let L-BFGS reach the minimum, and how many say they failed."""
    fitted, random, unconverged = found.fitted, np.random.default_rng(0), 0
    started = time.perf_counter()
    for _ in range(PLAIN):
        weights = random.multinomial(len(fitted.observed), np.full(len(fitted.observed), 1 / len(fitted.observed)))

        def objective(theta: np.ndarray, weights: np.ndarray = weights) -> tuple[float, np.ndarray]:
            predicted, gradient = fitted.law.value(theta[None], fitted.x)
            residual = fitted.loss.residual(predicted[0], fitted.observed)
            pull = weights * np.clip(residual, -fitted.loss.delta, fitted.loss.delta) / predicted[0]
            return 1e4 * float(weights @ fitted.loss.rho(residual)), 1e4 * pull @ gradient[0]

        options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9}
        unconverged += not minimize(objective, fitted.theta, jac=True, method="L-BFGS-B", options=options).success
    return time.perf_counter() - started, unconverged
