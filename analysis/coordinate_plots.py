"""The coordinate check's picture: each statistic against width (or depth) beside the slope it should have, culprits in colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.coordinate_verdict import Axis, CoordinateVerdict
from analysis.palette import GREY
from analysis.results import number
from analysis.shapes import Array
from scaling.coordinate_rows import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "init": "init: RMS of the entries",
    "update": "update: RMS of an entry's change",
    "sensitivity": "sensitivity of the output",
    "activation": "mean |activation| (not judged)",
}
# Okabe and Ito's colours without yellow, which is too pale for a line.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
NAMED = 7
"""Culprits that get a colour of their own; further ones share the last."""


@dataclass(frozen=True)
class Line:
    """One tensor's (or module's) statistic, the mean over seeds, divided by its value at the smallest width."""

    name: str
    widths: Array
    ratio: Array
    culprit: bool


@dataclass(frozen=True)
class PanelInfo:
    """Numbers of one panel. expected: the slopes that right tensors have."""

    statistic: str
    lines: tuple[Line, ...]
    expected: tuple[float, ...]
    axis: Axis = "width"


def panel_info(measurement: Measurement, verdict: CoordinateVerdict, statistic: str) -> PanelInfo:
    """Lines of one statistic; what is zero (a zero init) or not finite at some width has none."""
    named = {item.tensor for item in verdict.culprits if item.statistic in (statistic, *_RELATED.get(statistic, ()))}
    sums: dict[str, dict[int, list[float]]] = {}
    for row in measurement.rows:
        if row.statistic == statistic:
            sums.setdefault(row.name, {}).setdefault(row.width, []).append(row.value)
    lines = []
    for name, by_width in sums.items():
        widths = np.array(sorted(by_width))
        values = np.array([np.mean(by_width[width]) for width in widths])
        if len(widths) > 1 and (values > 0).all() and np.isfinite(values).all():
            lines.append(Line(name or "output", widths, values / values[0], name in named))
    # With depth what is right follows what is measured: a line for each quarter of a power is enough.
    unit = 0.01 if verdict.axis == "width" else 0.25
    expected = [item.expected[statistic] for item in verdict.tensors if np.isfinite(item.expected.get(statistic, np.nan))]
    slopes = {round(round(slope / unit) * unit, 2) + 0.0 for slope in expected}
    return PanelInfo(statistic, tuple(lines), tuple(sorted(slopes)), verdict.axis)


_RELATED: Mapping[str, Sequence[str]] = {"update": ("eps",), "sensitivity": ("multiplier",)}


def draw_panel(ax: Axes, info: PanelInfo, colours: Mapping[str, int]) -> Axes:
    """Grey lines are right, coloured ones culprits, dashed ones what is expected."""
    widths = np.unique(np.concatenate([line.widths for line in info.lines])) if info.lines else np.array([1.0, 2.0])
    for line in sorted(info.lines, key=lambda line: line.culprit):
        place = min(colours.get(line.name, 0), NAMED - 1)
        if line.culprit:
            style = {"color": COLOURS[place], "marker": MARKERS[place], "linewidth": 1.8, "markersize": 5, "label": line.name}
        else:
            style = {"color": GREY, "linewidth": 0.9, "alpha": 0.6}
        ax.plot(line.widths, line.ratio, **style)  # type: ignore[arg-type]  # one dict of mixed values
    for slope in info.expected:
        ax.plot(widths, (widths / widths[0]) ** slope, color="black", linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)
        ax.annotate(
            f"slope {number(slope)}", (widths[-1], (widths[-1] / widths[0]) ** slope), xytext=(4, 0), textcoords="offset points",
            fontsize="x-small", va="center", annotation_clip=False,
        )  # fmt: skip
    _finish(ax, PANELS[info.statistic], widths, info.axis)
    return ax


def _finish(ax: Axes, title: str, widths: Array, axis: Axis) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(list(widths)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.4), max(high, 2.5))
    ax.set_xlabel(axis)
    ax.set_ylabel(f"relative to the smallest {axis}")
    ax.set_title(title, loc="left", fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize="x-small", loc="best")


def figure_coordinates(measurement: Measurement, verdict: CoordinateVerdict) -> Figure:
    """All panels in two rows, the verdict above them."""
    from analysis.figure import Picture

    figure = Picture(figsize=(10.6, 7.6), layout="constrained")
    colours = {
        name: place for place, name in enumerate(dict.fromkeys(item.tensor for item in verdict.culprits if item.tensor != "loss"))
    }
    for ax, statistic in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        draw_panel(ax, panel_info(measurement, verdict, statistic), colours)
    wrong = ", ".join(colours) or "no tensor is blamed"
    figure.suptitle(f"{verdict.verdict}: {wrong if len(wrong) < 110 else f'{len(colours)} culprits'}", x=0.01, ha="left")
    return figure
