"""Plots of a fitted law: runs with the law and its band, residuals, contours of the loss, profile likelihoods.

Numbers come from `*_info`, ink from `draw_*`: Axes in, Axes out, no global state. Losses in nats per token, sizes on log axes, intervals
and bands at the fit's level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.fit_left_out import levels
from analysis.fit_result import FLOP_PER_PARAM_TOKEN, ScalingLawFit
from analysis.fit_uncertainty import printed, profile
from analysis.law import Array
from analysis.palette import GREY, PARAMETRIZATION_COLOURS, dress, sequential
from analysis.results import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NAMES = {
    "params": "parameters",
    "tokens": "tokens",
    "flops": "compute (FLOP)",
    "unique_tokens": "unique tokens",
    "experts": "experts",
}
LINES, POINTS, BEYOND = 3, 7, 10**0.3
"""Lines of a panel, points of a line at which its band is computed, and how far a line goes beyond the runs."""
DOTS: dict[str, Any] = {"markeredgewidth": 0, "alpha": 0.6, "zorder": 3}
BLUE, RED = PARAMETRIZATION_COLOURS["mup"], PARAMETRIZATION_COLOURS["sp"]


@dataclass(frozen=True)
class LossLine:
    """The law along one size: label, sizes (m,), losses and the ends of their band (m,), nats per token."""

    label: str
    sizes: Array
    losses: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class LossInfo:
    """Runs against one size, and the law: at a few levels of the other size, or along the compute-optimal split.

    nearest (n,): the line whose level lies nearest to each run.
    """

    against: str
    sizes: Array
    losses: Array
    nearest: Array
    lines: tuple[LossLine, ...]
    level: float


def loss_info(found: ScalingLawFit, against: str) -> LossInfo:
    """against: a size that the law reads, or flops for a law of params and tokens."""
    table, law = found.table, found.law
    sizes = table.columns[against]
    grid = np.geomspace(sizes.min() / BEYOND, sizes.max() * BEYOND, POINTS)
    nearest = np.zeros(len(table))
    if against not in law.columns:
        splits = [found.optimal(float(flops)).loss for flops in grid]
        ends = [np.array([split.interval[end] for split in splits]) for end in (0, 1)]
        values = np.array([split.value for split in splits])
        lines = [_smooth("compute-optimal", grid, values, *ends)]
    else:
        others = [name for name in law.columns if name != against]
        held = _levels(table.columns[others[0]]) if others else np.ones(1)
        rest = {name: float(np.exp(np.log(table.columns[name]).mean())) for name in others[1:]}
        lines = [_line(found, against, grid, others, value, rest) for value in held]
        if others:
            away = np.abs(np.log(table.columns[others[0]])[:, None] - np.log(held))
            nearest = away.argmin(axis=1).astype(float)
    return LossInfo(against, sizes, table.loss, nearest, tuple(lines), found.level)


def _levels(values: Array) -> Array:
    """A few levels of a size with many runs on both sides of each, or all there are."""
    member, found = levels(values)
    if len(found) <= LINES:
        return found
    return np.asarray(found[np.unique(np.quantile(member, np.linspace(0.1, 0.9, LINES), method="nearest"))])


def _line(
    found: ScalingLawFit, against: str, grid: Array, others: Sequence[str], value: float, rest: dict[str, float]
) -> LossLine:
    sizes = {against: grid, **({others[0]: value} if others else {}), **rest}
    predicted = [prediction.loss for prediction in found.predict(**sizes)]
    ends = [np.array([estimate.interval[end] for estimate in predicted]) for end in (0, 1)]
    label = f"{_plain(value)} {NAMES[others[0]]}" if others else "law"
    return _smooth(label, grid, np.array([estimate.value for estimate in predicted]), *ends)


def _smooth(label: str, grid: Array, values: Array, low: Array, high: Array) -> LossLine:
    """The line and its band on a fine grid; open ends of the band stay open."""
    from scipy.interpolate import PchipInterpolator

    fine = np.geomspace(grid[0], grid[-1], 120)
    known = np.isfinite(low) & np.isfinite(high) & (low > 0)
    whole = [
        np.exp(PchipInterpolator(np.log(grid), np.log(part))(np.log(fine))) for part in (values, np.where(known, low, values))
    ]
    top = np.exp(PchipInterpolator(np.log(grid), np.log(np.where(known, high, values)))(np.log(fine)))
    covered = np.interp(np.log(fine), np.log(grid), known.astype(float)) > 0.999
    return LossLine(label, fine, whole[0], np.where(covered, whole[1], np.nan), np.where(covered, top, np.nan))


def draw_loss(ax: Axes, info: LossInfo) -> Axes:
    """Runs as points in the colour of the nearest line; lines with their bands."""
    colours = [BLUE] if len(info.lines) == 1 else sequential(len(info.lines))
    for index, (colour, line) in enumerate(zip(colours, info.lines, strict=True)):
        mine = info.nearest == index
        plain = GREY if len(info.lines) == 1 else colour
        ax.plot(info.sizes[mine], info.losses[mine], "o", color=plain, markersize=_dot(info.sizes), **DOTS)
        ax.fill_between(line.sizes, line.low, line.high, color=colour, alpha=0.25, linewidth=0)
        ax.plot(line.sizes, line.losses, color=colour, linewidth=1.7, label=line.label)
    ax.set_xscale("log")
    # Lines leave the runs' range upwards fast where two small sizes meet.
    low = min(float(info.losses.min()), *(float(line.losses.min()) for line in info.lines))
    high = float(info.losses.max())
    ax.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    dress(ax, NAMES[info.against], "loss (nats per token)")
    _decades(ax.xaxis, ax.get_xlim())
    ax.legend(frameon=False, fontsize="small", title=f"law, {100 * info.level:g} % band", title_fontsize="small")
    return ax


@dataclass(frozen=True)
class ResidualInfo:
    """Residuals of the runs (percent of the loss, or nats for losses of raw residuals) against the fitted loss or a size."""

    against: str
    at: Array
    residuals: Array
    noise: float
    in_logs: bool


def residual_info(found: ScalingLawFit, against: str = "fitted") -> ResidualInfo:
    """against: "fitted", or a size of the table. Positive residuals: the run is worse than the law."""
    fitted = found.fitted.law.value(found.fitted.theta[None], found.fitted.x)[0][0]
    scale = 100.0 if found.loss.in_logs else 1.0
    at = fitted if against == "fitted" else found.table.columns[against]
    return ResidualInfo(against, at, -scale * found.fitted.residuals(), scale * found.noise, found.loss.in_logs)


def draw_residuals(ax: Axes, info: ResidualInfo) -> Axes:
    """Points, the law at zero, and one standard deviation of the noise on either side."""
    if np.isfinite(info.noise):
        ax.axhspan(-info.noise, info.noise, color=BLUE, alpha=0.12, linewidth=0, label="one standard deviation")
        ax.margins(y=0.16)
        ax.legend(frameon=False, fontsize="small", loc="upper left")
    ax.axhline(0, color=BLUE, linewidth=1.4)
    ax.plot(info.at, info.residuals, "o", color=GREY, markersize=_dot(info.at), **DOTS)
    dress(
        ax,
        "fitted loss (nats per token)" if info.against == "fitted" else NAMES[info.against],
        f"residual ({'% of the loss' if info.in_logs else 'nats per token'})",
    )
    if info.against != "fitted":
        ax.set_xscale("log")
        _decades(ax.xaxis, ax.get_xlim())
    return ax


@dataclass(frozen=True)
class ContourInfo:
    """The law over parameters and tokens: loss (i, j) at tokens[i] and params[j]; runs; the compute-optimal line with its interval."""

    params: Array
    tokens: Array
    losses: Array
    run_params: Array
    run_tokens: Array
    optimal_params: Array
    optimal_tokens: Array
    params_low: Array
    params_high: Array


def contour_info(found: ScalingLawFit, points: int = 80) -> ContourInfo:
    """For laws of params and tokens; the line is empty for laws that do not split a budget."""
    runs = [found.table.columns[name] for name in ("params", "tokens")]
    params, tokens = (np.geomspace(values.min() / BEYOND, values.max() * BEYOND, points) for values in runs)
    n, d = np.meshgrid(params, tokens)
    losses = found.losses(params=n.ravel(), tokens=d.ravel()).reshape(n.shape)
    line: list[Array] = [np.empty(0)] * 4
    if found.law.optimum(found.fitted.theta[None], found.fitted.x.centres, 0.0) is not None:
        product = runs[0] * runs[1]
        budgets = FLOP_PER_PARAM_TOKEN * np.geomspace(product.min() / BEYOND, product.max() * BEYOND, POINTS)
        splits = [found.optimal(float(flops)) for flops in budgets]
        best = np.array([split.params.value for split in splits])
        ends = [np.array([split.params.interval[end] for split in splits]) for end in (0, 1)]
        line = [best, np.array([split.tokens.value for split in splits]), *ends]
    return ContourInfo(params, tokens, losses, runs[0], runs[1], *line)


def draw_contours(ax: Axes, info: ContourInfo) -> Axes:
    """Lines of equal loss, the runs, and the compute-optimal sizes with the interval of the parameters at each budget."""
    low, high = float(info.losses.min()), float(info.losses.max())
    # Even steps of the logarithm above the lowest loss: the loss flattens towards large sizes.
    steps = low + (high - low) * np.geomspace(0.02, 0.8, 8)
    lines = ax.contour(info.params, info.tokens, info.losses, levels=steps, colors=sequential(len(steps))[::-1], linewidths=1.1)
    ax.clabel(lines, fmt="%.2f", fontsize="x-small")
    ax.plot(info.run_params, info.run_tokens, "o", color=GREY, markersize=_dot(info.run_params), label="runs", **DOTS)
    if len(info.optimal_params):
        # At a budget, fewer parameters are more tokens: the interval lies along N D = constant.
        product = info.optimal_params * info.optimal_tokens
        for ends in zip(info.params_low, info.params_high, product, strict=True):
            if np.isfinite(ends).all() and ends[0] > 0:
                ax.plot(ends[:2], [ends[2] / ends[0], ends[2] / ends[1]], color=RED, linewidth=1.2)
        ax.plot(info.optimal_params, info.optimal_tokens, "o-", color=RED, markersize=4, linewidth=1.7, label="compute-optimal")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(info.params[0], info.params[-1])
    ax.set_ylim(info.tokens[0], info.tokens[-1])
    dress(ax, NAMES["params"], NAMES["tokens"])
    _decades(ax.xaxis, ax.get_xlim())
    _decades(ax.yaxis, ax.get_ylim())
    ax.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize="small", loc="upper left")
    return ax


@dataclass(frozen=True)
class ProfileInfo:
    """The profile likelihood of one parameter: values (m,), the rise of the best objective (m,) over the rise at the interval's ends."""

    name: str
    values: Array
    rise: Array
    value: float
    interval: Interval
    log: bool
    level: float


def profile_info(found: ScalingLawFit) -> list[ProfileInfo]:
    """One for each parameter; empty curves where no row is left to judge by."""
    fitted, law = found.fitted, found.law
    profiles = profile(fitted, printed(law, fitted.x.centres), found.level)
    result = []
    for index, name in enumerate(law.parameters):
        log, estimate = name in law.positive, found.params[name]
        values, root = profiles.curves.points(index) if profiles.curves is not None else (np.empty(0), np.empty(0))
        reach = fitted.quantile(found.level) * profiles.wider[index] if len(root) else 1.0
        with np.errstate(over="ignore"):
            plain = np.exp(values) if log else values
        result.append(ProfileInfo(name, plain, (root / reach) ** 2, estimate.value, estimate.interval, log, found.level))
    return result


def draw_profile(ax: Axes, info: ProfileInfo) -> Axes:
    """The rise against the parameter: 1 where the interval ends; the fitted value dotted, an open end without a line."""
    from scipy.interpolate import PchipInterpolator

    shown = info.rise <= 4
    if shown.sum() > 2:
        axis = np.log(info.values[shown]) if info.log else info.values[shown]
        fine = np.linspace(axis[0], axis[-1], 200)
        root = np.sqrt(info.rise[shown]) * np.where(info.values[shown] < info.value, -1, 1)
        ax.plot(np.exp(fine) if info.log else fine, PchipInterpolator(axis, root)(fine) ** 2, color=BLUE, linewidth=1.7)
    ax.axhline(1, color=GREY, linewidth=1, linestyle="--")
    ax.axvline(info.value, color=BLUE, linewidth=1, linestyle=":")
    for end in info.interval:
        if np.isfinite(end):
            ax.plot([end, end], [0, 1], color=RED, linewidth=1.4)
    ax.set_ylim(0, 2.5)
    if info.log:
        ax.set_xscale("log")
    dress(ax, info.name, f"rise of the objective, {100 * info.level:g} % = 1")
    _few(ax.xaxis, ax.get_xlim(), info.log)
    return ax


def figure_fit(found: ScalingLawFit) -> Figure:
    """Loss against each size, contours, residuals, and a row of profiles: whatever the law has."""
    from analysis.figure import Picture

    joint = set(found.law.columns) == {"params", "tokens"}
    splits = joint and found.law.optimum(found.fitted.theta[None], found.fitted.x.centres, 0.0) is not None
    sizes = [*found.law.columns, *(["flops"] if splits and "flops" in found.table.columns else [])]
    figure = Picture(figsize=(4.1 * max(len(sizes), 3), 11.2), layout="constrained")
    parts: Any = figure.subfigures(3, 1, height_ratios=[1.15, 1.15, 0.9])
    top, middle, bottom = parts
    for ax, size in zip(np.atleast_1d(top.subplots(1, len(sizes))), sizes, strict=True):
        draw_loss(ax, loss_info(found, size))
    panels = [*(["contours"] if joint else []), "fitted", *([*found.law.columns][: 2 - joint])]
    for ax, panel in zip(np.atleast_1d(middle.subplots(1, len(panels))), panels, strict=True):
        if panel == "contours":
            draw_contours(ax, contour_info(found))
        else:
            draw_residuals(ax, residual_info(found, panel))
    profiles = profile_info(found)
    for index, (ax, info) in enumerate(zip(np.atleast_1d(bottom.subplots(1, len(profiles))), profiles, strict=True)):
        draw_profile(ax, info)
        if index:
            ax.set_ylabel("")
    figure.suptitle(_title(found), fontsize="medium", x=0.01, ha="left")
    return figure


def _title(found: ScalingLawFit) -> str:
    word = "trusted" if found.trusted else "not to be trusted" if found.success else "no minimum was reached"
    return f"{found.law.name}: L = {found.law.formula};  {len(found.table)} runs, {found.loss.kind}, {word}".replace(
        "L = log10 L", "log10 L"
    )


def _dot(runs: Array) -> float:
    """Points of size: few runs would be lost under their lines, many cover each other."""
    return 5.5 if len(runs) <= 60 else 3.5


def _decades(axis: Axis, limits: tuple[float, float]) -> None:
    """Few ticks: powers of ten; with 3 between them where there are under three decades, 2 and 5 where there is hardly one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = np.log10(limits[1] / limits[0])
    parts = (1.0, 2.0, 5.0) if decades < 1.3 else (1.0, 3.0) if decades < 2.6 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=parts, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _power(float(value))))


def _few(axis: Axis, limits: tuple[float, float], log: bool) -> None:
    """Two or three numbers on a narrow panel."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    if not log:
        axis.set_major_locator(MaxNLocator(nbins=3))
        return
    if limits[1] / limits[0] > 30:
        _decades(axis, (limits[0], limits[0] * 1e3))
        return
    ends = np.geomspace(*limits, 5)[[1, 3]]
    axis.set_major_locator(FixedLocator(sorted({float(f"{end:.1g}") for end in ends})))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _plain(value: float) -> str:
    """8.2e8 as $8.2\\cdot10^{8}$, 64 as 64."""
    factor, power = f"{value:.1e}".split("e")
    if value < 1e4:
        return f"{value:.4g}" if value >= 1000 else f"{value:.3g}"
    return _power(float(f"{value:.1e}")) if factor.endswith(".0") else f"${factor}\\cdot10^{{{int(power)}}}$"


def _power(value: float) -> str:
    """1e9 as $10^{9}$, 3e9 as $3\\cdot10^{9}$."""
    power = int(np.floor(np.log10(value) + 1e-9))
    factor = value / 10.0**power
    return f"$10^{{{power}}}$" if abs(factor - 1) < 1e-6 else f"${factor:.0f}\\cdot10^{{{power}}}$"
