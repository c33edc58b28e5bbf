"""Plots: the numbers behind them, and that drawing leaves no trace outside of the Axes."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure

from analysis.palette import for_parametrizations, sequential
from analysis.plots import (
    draw_loss_vs_width,
    draw_lr_curves,
    draw_optimum_vs_width,
    figure_lr_curves,
    figure_over_width,
    loss_vs_width_info,
    lr_curves_info,
    optimum_info,
)
from analysis.table import RunTable, load_table
from analysis.transfer import TransferFit, transfer
from tests.analysis.proxy_tables import proxy_frame


@pytest.fixture(scope="module")
def study() -> tuple[RunTable, dict[str, TransferFit]]:
    frame = proxy_frame()
    lost = (frame["width"] == 256) & (frame["log2_lr"] > -6)
    cut = (frame["width"] == 256) & (frame["log2_lr"] < -8)
    table = load_table(frame.assign(loss=frame["loss"].mask(lost))[~cut])
    return table, transfer(table)


def test_lr_curves_info(study: tuple[RunTable, dict[str, TransferFit]]) -> None:
    table, fits = study
    info = lr_curves_info(table, fits["sp"].optima, "sp")
    assert [curve.size for curve in info.curves] == [32, 64, 128, 256]
    assert list(info.curves[3].diverged) == [-5, -4]
    low, high = info.loss_range
    bottoms = [curve.mean_loss.min() for curve in info.curves]
    assert low < min(bottoms) < max(bottoms) < high < 2.4
    for curve in info.curves[:3]:
        assert curve.fit_loss.min() == pytest.approx(curve.optimum.best_loss, abs=1e-3)
    assert info.curves[3].optimum.censored == "low"
    assert len(info.curves[3].fit_loss) == 0


def test_optimum_and_loss_info(study: tuple[RunTable, dict[str, TransferFit]]) -> None:
    _, fits = study
    lines = {line.parametrization: line for line in optimum_info(fits).lines}
    assert lines["sp"].censored == (None, None, None, "low")
    low, middle, high = lines["sp"].line
    assert np.all(low < middle)
    assert np.all(middle < high)
    assert middle[-1] < middle[0] - 1
    losses = loss_vs_width_info([item for fit in fits.values() for item in fit.optima]).losses
    assert set(losses) == {"sp", "mup"}
    sizes, best, ends, _ = losses["mup"]
    assert list(sizes) == [32, 64, 128, 256]
    assert np.all(np.diff(best) < 0)
    assert np.isnan(ends[-1])


def test_drawing_takes_and_returns_axes_without_global_state(study: tuple[RunTable, dict[str, TransferFit]]) -> None:
    table, fits = study
    before = dict(rcParams)
    axes = Figure().subplots(1, 3)
    assert draw_lr_curves(axes[0], lr_curves_info(table, fits["sp"].optima, "sp")) is axes[0]
    assert draw_optimum_vs_width(axes[1], optimum_info(fits)) is axes[1]
    assert draw_loss_vs_width(axes[2], loss_vs_width_info(fits["sp"].optima)) is axes[2]
    assert all(ax.get_xlabel() and "learning rate" in (ax.get_xlabel() + ax.get_ylabel()) for ax in axes[:2])
    assert "nats per token" in axes[0].get_ylabel()
    assert dict(rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_figures_share_the_loss_axis_and_can_be_written(study: tuple[RunTable, dict[str, TransferFit]]) -> None:
    table, fits = study
    figure = figure_lr_curves(table, fits)
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert left.get_title(loc="left").startswith("sp: ")
    for drawn in (figure, figure_over_width(fits)):
        buffer = io.BytesIO()
        drawn.savefig(buffer, format="png")
        assert len(buffer.getvalue()) > 10_000
    assert left.get_xticklabels()[0].get_text().startswith("$2^{")


def test_colours_are_dark_enough_for_white_paper_and_ordered() -> None:
    for count in (1, 2, 5, 9):
        colours = np.array(sequential(count))[:, :3]
        luminance = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
        assert np.all(np.diff(luminance) < 0)
        assert np.all(1.05 / (luminance + 0.05) > 1.6)
    assert len(set(for_parametrizations(["mup", "sp", "a", "b"]).values())) == 4


def test_a_figure_is_an_image_in_a_notebook_without_pyplot(study: tuple[RunTable, dict[str, TransferFit]]) -> None:
    from IPython.core.formatters import PNGFormatter

    figure = figure_over_width(study[1])
    assert PNGFormatter()(figure).startswith(b"\x89PNG")
