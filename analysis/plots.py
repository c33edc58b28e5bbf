"""Plots of learning-rate sweeps. Numbers come from `*_info`, ink from `draw_*`: Axes in, Axes out, no global state.

Losses in nats per token, learning rates on a log2 axis, intervals at 90 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from analysis.optimum import CellOptimum
from analysis.palette import GREY, dress, for_parametrizations, sequential
from analysis.results import Interval, interval_text, number
from analysis.shapes import Array
from analysis.table import LEARNING_RATE, PRUNED, Cell, RunTable
from analysis.transfer import TransferFit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

OPEN_REACH = 0.6
"""Length of an arrow that stands for an open end, octaves."""
HEADROOM = 0.14
"""Loss axis: this much of the lowest loss is shown above the highest bottom; what lies above is cut off."""


@dataclass(frozen=True)
class LrCurve:
    """One size's sweep: points, fitted bottom, optimum, divergences. log2 LRs and nats per token."""

    size: float
    log2_lr: Array
    loss: Array
    """Every finite run."""
    mean_log2_lr: Array
    mean_loss: Array
    fit_log2_lr: Array
    fit_loss: Array
    """Empty when there is no fit."""
    diverged: Array
    """log2 LRs of diverged runs."""
    pruned: Array
    """log2 LRs of runs that were ended early."""
    optimum: CellOptimum


@dataclass(frozen=True)
class LrCurvesInfo:
    """Numbers of one panel of LR curves."""

    parametrization: str
    axis: str
    curves: tuple[LrCurve, ...]
    """Ordered by size."""
    loss_range: Interval
    """For the loss axis: all bottoms, and enough above them."""

    @property
    def quantity(self) -> str:
        words = {curve.optimum.cell.quantity for curve in self.curves} - {LEARNING_RATE}
        return words.pop() if words else "peak learning rate"


def lr_curves_info(table: RunTable, optima: Sequence[CellOptimum], parametrization: str, axis: str = "width") -> LrCurvesInfo:
    """Curves of the cells in `optima` that belong to `parametrization`."""
    rows = {_key(cell): frame for cell, frame in table.cells()}
    chosen = sorted((item for item in optima if item.cell.parametrization == parametrization), key=lambda item: _size(item, axis))
    curves = tuple(_lr_curve(rows[_key(item.cell)], item, axis) for item in chosen)
    bottoms = [float(curve.mean_loss.min()) for curve in curves if len(curve.mean_loss)]
    if not bottoms:  # All diverged: crosses on an empty panel.
        return LrCurvesInfo(parametrization, axis, curves, (0.0, 1.0))
    low, top = min(bottoms), max(bottoms)
    highest = max(float(curve.mean_loss.max()) for curve in curves if len(curve.mean_loss))
    ceiling = min(highest + 0.02 * abs(low), top + HEADROOM * abs(low))
    return LrCurvesInfo(parametrization, axis, curves, (low - 0.12 * (ceiling - low), ceiling))


def _key(cell: Cell) -> tuple[str, tuple[float, ...]]:
    return cell.parametrization, cell.others("")


def _size(optimum: CellOptimum, axis: str) -> float:
    return optimum.cell.size(axis)


def _lr_curve(rows: pd.DataFrame, optimum: CellOptimum, axis: str) -> LrCurve:
    x, y = rows["log2_lr"].to_numpy(dtype=float), rows["loss"].to_numpy(dtype=float)
    finite, pruned = np.isfinite(y), rows["status"].to_numpy() == PRUNED
    lost = ~finite & ~pruned
    rates = np.unique(x[finite])
    means = np.array([y[finite & (x == rate)].mean() for rate in rates])
    grid = np.empty(0)
    if optimum.curve is not None:
        low, high = optimum.curve.window
        grid = np.linspace(min(low, optimum.log2_lr), max(high, optimum.log2_lr), 200)
    fit = optimum.curve(grid) if optimum.curve is not None else np.empty(0)
    return LrCurve(
        _size(optimum, axis), x[finite], y[finite], rates, means, grid, fit, np.unique(x[lost]), np.unique(x[pruned]), optimum
    )


def draw_lr_curves(ax: Axes, info: LrCurvesInfo) -> Axes:
    """Loss against learning rate, one colour a size (light small, dark large); the optimum with its interval below its curve."""
    low, high = info.loss_range
    for colour, curve in zip(sequential(max(1, len(info.curves))), info.curves, strict=False):
        label = f"{info.axis} {number(curve.size)}"
        ax.plot(curve.mean_log2_lr, curve.mean_loss, color=colour, linewidth=0.8, alpha=0.5, linestyle=":")
        ax.plot(curve.log2_lr, curve.loss, "o", color=colour, markersize=4, markeredgewidth=0, alpha=0.9, label=label)
        ax.plot(curve.fit_log2_lr, curve.fit_loss, color=colour, linewidth=1.8)
        _draw_optimum(ax, curve.optimum, colour, 0.03 * (high - low))
        # An artist without points and without clipping would upset the layout.
        beyond = np.unique(curve.log2_lr[curve.loss > high])
        for marked, marker in ((curve.diverged, "x"), (curve.pruned, "+"), (beyond, "^")):
            if len(marked):
                top = np.full(len(marked), high)
                ax.plot(marked, top, marker, color=colour, markersize=7, markeredgewidth=1.8, clip_on=False)
    if any((curve.loss > high).any() for curve in info.curves):
        ax.plot([], [], "^", color=GREY, label="beyond the axis")
    if any(len(curve.diverged) for curve in info.curves):
        ax.plot([], [], "x", color=GREY, label="diverged")
    if any(len(curve.pruned) for curve in info.curves):
        ax.plot([], [], "+", color=GREY, label="ended early")
    ax.set_ylim(low, high)
    dress(ax, info.quantity, "loss (nats per token)", info.parametrization)
    _power_of_two_axis(ax.xaxis)
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _draw_optimum(ax: Axes, optimum: CellOptimum, colour: tuple[float, float, float, float], drop: float) -> None:
    """A diamond at the optimum; its interval `drop` nats lower, where no curve hides it."""
    if not math.isfinite(optimum.log2_lr) or not math.isfinite(optimum.best_loss):
        return
    if optimum.censored:
        marker = "<" if optimum.censored == "low" else ">"
        ax.plot([optimum.log2_lr], [optimum.best_loss], marker, color=colour, markersize=9, markeredgecolor="white", zorder=5)
        return
    height = optimum.best_loss - drop
    for end, edge, arrow in zip(optimum.interval, optimum.sampled, "<>", strict=True):
        reached = end if math.isfinite(end) else edge
        ax.plot([optimum.log2_lr, reached], [height, height], color=colour, linewidth=2.2, solid_capstyle="butt", zorder=4)
        ax.plot(
            [reached], [height], "|" if math.isfinite(end) else arrow, color=colour, markersize=7, markeredgewidth=1.6, zorder=4
        )
    ax.plot([optimum.log2_lr], [optimum.best_loss], "D", color=colour, markersize=6, markeredgecolor="white", zorder=5)


@dataclass(frozen=True)
class OptimumLine:
    """One parametrization's optima over sizes, and the line through them."""

    parametrization: str
    sizes: Array
    log2_lr: Array
    low: Array
    """Ends of the 90 % intervals; infinite where open."""
    high: Array
    censored: tuple[str | None, ...]
    line_sizes: Array
    line: tuple[Array, Array, Array]
    """5, 50 and 95 % of the fitted line; empty without a fit."""
    slope: float
    slope_interval: Interval


@dataclass(frozen=True)
class OptimumInfo:
    """Numbers of the plot of the best learning rate against size."""

    axis: str
    lines: tuple[OptimumLine, ...]


def optimum_info(fits: Mapping[str, TransferFit]) -> OptimumInfo:
    """Optima and fitted lines of all parametrizations; unresolved cells are left out."""
    return OptimumInfo(next(iter(fits.values())).axis if fits else "width", tuple(_optimum_line(fit) for fit in fits.values()))


def _optimum_line(fit: TransferFit) -> OptimumLine:
    kept = [(size, item) for size, item in zip(fit.sizes(), fit.optima, strict=True) if math.isfinite(item.log2_lr)]
    sizes = np.array([size for size, _ in kept])
    grid, line = np.empty(0), (np.empty(0),) * 3
    if fit.line is not None and len(sizes) > 1:
        grid = np.geomspace(sizes.min(), sizes.max(), 60)
        line = fit.line.band(np.log2(grid))
    low, high = (np.array([item.interval[end] for _, item in kept]) for end in (0, 1))
    log2_lr, censored = np.array([item.log2_lr for _, item in kept]), tuple(item.censored for _, item in kept)
    return OptimumLine(
        fit.parametrization, sizes, log2_lr, low, high, censored, grid, line, fit.slope.value, fit.slope.interval
    )  # fmt: skip


def draw_optimum_vs_width(ax: Axes, info: OptimumInfo) -> Axes:
    """log2 LR* against size with 90 % intervals, the fitted line with its 90 % band; a censored optimum is an arrow."""
    colours = for_parametrizations([line.parametrization for line in info.lines])
    for index, line in enumerate(info.lines):
        colour = colours[line.parametrization]
        # A step aside keeps error bars of two parametrizations apart.
        sizes = line.sizes * 2.0 ** (0.05 * (index - (len(info.lines) - 1) / 2))
        if len(line.line_sizes):
            ax.fill_between(line.line_sizes, line.line[0], line.line[2], color=colour, alpha=0.15, linewidth=0)
            ax.plot(line.line_sizes, line.line[1], color=colour, linewidth=1.6)
        slope = f": {number(line.slope)} octaves per doubling" if math.isfinite(line.slope) else ""
        ax.plot(
            sizes,
            line.log2_lr,
            "o",
            color=colour,
            markersize=6,
            markeredgecolor="white",
            zorder=5,
            label=line.parametrization + slope,
        )
        for ends, sign, arrow in ((line.low, -1.0, "v"), (line.high, 1.0, "^")):
            known = np.isfinite(ends)
            tips = np.where(known, ends, line.log2_lr + sign * OPEN_REACH)
            ax.vlines(sizes, line.log2_lr, tips, color=colour, linewidth=1.6, zorder=4)
            ax.plot(sizes[known], tips[known], "_", color=colour, markersize=8, markeredgewidth=1.6, zorder=4)
            ax.plot(sizes[~known], tips[~known], arrow, color=colour, markersize=6, zorder=4)
    dress(ax, info.axis, "best peak learning rate", "")
    _size_axis(ax, sorted({float(size) for line in info.lines for size in line.sizes}))
    _power_of_two_axis(ax.yaxis)
    ax.legend(frameon=False, fontsize="small", loc="best")
    return ax


@dataclass(frozen=True)
class LossInfo:
    """Best loss of every size (nats per token), per parametrization: {name: (sizes, losses, low, high)}; NaN where unknown."""

    axis: str
    losses: dict[str, tuple[Array, Array, Array, Array]]


def loss_vs_width_info(optima: Sequence[CellOptimum], axis: str = "width") -> LossInfo:
    """Best losses with intervals; a censored cell's is the lowest loss that was measured."""
    losses = {}
    for name in sorted({item.cell.parametrization for item in optima}):
        chosen = [item for item in optima if item.cell.parametrization == name and math.isfinite(item.best_loss)]
        chosen.sort(key=lambda item: _size(item, axis))
        low, high = (np.array([item.best_loss_interval[end] if item.usable else math.nan for item in chosen]) for end in (0, 1))
        sizes, best = np.array([_size(item, axis) for item in chosen]), np.array([item.best_loss for item in chosen])
        losses[name] = (sizes, best, low, high)
    return LossInfo(axis, losses)


def draw_loss_vs_width(ax: Axes, info: LossInfo) -> Axes:
    """Best loss against size, each parametrization at its own best learning rates."""
    colours = for_parametrizations(list(info.losses))
    for name, (sizes, best, low, high) in info.losses.items():
        reach = np.maximum(0.0, np.nan_to_num([best - low, high - best]))
        ax.errorbar(
            sizes, best, yerr=reach, fmt="o-", color=colours[name], markersize=6, markeredgecolor="white", linewidth=1.4,
            elinewidth=1.6, capsize=3, label=name,
        )  # fmt: skip
    dress(ax, info.axis, "best loss (nats per token)", "")
    _size_axis(ax, sorted({float(size) for sizes, *_ in info.losses.values() for size in sizes}))
    ax.legend(frameon=False, fontsize="small")
    return ax


def figure_lr_curves(table: RunTable, fits: Mapping[str, TransferFit]) -> Figure:
    """LR curves of every parametrization side by side on the same axes; sp first, so that mup reads against it."""
    from analysis.figure import Picture

    names = sorted(fits, key=lambda name: (name != "sp", name))
    infos = [lr_curves_info(table, fits[name].optima, name, fits[name].axis) for name in names]
    figure = Picture(figsize=(1.4 + 4.3 * max(1, len(names)), 4.4), layout="constrained")
    axes = figure.subplots(1, max(1, len(names)), sharex=True, sharey=True, squeeze=False)[0]
    measured = [info.loss_range for info in infos if any(len(curve.loss) for curve in info.curves)]
    if measured:
        shared = (min(low for low, _ in measured), max(high for _, high in measured))
        infos = [replace(info, loss_range=shared) for info in infos]
    for ax, info in zip(axes, infos, strict=False):
        draw_lr_curves(ax, info)
        ax.set_title(_title(fits[info.parametrization]), loc="left", fontsize="medium")
    for ax in axes[1:]:
        ax.set_ylabel("")
    for ax in axes[:-1]:
        legend = ax.get_legend()
        if legend is not None and len({tuple(curve.size for curve in info.curves) for info in infos}) == 1:
            legend.remove()
    return figure


def figure_over_width(fits: Mapping[str, TransferFit]) -> Figure:
    """Best learning rate and best loss against size, side by side."""
    from analysis.figure import Picture

    figure = Picture(figsize=(10.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_optimum_vs_width(left, optimum_info(fits))
    axis = next(iter(fits.values())).axis if fits else "width"
    draw_loss_vs_width(right, loss_vs_width_info([item for fit in fits.values() for item in fit.optima], axis))
    return figure


def _title(fit: TransferFit) -> str:
    if not math.isfinite(fit.slope.value):
        return f"{fit.parametrization}: {fit.verdict}"
    slope = f"{number(fit.slope.value)} octaves per doubling {interval_text(fit.slope.interval)}"
    return f"{fit.parametrization}: {fit.verdict}\n{slope}"


def _power_of_two_axis(axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=3, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"$2^{{{number(value, 2)}}}$"))


def _size_axis(ax: Axes, sizes: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if not sizes or min(sizes) <= 0:
        return
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(list(sizes)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
