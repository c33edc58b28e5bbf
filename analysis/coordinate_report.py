"""`coord.html`: a coordinate check as one self-contained page. Verdict and what to change first, then the table, the picture, the words.

Owns the page's content; the look is in coordinate_report.html.j2.
"""

from __future__ import annotations

import math
from pathlib import Path

import jinja2

from analysis.coordinate_verdict import CoordinateVerdict, TensorReport
from analysis.report import powers
from analysis.results import fixed, interval_text

MEANINGS = {
    "width": (
        (
            "grow",
            "How many of the tensor's dimensions grow with width: 2 for hidden matrices, 1 for embeddings, readouts, biases and gains.",
        ),
        (
            "init",
            "How the root mean square of a tensor's entries goes with width before the first step, as a power of the width.",
        ),
        (
            "update",
            "How the change of its entries after the check's steps does; it shows the learning rate, and eps and the schedule too.",
        ),
        (
            "sensitivity",
            "How the output's change for a random change of the tensor does, in the model as it starts; it shows forward multipliers.",
        ),
    ),
    "depth": (
        (
            "init",
            "How the root mean square of a tensor's entries goes with depth before the first step; for a block's, over all layers.",
        ),
        ("update", "How the change of its entries after the check's steps does; it shows the learning rate."),
        (
            "sensitivity",
            "How the output's change for a random change of one layer's tensor does, where branches are small beside the residual "
            "stream; it shows the branch multiplier. Update and sensitivity of a block's tensor add up to -1: all blocks together "
            "move the output by order one.",
        ),
    ),
}
FURTHER = (
    (
        "right",
        "What maximal update (for depth: CompleteP) demands of the number to its left; what another tensor explains is taken off.",
    ),
    (
        "in brackets",
        "The slope's 90 % interval over seeds, which are paired over the sizes. A slope is wrong when it is off by more than 0.25.",
    ),
)
STATISTICS = ("init", "update", "sensitivity")
RELATED = {"multiplier": "sensitivity", "eps": "update"}
"""Statistic that a culprit's own name is about."""


def render_report(verdict: CoordinateVerdict, title: str, picture: str) -> str:
    """The page. picture: an <svg> element."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"powers": powers, "fixed": fixed, "interval": interval_text}
    blamed = {(item.tensor, RELATED.get(item.statistic, item.statistic)) for item in verdict.culprits}
    effects = any(math.isfinite(item.effect.value) for item in verdict.tensors)
    return environment.get_template("coordinate_report.html.j2").render(
        title=title,
        verdict=verdict,
        statistics=STATISTICS,
        rows=[(item, cells(item), {name for name in STATISTICS if (item.name, name) in blamed}) for item in verdict.tensors],
        effects=effects,
        meanings=[*MEANINGS[verdict.axis], *FURTHER],
        picture=picture,
    )


def cells(item: TensorReport) -> dict[str, tuple[str, str, str]]:
    """Statistic -> slope, 90 % interval and what is right, as text."""
    found = {}
    for name in STATISTICS:
        slope, expected = getattr(item, name), item.expected.get(name, math.nan)
        known = math.isfinite(slope.value)
        right = fixed(expected, 2) if math.isfinite(expected) else "-"
        found[name] = (fixed(slope.value, 2) if known else "-", interval_text(slope.interval) if known else "", right)
    return found
