"""Plots of a fitted law: the numbers behind them, and that drawing leaves no trace outside of the Axes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure

from analysis.fit import ScalingLawFit, fit
from analysis.fit_plots import (
    contour_info,
    draw_contours,
    draw_loss,
    draw_profile,
    draw_residuals,
    figure_fit,
    loss_info,
    profile_info,
    residual_info,
)
from analysis.fit_simulation import Design, simulate
from analysis.fit_table import FitTable


@pytest.fixture(scope="module")
def found() -> ScalingLawFit:
    return fit(simulate(Design(16, "huber-log"), np.random.default_rng(0)))


def test_lines_and_bands_are_the_predictions(found: ScalingLawFit) -> None:
    info = loss_info(found, "params")
    assert len(info.lines) == 3
    line, tokens = info.lines[0], float(np.min(found.table.columns["tokens"]))
    assert np.all((line.low < line.losses) & (line.losses < line.high))
    prediction = found.predict(params=line.sizes[0], tokens=tokens)[0].loss
    assert (line.losses[0], line.low[0], line.high[0]) == pytest.approx((prediction.value, *prediction.interval), rel=1e-3)
    assert line.sizes[0] < found.table.columns["params"].min() < found.table.columns["params"].max() < line.sizes[-1]


def test_against_compute_the_line_is_the_best_split(found: ScalingLawFit) -> None:
    line = loss_info(found, "flops").lines[0]
    split = found.optimal(float(line.sizes[-1])).loss
    assert (line.losses[-1], line.high[-1]) == pytest.approx((split.value, split.interval[1]), rel=1e-3)
    assert np.all(line.losses < np.interp(line.sizes, *loss_at_fixed_params(found)))


def loss_at_fixed_params(found: ScalingLawFit) -> tuple[np.ndarray, np.ndarray]:
    """Compute and loss of a model of 1e6 parameters, far too small for it."""
    tokens = np.geomspace(1e10, 1e18, 50)
    return 6e6 * tokens, found.losses(params=1e6, tokens=tokens)


def test_residuals_are_in_percent_and_positive_where_a_run_is_worse(found: ScalingLawFit) -> None:
    info = residual_info(found, "tokens")
    fitted = found.losses(params=found.table.columns["params"], tokens=found.table.columns["tokens"])
    assert info.residuals == pytest.approx(100 * np.log(found.table.loss / fitted))
    assert info.noise == pytest.approx(100 * found.noise)
    assert residual_info(found).at == pytest.approx(fitted)


def test_contours_hold_the_law_and_its_optimum(found: ScalingLawFit) -> None:
    info = contour_info(found, points=20)
    assert info.losses[3, 7] == pytest.approx(found.losses(params=info.params[7], tokens=info.tokens[3])[0])
    split = found.optimal(6 * info.optimal_params[2] * info.optimal_tokens[2])
    assert (info.params_low[2], info.params_high[2]) == pytest.approx(split.params.interval, rel=1e-6)


def test_a_profile_reaches_one_at_the_ends_of_the_interval(found: ScalingLawFit) -> None:
    for info in profile_info(found):
        for end in info.interval:
            assert np.interp(end, info.values, info.rise) == pytest.approx(1, abs=0.15)
        assert info.rise[np.abs(info.values / info.value - 1).argmin()] == 0


def test_drawing_takes_and_returns_axes_without_global_state(found: ScalingLawFit) -> None:
    before, axes = dict(rcParams), Figure().subplots(1, 4)
    assert draw_loss(axes[0], loss_info(found, "flops")) is axes[0]
    assert draw_residuals(axes[1], residual_info(found)) is axes[1]
    assert draw_contours(axes[2], contour_info(found, points=20)) is axes[2]
    assert draw_profile(axes[3], profile_info(found)[0]) is axes[3]
    labels = [(ax.get_xlabel(), ax.get_ylabel()) for ax in axes]
    assert labels[0] == ("compute (FLOP)", "loss (nats per token)")
    assert labels[1] == ("fitted loss (nats per token)", "residual (% of the loss)")
    assert labels[2] == ("parameters", "tokens")
    assert all(ax.get_xscale() == "log" for ax in (axes[0], axes[2]))
    assert dict(rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_a_law_of_one_size_and_one_that_nothing_is_left_to_judge_are_drawn() -> None:
    n = np.geomspace(1e7, 1e10, 12)
    one = figure_fit(fit(FitTable({"params": n}, 2 + 40 * n**-0.2), "power-constant"))
    assert len(one.axes) == 1 + 2 + 3
    few = fit(FitTable({"params": n[:3]}, np.array([3.0, 2.6, 2.4])), "power-constant")
    assert all(len(info.values) == 0 for info in profile_info(few))
    assert len(figure_fit(few).axes) == 6
