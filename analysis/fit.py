"""Fit a scaling law to a table of runs: `fit(table, law="chinchilla")` -> `ScalingLawFit`.

Owns `fit` and `load_fit`: reading, searching, judging. The objective is a sum over rows, each times its weight: Huber's or L1 loss of
log(law) - log(loss), or half squares. Losses are in nats per token. `success` says that the search ended in a minimum; `trusted` that no
guard of analysis.fit_guards fired either.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from analysis.fit_engine import Loss
from analysis.fit_guards import OUTLIERS, bound_flags, correlation_flags, interval_flags, outlier_flags, search_flags, table_flags
from analysis.fit_result import Draws, Estimate, Prediction, ScalingLawFit, Split, estimates
from analysis.fit_search import DELTA, OTHER_LAWS, STARTS, Search, Starts, checked_law, checked_loss, search_minimum, unit_weights
from analysis.fit_table import FitTable, load_fit_table
from analysis.fit_uncertainty import LEVEL, Fitted, Profile, gradients, printed, profile, without_largest
from analysis.laws import LAWS, Array, Inputs, Law
from analysis.results import Interval
from scaling.errors import DataError, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from analysis.critical_batch import CriticalBatchFit
    from analysis.lr_batch_result import LrBatchFit
    from analysis.schedule_result import MultiPowerFit

__all__ = ["Draws", "Estimate", "FitTable", "Prediction", "ScalingLawFit", "Split", "Starts", "fit", "load_fit", "load_fit_table"]


def load_fit(path: Path | str) -> ScalingLawFit:
    """A saved fit; its intervals are computed again from its rows. Raises DataError where `path` is none."""
    try:
        document = json.loads(Path(path).read_text())
        if document["mutransfer_fit"] != 1:
            raise KeyError("mutransfer_fit")
        saved, state, law = document["table"], document["state"], LAWS[document["law"]]
        table = FitTable(
            {name: np.array(values, dtype=float) for name, values in saved["columns"].items()},
            np.array(saved["loss"], dtype=float),
            None if saved["weights"] is None else np.array(saved["weights"], dtype=float),
            None if saved["groups"] is None else np.array(saved["groups"]),
            tuple(saved["notes"]),
            tuple(saved["warnings"]),
            saved.get("conventions", {}),
        )
        search = Search(np.array(state["theta"]), Starts(**state["starts"]), state["success"], True)
        loss = Loss(document["loss"], document["delta"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(Fault(str(path), f"is no saved fit: {error}", "write one with ScalingLawFit.save or --save")) from None
    return _conclude(law, table, loss, search, state["level"])


@overload
def fit(table: Path | str | pd.DataFrame, law: Literal["critical-batch"], *args: Any, **options: Any) -> CriticalBatchFit: ...
@overload
def fit(table: Path | str | pd.DataFrame, law: Literal["lr-batch"], *args: Any, **options: Any) -> LrBatchFit: ...
@overload
def fit(table: Path | str | pd.DataFrame, law: Literal["multi-power"], *args: Any, **options: Any) -> MultiPowerFit: ...
@overload
def fit(
    table: Path | str | pd.DataFrame | FitTable, law: str | Law = "chinchilla", *args: Any, **options: Any
) -> ScalingLawFit: ...
def fit(
    table: Path | str | pd.DataFrame | FitTable,
    law: str | Law = "chinchilla",
    loss: str = "huber-log",
    delta: float = DELTA,
    *,
    columns: Mapping[str, str] | None = None,
    weights: Sequence[float] | Array | None = None,
    starts: int = STARTS,
    level: float = LEVEL,
    **reading: Any,
) -> Any:
    """Fit a law of analysis.laws.LAWS, or "auto": the one that predicts the largest runs best from the smaller ones.

    loss: one of LOSSES; delta: Huber's knee, in log loss for huber-log, in nats for huber. weights (n,): factors of the rows in the sum,
    such as 1 / stderr^2; a common factor changes nothing but the objective. reading: further keys of `load_fit_table`. The laws of
    OTHER_LAWS have tables, options and results of their own: docs/batch-size.md, docs/schedule-law.md.
    Raises DataError with everything that is wrong with the table, the law's name or the loss.
    """
    if law in OTHER_LAWS:
        from analysis.other_laws import fit_other

        if isinstance(table, FitTable):
            raise DataError(Fault(f"law {law}", "reads other columns than a FitTable holds", "give the file or DataFrame"))
        more: dict[str, Any] = {"columns": columns, "weights": weights, "starts": starts, "level": level}
        return fit_other(table, str(law), loss, delta, **more, **reading)
    named = None if law == "auto" else checked_law(law)  # before the table, whose columns depend on it
    rows = load_fit_table(table, columns, **reading)
    if weights is not None:
        given = np.asarray(weights, dtype=np.float64)
        if given.shape != rows.loss.shape or not (np.isfinite(given) & (given >= 0)).all() or not given.sum() > 0:
            raise DataError(
                Fault(
                    "weights", f"are not {len(rows)} finite numbers from 0 up, one a row that is fitted", "give one weight a row"
                )
            )
        rows = replace(rows, weights=given)
    chosen_loss = checked_loss(loss, delta)
    if not 0.5 <= level < 1:
        raise DataError(Fault(f"level {level:g}", "is no level of an interval", "give a number such as 0.9"))
    comparison = None
    if law == "auto":
        from analysis.fit_rollout import compare_laws

        comparison = compare_laws(rows, loss=loss, delta=delta)
    chosen = named or checked_law(comparison.best if comparison else law)
    rows.require(chosen.columns)
    return replace(
        _conclude(chosen, rows, chosen_loss, search_minimum(chosen, rows, chosen_loss, starts), level), comparison=comparison
    )


def _conclude(law: Law, table: FitTable, loss: Loss, search: Search, level: float) -> ScalingLawFit:
    """Intervals, guards and the result; a lower minimum that the profile meets becomes the fit."""
    x = Inputs.of({name: table.columns[name] for name in law.columns})
    bounds, weights = law.bounds(float(table.loss.min()), x), unit_weights(table)
    logs = [name in law.positive for name in law.parameters]
    quantities = printed(law, x.centres)
    for _ in range(3):
        fitted = Fitted(law, x, table.loss, weights, loss, bounds, search.theta).with_draws()
        found = profile(fitted, quantities, level)
        if found.better is None:
            break
        search = search_minimum(law, table, loss, search.starts.total, found.better[None])
    found_estimates = estimates(found, logs)
    intervals = {name: estimate.interval for name, estimate in zip(law.parameters, found_estimates, strict=True)}
    covariance, _ = fitted.covariance()
    flags = [*table.warnings, *table_flags(law, table.columns), *bound_flags(law, search.theta, bounds)]
    flags += correlation_flags(law, covariance) + interval_flags(intervals)
    flags += search_flags(search.starts.total, search.starts.at_optimum, search.moved, fitted.freedom)
    if round(OUTLIERS * len(table)) and fitted.noise() > 1e-8:
        count = round(OUTLIERS * len(table))
        refitted = quantities(without_largest(fitted, count)[None])[0]
        flags += outlier_flags(law.parameters, found.values, refitted, found.stderr, count)
    params = {
        name: replace(estimate, interval=_within(name, estimate.interval, low))
        for name, estimate, low in zip(law.parameters, found_estimates, bounds[0], strict=True)
    }
    slopes = gradients(quantities, search.theta[None])[0]
    shared = slopes @ covariance @ slopes.T
    scale = np.where(np.isfinite(found.stderr), np.sqrt(np.maximum(np.diag(shared), 1e-300)), np.nan)
    final = loss.path[-1]
    raw = np.ones(len(table)) if table.weights is None else table.weights
    residual = fitted.residuals()
    objective = float(np.sum(raw * (np.abs(residual) if loss.kind == "l1-log" else final.rho(residual))))
    notes = (*table.notes, f"{len(table)} rows fitted", *_noise_notes(law, found))
    correlation = shared / np.outer(scale, scale)
    return ScalingLawFit(
        law,
        table,
        loss,
        level,
        params,
        objective,
        search.starts,
        fitted.noise(),
        correlation,
        search.success,
        tuple(flags),
        notes,
        fitted=fitted,
    )


def _noise_notes(law: Law, found: Profile) -> list[str]:
    worst = int(np.argmax(found.wider))
    if found.wider[worst] < 1.25:
        return []
    text = f"the scatter is uneven: intervals are widened to what a bootstrap of pairs says, most for {law.parameters[worst]}"
    return [f"{text} (x{found.wider[worst]:.2f})"]


def _within(name: str, interval: Interval, low: float) -> Interval:
    """E and exponents end at 0, where the law does."""
    floor = 0.0 if name == "E" or (name in ("alpha", "beta", "alpha_N", "alpha_D", "a", "b") and low >= 0) else -np.inf
    return max(interval[0], floor), interval[1]
