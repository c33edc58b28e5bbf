"""Plots of the laws of learning rate, batch and schedule. Numbers come from `*_info`, ink from `draw_*`: Axes in, Axes out, no
global state.

Losses in nats per token, batches in the table's unit, steps are optimizer steps; intervals at the fit's level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.critical_batch import CriticalBatchFit
from analysis.law import Array
from analysis.lr_batch_result import LrBatchFit
from analysis.palette import GREY, OTHER_COLOURS, PARAMETRIZATION_COLOURS, dress, sequential
from analysis.schedule_result import CurvePrediction, MultiPowerFit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY = 6
"""Cells that are drawn at most, spread over the sizes."""
LABELS = {
    "lr": "peak learning rate",
    "batch_tokens": "batch (tokens)",
    "params": "parameters",
    "tokens": "tokens",
    "flops": "FLOP",
}
BLUE, ORANGE = PARAMETRIZATION_COLOURS["mup"], PARAMETRIZATION_COLOURS["sp"]


@dataclass(frozen=True, eq=False)
class BottomCurve:
    """One size: best loss at each tried value of a knob (values, loss), the fitted curve (grid, curve), optimum and plateau;
    NaN or empty where there is none. censored: "low", "high", "unresolved" or empty.
    """

    label: str
    values: Array
    loss: Array
    grid: Array
    curve: Array
    optimum: float
    optimum_loss: float
    interval: tuple[float, float]
    plateau: tuple[float, float]
    censored: str


def bottom_info(fit: LrBatchFit, knob: str = "lr", share: float = 0.0025, window: float = 0.03) -> list[BottomCurve]:
    """Rise of the loss over the best run, in percent, against one knob (at the best value of the other), for up to MANY sizes."""
    index = fit.line.knobs.index(knob)
    chosen = np.unique(np.linspace(0, len(fit.optima) - 1, min(MANY, len(fit.optima))).round().astype(int)).tolist()
    curves = []
    for at in chosen:
        cell, optimum = fit.runs.cells[at], fit.optima[at]
        tried = np.unique(cell.logs[:, index].round(9))
        lowest = np.array([cell.rise[np.abs(cell.logs[:, index] - value) < 1e-6].min() for value in tried])
        near = lowest <= window
        grid, curve = optimum.line.get(knob, (np.empty(0), np.empty(0)))
        rise = 100 * (curve / optimum.best_loss - 1)
        estimate = optimum.knobs[knob]
        bottom = float(rise.min()) if len(rise) else 0.0
        low_grid = grid[rise <= bottom + 100 * share] if len(rise) else np.empty(0)
        plateau = (float(low_grid.min()), float(low_grid.max())) if len(low_grid) and optimum.usable else (np.nan, np.nan)
        censored = optimum.censored.get(knob, "")
        curves.append(
            BottomCurve(
                optimum.name,
                np.exp(tried[near]),
                100 * lowest[near],
                grid,
                rise,
                estimate.value,
                bottom,
                estimate.interval,
                plateau,
                censored,
            )
        )
    return curves


def draw_bottoms(ax: Axes, curves: Sequence[BottomCurve], knob: str = "lr") -> Axes:
    """Best runs and fitted curves; a diamond at each optimum, a thick bar over its plateau, an arrow where it is censored."""
    top = max(float(curve.loss.max()) for curve in curves)
    for colour, curve, level in zip(sequential(len(curves)), curves, range(len(curves)), strict=True):
        ax.plot(curve.values, curve.loss, "o", color=colour, markersize=4, markeredgewidth=0, label=curve.label)
        ax.plot(curve.grid, np.where(curve.curve <= top, curve.curve, np.nan), color=colour, linewidth=1.6)
        height = -0.05 * top * (1 + level)
        if curve.censored:
            marker = {"low": "<", "high": ">"}.get(curve.censored, "o")
            ax.plot([curve.optimum], [height], marker, color=colour, markersize=8, markeredgecolor="white", zorder=5)
            continue
        ax.plot(curve.plateau, [height, height], color=colour, linewidth=2.4, solid_capstyle="butt", alpha=0.45)
        ax.plot(curve.interval, [height, height], color=colour, linewidth=4.5, solid_capstyle="butt")
        ax.plot([curve.optimum], [height], "D", color=colour, markersize=6, markeredgecolor="white", zorder=5)
    ax.set_xscale("log", base=2 if knob == "lr" else 10)
    dress(ax, LABELS[knob], "loss above the best run (%)")
    # Below 0 lie the optima's bars, which have no height.
    ax.set_yticks([tick for tick in ax.get_yticks() if 0 <= tick <= top])
    ax.plot([], [], "-", color=GREY, linewidth=2.4, alpha=0.45, label="within 0.25 % of the best")
    ax.plot([], [], "D", color=GREY, markersize=6, label="optimum, with interval")
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


@dataclass(frozen=True, eq=False)
class LawPoints:
    """Optima of one knob against one size: value, ends, censoring ("", "low", "high", "unresolved"), another size for the
    colour, and the law with its band at that size for each of `levels`.
    """

    knob: str
    over: str
    other: str
    size: Array
    value: Array
    low: Array
    high: Array
    censored: tuple[str, ...]
    level_of: Array
    levels: tuple[float, ...]
    grid: Array
    law: Array
    band_low: Array
    band_high: Array
    """(levels, grid)"""


def law_info(fit: LrBatchFit, knob: str = "lr", over: str = "tokens") -> LawPoints:
    """Optima and the law's lines, one for each level of the other size (up to MANY)."""
    line, table = fit.line, fit.runs
    others = [name for name in line.regressors if name != over]
    other = others[0] if others else ""
    sizes, groups = table.column(over), table.column(other) if other else np.zeros(len(table.cells))
    estimates = [optimum.knobs[knob] for optimum in fit.optima]
    levels = np.unique(groups)
    shown = levels if len(levels) <= MANY else levels[np.unique(np.linspace(0, len(levels) - 1, MANY).round().astype(int))]
    grid = np.geomspace(sizes.min(), sizes.max(), 40)
    law, low, high = (np.empty((len(shown), len(grid))) for _ in range(3))
    for row, level in enumerate(shown):
        for column, size in enumerate(grid):
            at = {over: float(size), **({other: float(level)} if other else {})}
            found = line.predict(np.array([np.log(at[name]) for name in line.regressors]))[knob]
            law[row, column], (low[row, column], high[row, column]) = found.value, found.interval
    ends = np.array([item.interval for item in estimates])
    return LawPoints(
        knob, over, other, sizes, np.array([item.value for item in estimates]), ends[:, 0], ends[:, 1],
        tuple(optimum.censored.get(knob, "") for optimum in fit.optima), groups, tuple(shown.tolist()), grid, law, low, high,
    )  # fmt: skip


def draw_law(ax: Axes, info: LawPoints) -> Axes:
    """Optima with intervals, censored ones as arrows, the law with its band."""
    colours = sequential(len(info.levels))
    for colour, level, law, low, high in zip(colours, info.levels, info.law, info.band_low, info.band_high, strict=True):
        ax.fill_between(info.grid, low, high, color=colour, alpha=0.13, linewidth=0)
        label = f"{info.other} {level:.3g}" if info.other else "law"
        ax.plot(info.grid, law, color=colour, linewidth=1.5, label=label)
        for index in np.flatnonzero(info.level_of == level).tolist():
            size, value, censored = info.size[index], info.value[index], info.censored[index]
            if censored:
                marker = {"low": "v", "high": "^"}.get(censored, "o")
                face = colour if censored != "unresolved" else "none"
                ax.plot([size], [value], marker, color=colour, markersize=8, markerfacecolor=face, zorder=4)
                continue
            if np.isfinite([info.low[index], info.high[index]]).all():
                ax.vlines([size], info.low[index], info.high[index], color=colour, linewidth=1.6, zorder=4)
            ax.plot([size], [value], "o", color=colour, markersize=6, markeredgecolor="white", zorder=5)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _few_ticks(ax)
    dress(ax, LABELS[info.over], f"best {LABELS[info.knob]}")
    ax.legend(frameon=False, fontsize="small")
    return ax


@dataclass(frozen=True, eq=False)
class StepsCurve:
    """One size: steps to the target at measured batches, the fitted curve, linear scaling from the reference, the critical
    batch.
    """

    label: str
    batches: Array
    steps: Array
    grid: Array
    curve: Array
    critical: float
    interval: tuple[float, float]
    at: float
    """Fitted steps at the critical batch."""
    beyond: bool


def steps_info(fit: CriticalBatchFit) -> list[StepsCurve]:
    """Curves of all sizes, by the fit's definition."""
    found = []
    for curve in fit.curves:
        grid = np.geomspace(curve.batches.min(), curve.batches.max(), 100)
        critical = curve.critical[fit.definition]
        at = float(curve.curve(np.array([critical.value]))[0])
        beyond = fit.definition in curve.beyond
        found.append(
            StepsCurve(
                curve.name, curve.batches, curve.steps, grid, curve.curve(grid), critical.value, critical.interval, at, beyond
            )
        )
    return found


def draw_steps(ax: Axes, curves: Sequence[StepsCurve], definition: str, unit: str) -> Axes:
    """Steps to the target against batch; a diamond with its interval at each critical batch, an arrow where it was not reached."""
    for colour, curve in zip(sequential(len(curves)), curves, strict=True):
        ax.plot(curve.batches, curve.steps, "o", color=colour, markersize=5, markeredgewidth=0, label=curve.label)
        ax.plot(curve.grid, curve.curve, color=colour, linewidth=1.5)
        if curve.beyond:
            ax.plot([curve.critical], [curve.at], ">", color=colour, markersize=9, markeredgecolor="white", zorder=5)
            continue
        ends = [
            end if np.isfinite(end) and end > 0 else edge
            for end, edge in zip(curve.interval, (curve.batches.min(), curve.batches.max()), strict=True)
        ]
        ax.plot(ends, [curve.at, curve.at], color="black", linewidth=1.6, zorder=5)
        ax.plot([curve.critical], [curve.at], "D", color=colour, markersize=8, markeredgecolor="black", zorder=6)
    ax.plot([], [], "D", color="white", markeredgecolor="black", label="critical batch, with interval")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    dress(ax, f"batch ({unit})", "steps to the target loss")
    ax.set_title(f"critical batch: {definition}", loc="left", fontsize="medium")
    ax.legend(frameon=False, fontsize="small")
    return ax


@dataclass(frozen=True, eq=False)
class ScheduleCurve:
    """One schedule: measured points (empty if it was not run), the prediction with its interval, whether it was fitted."""

    label: str
    steps: Array
    loss: Array
    prediction: CurvePrediction
    fitted: bool


def schedules_info(fit: MultiPowerFit, names: Sequence[str] | None = None) -> list[ScheduleCurve]:
    """Curves of the table by name (default: all) with what the law says of them."""
    found = []
    for curve in fit.curves:
        if names is None or curve.name in names:
            found.append(
                ScheduleCurve(
                    curve.name, curve.steps.astype(float), curve.loss, fit.predict(curve.schedule), curve.name in fit.train
                )
            )
    return found


def draw_schedules(ax: Axes, curves: Sequence[ScheduleCurve], rates: Axes | None = None) -> Axes:
    """Loss against step: dots as measured, lines as predicted, bands for schedules that were not fitted. rates: another Axes
    for the LR.
    """
    colours = [BLUE, ORANGE, *OTHER_COLOURS]
    lowest, highest = np.inf, -np.inf
    for index, curve in enumerate(curves):
        colour, line = colours[index % len(colours)], ("-", "--", ":")[index // len(colours) % 3]
        predicted = curve.prediction
        every = max(1, len(curve.steps) // 60)
        ax.plot(curve.steps[::every], curve.loss[::every], "o", color=colour, markersize=3, markeredgewidth=0, alpha=0.7)
        label = f"{curve.label} ({'fitted' if curve.fitted else 'predicted'})"
        ax.plot(predicted.steps, predicted.loss, color=colour, linestyle=line, linewidth=1.4, label=label)
        if not curve.fitted:
            ax.fill_between(predicted.steps, predicted.low, predicted.high, color=colour, alpha=0.15, linewidth=0)
        lowest, highest = min(lowest, float(np.nanmin(predicted.loss))), max(highest, float(np.nanquantile(predicted.loss, 0.85)))
        if rates is not None:
            rates.plot(np.arange(len(predicted.schedule.lr)), predicted.schedule.lr, color=colour, linestyle=line, linewidth=1.2)
    ax.set_ylim(lowest - 0.1 * (highest - lowest), highest + 0.3 * (highest - lowest))
    dress(ax, "step", "loss (nats per token)")
    ax.plot([], [], "o", color=GREY, markersize=3, label="measured")
    ax.legend(frameon=False, fontsize="small")
    if rates is not None:
        dress(rates, "step", "learning rate")
        rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    return ax


def _few_ticks(ax: Axes) -> None:
    """Ticks at 1, 2 and 5 where a log axis spans little, as plain short numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, ends in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        narrow = ends[1] / ends[0] < 100
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axis.set_minor_formatter(NullFormatter())
