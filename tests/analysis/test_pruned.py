"""Pruned runs in the analysis: a bound on a wall gives what the run's own loss would have given, any other says nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.optimum import CellOptimum, cell_optima
from analysis.plots import lr_curves_info
from analysis.search import CellRuns, optimum_of
from analysis.table import load_table

RATES = np.arange(-11.0, -3.0)
LOSS = 2.0 + 0.05 * (RATES + 7.3) ** 2
"""At 2^-11 and 2^-4 on walls: 34 % and 27 % above the best."""


def table(pruned: dict[float, float | None], loss: np.ndarray = LOSS) -> pd.DataFrame:
    """The runs, those at the rates of `pruned` with the bound given there instead of a loss."""
    there = np.isin(RATES, list(pruned))
    return pd.DataFrame(
        {
            "width": 64,
            "run_id": [f"run{place}" for place in range(len(RATES))],
            "log2_lr": RATES,
            "loss": np.where(there, np.nan, loss),
            "status": np.where(there, "pruned", "complete"),
            "bound": [pruned.get(rate) for rate in RATES],
        }
    )


def optimum(pruned: dict[float, float | None]) -> CellOptimum:
    return cell_optima(load_table(table(pruned)))[0]


def test_a_bound_on_a_wall_gives_the_optimum_of_the_whole_runs() -> None:
    one, two = optimum({}), optimum({-11.0: 2.45, -4.0: 2.45})
    assert (two.log2_lr, two.interval, two.best_loss) == (one.log2_lr, one.interval, one.best_loss)
    assert (two.n_pruned, two.n_diverged, two.n_finite) == (2, 0, len(RATES) - 2)
    assert "2 pruned runs bound the optimum and are no values" in two.flags
    assert two.to_dict()["n_pruned"] == 2


def test_a_pruned_run_below_the_best_is_no_divergence() -> None:
    found = optimum({-11.0: 2.45})
    assert not any("diverged" in flag for flag in found.flags)
    assert np.isinf(found.lowest_diverged)


def test_beyond_a_pruned_run_a_loss_is_bounded_and_has_no_value() -> None:
    value, (low, high) = optimum({-4.0: 2.45}).rise_at(-4.0)
    assert np.isnan(value)
    assert 0.1 < low < high == np.inf


def test_a_bound_below_a_wall_says_nothing() -> None:
    found = optimum({-4.0: 2.1})
    assert any("1 of them say nothing" in flag for flag in found.flags)
    assert found.sampled == (-11.0, -5.0)


def test_pruned_runs_bracket_an_optimum_without_a_curve() -> None:
    pruned = {rate: 2.6 for rate in RATES if rate not in (-8.0, -7.0)}
    assert optimum(pruned).interval == (-8.0, -6.0)


def test_a_search_takes_pruned_runs_as_walls() -> None:
    def found(pruned: set[float]) -> CellOptimum | None:
        loss = tuple(np.inf if rate in pruned else value for rate, value in zip(RATES, LOSS, strict=True))
        bound = tuple(2.45 if rate in pruned else -np.inf for rate in RATES) if pruned else ()
        return optimum_of(CellRuns(6.0, tuple(RATES), loss, (0,) * len(RATES), bound=bound), [])

    one, two = found(set()), found({-11.0, -4.0})
    assert one is not None
    assert two is not None
    assert (two.log2_lr, two.interval) == (one.log2_lr, one.interval)


def test_a_plot_tells_pruned_runs_from_diverged_ones() -> None:
    read = load_table(table({-11.0: 2.45}, np.where(RATES == -4.0, np.inf, LOSS)))
    curve = lr_curves_info(read, cell_optima(read), "unknown").curves[0]
    assert (list(curve.pruned), list(curve.diverged)) == ([-11.0], [-4.0])


@pytest.mark.parametrize("bound", [2.45, None])
def test_a_table_says_what_becomes_of_pruned_runs(tmp_path: Path, bound: float | None) -> None:
    path = tmp_path / "runs.csv"
    table({-11.0: bound, -4.0: bound}).to_csv(path, index=False)
    read = load_table(path)
    words = "2 pruned runs bound the optimum" if bound else "2 pruned runs without a bound dropped: nothing is known"
    assert any(words in note for note in read.notes)
    assert len(read) == (len(RATES) if bound else len(RATES) - 2)
    assert not read.frame["diverged"].any()
    # What a report writes is read as the same table.
    read.frame.to_csv(path, index=False)
    pd.testing.assert_frame_equal(load_table(path).frame, read.frame)
