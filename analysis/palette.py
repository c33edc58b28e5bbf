"""The look of the plots: colours that are safe for colour-blind readers and dark enough for white paper, frame and grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARAMETRIZATION_COLOURS = {"mup": "#0072B2", "sp": "#D55E00"}
OTHER_COLOURS = ("#009E73", "#CC79A7", "#56B4E9", "#000000")
GREY = "#666666"
APPROACH_COLOURS = {1: "#D55E00", 2: "#0072B2", 3: "#009E73"}
"""Of the three approaches to the compute-optimal size."""


def sequential(count: int) -> list[tuple[float, float, float, float]]:
    """`count` colours from light to dark for ordered levels, out of viridis without its palest fifth."""
    from matplotlib import colormaps

    viridis = colormaps["viridis"]
    if count == 1:
        return [viridis(0.35)]
    return [viridis(0.82 - 0.77 * index / (count - 1)) for index in range(count)]


def for_parametrizations(names: Sequence[str]) -> dict[str, str]:
    """One colour a parametrization; mup and sp keep theirs in every plot."""
    others = iter(OTHER_COLOURS * (1 + len(names) // len(OTHER_COLOURS)))
    return {name: PARAMETRIZATION_COLOURS.get(name) or next(others) for name in names}


def dress(ax: Axes, x: str, y: str, title: str = "") -> None:
    """Labels, and the frame and grid that all plots share."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if title:
        ax.set_title(title, loc="left", fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
