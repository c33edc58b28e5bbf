"""Plots of IsoFLOP analyses. Numbers come from `*_info`, ink from `draw_*`: Axes in, Axes out, no global state.

Losses in nats per token, sizes in parameters or tokens, compute in FLOP as the table counts it, all sizes on log axes. Budgets are
coloured from light (small) to dark (large); a censored optimum is an arrow towards where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from analysis.approaches import Approaches
from analysis.isoflop_result import BudgetOptimum, IsoFlopFit
from analysis.laws import Array
from analysis.palette import APPROACH_COLOURS, GREY, dress, sequential
from analysis.results import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Quantity = Literal["params", "tokens"]
LABELS = {"params": "optimal parameters", "tokens": "optimal tokens"}
SYMBOLS = {"params": "N", "tokens": "D"}
HEADROOM = 0.08
"""Loss axis: this much of a budget's lowest loss is shown above the highest minimum; what lies above is cut off."""
DROP = 0.02
"""An interval is drawn this share of the axis below its minimum, where no curve hides it."""
LEGEND_ROWS = 16


@dataclass(frozen=True)
class IsoFlopInfo:
    """Numbers of the plot of loss against size; budgets from small to large, loss_range for the axis, params_range of the runs."""

    budgets: tuple[BudgetOptimum, ...]
    loss_range: Interval
    params_range: Interval
    title: str


def isoflop_info(found: IsoFlopFit) -> IsoFlopInfo:
    """Curves, minima and intervals of every budget."""
    lowest = [float(budget.points[1].min()) for budget in found.budgets]
    highest = max(float(budget.points[1].max()) for budget in found.budgets)
    low, top = min(lowest), max(lowest)
    ceiling = min(highest + 0.02 * low, top * (1 + HEADROOM))
    params = found.table.columns["params"]
    title = f"{len(found.usable)} of {len(found.budgets)} budgets with a minimum, {found.method}"
    return IsoFlopInfo(found.budgets, (low - 0.08 * (ceiling - low), ceiling), (float(params.min()), float(params.max())), title)


def draw_isoflop(ax: Axes, info: IsoFlopInfo) -> Axes:
    """Loss against parameters, one colour a budget; a diamond at each minimum with its interval below, an arrow where it is censored."""
    low, high = info.loss_range
    cut = False
    for colour, budget in zip(sequential(len(info.budgets)), info.budgets, strict=True):
        params, loss = budget.points
        ax.plot(params, loss, "o", color=colour, markersize=3.5, markeredgewidth=0, label=f"{budget.flops:.3g}")
        ax.plot(*budget.line, color=colour, linewidth=1.4)
        beyond = np.unique(params[loss > high])
        if len(beyond):
            cut = True
            ax.plot(beyond, np.full(len(beyond), high), "^", color=colour, markersize=4, markeredgewidth=0, clip_on=False)
        _draw_minimum(ax, budget, colour, DROP * (high - low), info.params_range)
    if cut:
        ax.plot([], [], "^", color=GREY, markersize=4, label="above the axis")
    ax.set_xscale("log")
    ax.set_ylim(low, high)
    dress(ax, "parameters", "loss (nats per token)", info.title)
    _decades(ax.xaxis, info.params_range)
    columns = 1 + (len(info.budgets) - 1) // LEGEND_ROWS
    ax.legend(title="FLOP", frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=columns)
    return ax


def _draw_minimum(
    ax: Axes, budget: BudgetOptimum, colour: tuple[float, float, float, float], drop: float, reach: Interval
) -> None:
    if budget.censored == "unresolved":
        return
    place = budget.params.value
    if budget.censored:
        marker = "<" if budget.censored == "low" else ">"
        ax.plot([place], [budget.loss], marker, color=colour, markersize=9, markeredgecolor="white", zorder=5)
        return
    height = budget.loss - drop
    for end, edge, arrow in zip(budget.params.interval, budget.sampled, "<>", strict=True):
        if np.isnan(end):
            continue
        known = 0 < end < np.inf
        tip = float(np.clip(end if known else edge, *reach))
        ax.plot([place, tip], [height, height], color=colour, linewidth=2, solid_capstyle="butt", zorder=4)
        ax.plot([tip], [height], "|" if known else arrow, color=colour, markersize=6, markeredgewidth=1.5, zorder=4)
    ax.plot([place], [budget.loss], "D", color=colour, markersize=5, markeredgecolor="white", zorder=5)


@dataclass(frozen=True)
class LawLine:
    """One approach's law over FLOP: label, colour's number, flops, and low end, value and high end (empty where there is none)."""

    number: int
    label: str
    flops: Array
    band: tuple[Array, Array, Array]


@dataclass(frozen=True)
class OptimumInfo:
    """Numbers of the plot of the optimum against FLOP.

    points: (flops, value, low, high), an open end 0 or infinite. censored: (flops, edge, "low" or "high" of the quantity drawn). lines: the
    IsoFLOP law first; asked: FLOP of the compared budget, NaN without.
    """

    quantity: Quantity
    points: tuple[tuple[float, float, float, float], ...]
    censored: tuple[tuple[float, float, str], ...]
    lines: tuple[LawLine, ...]
    asked: float


def optimum_info(found: IsoFlopFit, quantity: Quantity = "params", approaches: Approaches | None = None) -> OptimumInfo:
    """Optima with intervals, and the laws of the approaches that could be taken, from the smallest budget to the largest or that asked."""
    estimates = [(budget, getattr(budget, quantity)) for budget in found.budgets]
    points = tuple((budget.flops, size.value, *size.interval) for budget, size in estimates if budget.usable)
    turned = {"low": "high", "high": "low"}
    censored = tuple(
        (budget.flops, size.value, budget.censored if quantity == "params" else turned[budget.censored])
        for budget, size in estimates
        if budget.censored in ("low", "high")
    )
    asked = np.nan if approaches is None else approaches.flops
    ends = [budget.flops for budget in found.budgets] + ([] if approaches is None else [asked])
    grid = np.geomspace(min(ends), max(ends), 120)
    law = found.params_law if quantity == "params" else found.tokens_law
    lines = []
    if law is not None:
        lines.append(LawLine(2, f"2 IsoFLOP: exponent {law.exponent.value:.3f}", grid, law.band(grid)))
    lines += _other_lines(approaches, quantity, grid) if approaches is not None else []
    return OptimumInfo(quantity, points, censored, tuple(lines), asked)


def _other_lines(approaches: Approaches, quantity: Quantity, grid: Array) -> list[LawLine]:
    lines, found = [], approaches.envelope
    if found is not None:
        law = found.params_law if quantity == "params" else found.tokens_law
        lines.append(LawLine(1, f"1 envelope: exponent {law.exponent.value:.3f}", grid, law.band(grid)))
    third = approaches.approaches[2]
    if not third.reason:
        estimate = third.params if quantity == "params" else third.tokens
        slope = third.exponent.value if quantity == "params" else 1 - third.exponent.value
        # The law's exponent at the budget asked; for laws without a power of their own it changes slowly with FLOP.
        value = estimate.value * (grid / approaches.flops) ** slope
        lines.append(LawLine(3, f"{third.number} {third.name}: exponent {slope:.3f}", grid, (np.empty(0), value, np.empty(0))))
    return lines


def draw_optimum(ax: Axes, info: OptimumInfo, approaches: Approaches | None = None) -> Axes:
    """Optimal size against FLOP: minima with intervals, the laws, the IsoFLOP law's band, each approach's interval at the budget asked."""
    for line in sorted(info.lines, key=lambda item: item.number):
        colour, (below, middle, above) = APPROACH_COLOURS[line.number], line.band
        if line.number == 2 and np.isfinite(below).all():
            ax.fill_between(line.flops, below, above, color=colour, alpha=0.15, linewidth=0)
        style = {1: (0, (1, 1.5)), 2: "-", 3: (0, (5, 2))}[line.number]
        ax.plot(line.flops, middle, color=colour, linewidth=1.6, linestyle=style, label=line.label)
    colour = APPROACH_COLOURS[2]
    for flops, value, low, high in info.points:
        for end, arrow in ((low, "v"), (high, "^")):
            if np.isnan(end):
                continue
            known = 0 < end < np.inf
            tip = end if known else value * (1.6 if arrow == "^" else 1 / 1.6)
            ax.plot([flops, flops], [value, tip], color=colour, linewidth=1.4, zorder=3)
            ax.plot([flops], [tip], "_" if known else arrow, color=colour, markersize=6, markeredgewidth=1.4, zorder=3)
        ax.plot([flops], [value], "o", color=colour, markersize=5.5, markeredgecolor="white", zorder=4)
    for flops, edge, side in info.censored:
        ax.plot([flops], [edge], "v" if side == "low" else "^", color=GREY, markersize=8, markeredgecolor="white", zorder=4)
    if info.censored:
        ax.plot([], [], "v", color=GREY, markersize=8, markeredgecolor="white", label="edge of the sizes: at most, at least")
    if approaches is not None:
        _draw_asked(ax, info, approaches)
    ax.set_xscale("log")
    ax.set_yscale("log")
    dress(ax, "compute (FLOP)", f"{LABELS[info.quantity]} {SYMBOLS[info.quantity]}", "")
    for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        _decades(axis, limits)
    ax.legend(frameon=False, fontsize="small", loc="upper left")
    return ax


def _draw_asked(ax: Axes, info: OptimumInfo, approaches: Approaches) -> None:
    """Each approach's value and interval at the budget asked, a step apart."""
    taken = [item for item in approaches.approaches if not item.reason]
    for index, item in enumerate(taken):
        estimate, colour = getattr(item, info.quantity), APPROACH_COLOURS[item.number]
        at = approaches.flops * 1.12 ** (index - (len(taken) - 1) / 2)
        low, high = estimate.interval
        if np.isfinite([low, high]).all() and low > 0:
            ax.plot([at, at], [low, high], color=colour, linewidth=2.4, solid_capstyle="butt", zorder=5)
        ax.plot([at], [estimate.value], "D", color=colour, markersize=5.5, markeredgecolor="white", zorder=6)


def figure_isoflop(found: IsoFlopFit, approaches: Approaches | None = None) -> Figure:
    """Curves, N_opt and D_opt side by side."""
    from analysis.figure import Picture

    figure = Picture(figsize=(15.0, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.25, 1, 1])
    draw_isoflop(left, isoflop_info(found))
    for ax, quantity in ((middle, "params"), (right, "tokens")):
        draw_optimum(ax, optimum_info(found, quantity, approaches), approaches)  # type: ignore[arg-type]
    return figure


def _decades(axis: Axis, limits: Sequence[float]) -> None:
    """Few ticks: powers of ten, with 2 and 5 between them where there are hardly any, in one notation."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = np.log10(limits[1] / limits[0])
    parts = (1.0, 2.0, 5.0) if decades < 1.5 else (1.0, 3.0) if decades < 3 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=parts, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _power(float(value))))


def _power(value: float) -> str:
    """1e9 as $10^{9}$, 3e9 as $3\\cdot10^{9}$."""
    power = int(np.floor(np.log10(value) + 1e-9))
    factor = value / 10.0**power
    return f"$10^{{{power}}}$" if abs(factor - 1) < 1e-6 else f"${factor:.0f}\\cdot10^{{{power}}}$"
