"""`report.html`: one self-contained page. Verdict sentence first, tables second, plots third, then the recommendation's steps.

Owns the page's content; the look is in report.html.j2. Numbers come from the fits; nothing is computed here but layout.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup, escape

from analysis.axes import AxisFit, line_table
from analysis.plots import figure_lr_curves, figure_over_width
from analysis.recommend import Recommendation, lr_range
from analysis.results import fixed, interval_text, number
from analysis.table import RunTable
from analysis.transfer import TransferFit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFERRED = ("completep", "mup", "mup-simple")
CAPTIONS = {
    "lr_curves": (
        "Loss against learning rate, by width. Points are runs, dotted lines join their means, solid lines are fitted near the "
        "bottom; a diamond marks the optimum, the bar below it its 90 % interval (only its length counts; an arrow: no bound). "
        "A triangle at the top is a run beyond the axis."
    ),
    "over_width": (
        "Best learning rate and best loss against width, with 90 % intervals; the band is that of the fitted line. "
        "An arrow stands for an end that the runs do not bound."
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Best losses at the largest width that all parametrizations share."""

    width: int
    losses: Mapping[str, float]

    def sentence(self) -> str:
        """Which parametrization is better there, and by how much."""
        order = sorted(self.losses, key=lambda kind: self.losses[kind])
        parts = [f"{kind} {self.losses[kind]:.4f}" for kind in order]
        text = f"Best validation loss at width {self.width}: {', '.join(parts)} nats per token"
        if len(order) > 1:
            text += f"; {order[0]} is better by {self.losses[order[1]] - self.losses[order[0]]:.4f}"
        return text + "."


def compare_losses(fits: Mapping[str, TransferFit]) -> Comparison | None:
    """Best losses at the largest common width, or None when the parametrizations share none."""
    by_kind = {
        kind: {optimum.width: optimum.best_loss for optimum in fit.optima if math.isfinite(optimum.best_loss)}
        for kind, fit in fits.items()
    }
    common = set.intersection(*(set(losses) for losses in by_kind.values())) if by_kind else set()
    if not common:
        return None
    width = max(common)
    return Comparison(width, {kind: losses[width] for kind, losses in by_kind.items()})


def preferred(fits: Mapping[str, TransferFit]) -> TransferFit:
    """The fit that a recommendation starts from: of the parametrization that carries most over, else the first."""
    return next((fits[kind] for kind in PREFERRED if kind in fits), next(iter(fits.values())))


def remarks(fit: TransferFit) -> list[str]:
    """What there is to say about the cells, each sentence once with the sizes that it is about."""
    said: dict[str, list[str]] = {}
    for size, item in zip(fit.sizes(), fit.optima, strict=True):
        for flag in item.flags:
            said.setdefault(flag, []).append(number(size))
    return [f"{fit.axis} {', '.join(where)}: {flag}" for flag, where in said.items()]


def svg(figure: Figure) -> str:
    """The figure as an <svg> element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def powers(text: str) -> Markup:
    """2^-7.5 as a superscript, the rest escaped."""
    return Markup(re.sub(r"\^\{?(-?[\d.]*\d|\[[^\]]*\])\}?", r"<sup>\1</sup>", str(escape(text))))


def write_report(
    path: Path,
    title: str,
    table: RunTable,
    fits: Mapping[str, TransferFit],
    recommendation: Recommendation | None,
    facts: Sequence[tuple[str, str]],
    axes: Mapping[str, Mapping[str, AxisFit]] | None = None,
) -> None:
    """Write the page to `path`, and its pictures as SVG files beside it.

    facts: (name, value) rows about the study: data, model, runs, versions. axes: what was varied beside width, by name.
    """
    from scaling.records import write_atomic

    pictures = {"lr_curves": svg(figure_lr_curves(table, fits)), "over_width": svg(figure_over_width(fits))}
    captions = dict(CAPTIONS)
    for name, found in (axes or {}).items():
        curves = line_table(table, name) if name in table.own else table
        pictures[name] = svg(figure_lr_curves(curves, {kind: fit.transfer for kind, fit in found.items()}))
        captions[name] = "; ".join(f"{fit.transfer.sentence()}" for fit in found.values())
    for name, picture in pictures.items():
        write_atomic(path.with_name(f"{name}.svg"), picture)

    comparison = compare_losses(fits)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "number": number,
        "interval": interval_text,
        "powers": powers,
        "lr_range": lr_range,
        "remarks": remarks,
        "fixed": fixed,
    }
    page = environment.get_template("report.html.j2").render(
        title=title,
        verdicts=[(kind, fit.verdict, fit.sentence()) for kind, fit in fits.items()],
        comparison=comparison.sentence() if comparison else "",
        fits=fits,
        recommendation=recommendation,
        figures=[(captions[name], picture) for name, picture in pictures.items()],
        axes=[(name, kind, fit.transfer) for name, found in (axes or {}).items() for kind, fit in found.items()],
        facts=facts,
        notes=table.notes,
    )
    write_atomic(path, page)
