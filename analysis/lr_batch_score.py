"""What a law of the best learning rate and batch costs: the loss at its values over the best run of the grid, read off the runs
around them.

Owns `excess_losses`. A law is judged by the loss it gives away, not by its exponents, since the bottom is flat. The loss
between runs is a local quadratic regression over the nearest runs (tricube weights, natural logs of the knobs); outside of the
runs' hull nothing is read off: NaN. Also owns the published laws that a table can be scored with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.spatial import Delaunay, QhullError

from analysis.batch_table import GridCell
from analysis.law import Array

NEAREST, LEAST = {1: 7, 2: 25}, {1: 4, 2: 10}
"""Runs of a local regression, by the number of knobs, and how many there must be: the farthest has no weight."""
Knobs = Mapping[str, float]


@dataclass(frozen=True)
class PublishedLaw:
    """A law of others. needs: sizes that it reads; knobs: {lr or batch_tokens: its value at sizes}."""

    name: str
    formula: str
    source: str
    needs: tuple[str, ...]
    knobs: Mapping[str, Callable[[Knobs], float]]


PUBLISHED = (
    PublishedLaw(
        "Step Law",
        "lr 1.79 N^-0.713 D^0.307, batch 0.58 D^0.571 tokens",
        "2503.04715",
        ("params", "tokens"),
        {
            "lr": lambda s: 1.79 * s["params"] ** -0.713 * s["tokens"] ** 0.307,
            "batch_tokens": lambda s: 0.58 * s["tokens"] ** 0.571,
        },
    ),
    PublishedLaw(
        "DeepSeek",
        "lr 0.3118 C^-0.1250, batch 0.2920 C^0.3271 tokens",
        "2401.02954",
        ("flops",),
        {"lr": lambda s: 0.3118 * s["flops"] ** -0.1250, "batch_tokens": lambda s: 0.2920 * s["flops"] ** 0.3271},
    ),
)


def local_loss(cell: GridCell, place: Array) -> float:
    """Loss of a cell at log knobs (k,), nats; NaN outside of its runs' hull or with too few runs."""
    k = len(cell.knobs)
    if len(cell.loss) < LEAST[k] or not inside_hull(cell.logs, place):
        return float("nan")
    away = cell.logs - place
    distance = np.sqrt(np.sum(away**2, axis=1))
    near = np.argsort(distance, kind="stable")[: NEAREST[k]]
    away, scaled = away[near], distance[near] / (distance[near].max() * (1 + 1e-4))
    weight = np.sqrt((1 - scaled**3) ** 3)
    terms = [np.ones(len(near)), *away.T, *(away[:, i] * away[:, j] for i in range(k) for j in range(i + 1))]
    design = np.stack(terms, axis=1) * weight[:, None]
    coefficients, _, rank, _ = np.linalg.lstsq(design, cell.loss[near] * weight, rcond=None)
    return float(coefficients[0]) if rank == design.shape[1] else float("nan")


def inside_hull(logs: Array, place: Array) -> bool:
    if logs.shape[1] == 1:
        return bool(logs.min() <= place[0] <= logs.max())
    try:
        return bool(Delaunay(logs).find_simplex(place[None])[0] >= 0)
    except QhullError:
        return False


def excess_losses(cells: Sequence[GridCell], places: Array) -> Array:
    """Loss at log knobs (c, k) over the best run of each cell, as a share of it (c,); NaN where the runs do not say."""
    return np.array([local_loss(cell, place) / cell.loss.min() - 1 for cell, place in zip(cells, places, strict=True)])


@dataclass(frozen=True)
class Score:
    """Excess losses of one law over the cells, as shares of the loss.

    outside: cells whose runs do not reach the law's values. below: cells where the local regression lies under the best run, which
    is its own error or a place between the runs; they count as 0, so that they pay for no other cell.
    """

    name: str
    formula: str
    mean: float
    largest: float
    cells: int
    outside: int
    below: int

    @classmethod
    def of(cls, name: str, formula: str, excess: Array) -> Score:
        known = excess[np.isfinite(excess)]
        given = np.maximum(known, 0.0)
        mean, largest = (float(given.mean()), float(given.max())) if len(known) else (float("nan"), float("nan"))
        return cls(name, formula, mean, largest, len(known), len(excess) - len(known), int((known < 0).sum()))

    def to_dict(self) -> dict[str, object]:
        return {
            "law": self.name,
            "formula": self.formula,
            "mean": self.mean,
            "largest": self.largest,
            "cells": self.cells,
            "outside": self.outside,
            "below": self.below,
        }


def published_scores(cells: Sequence[GridCell]) -> list[Score]:
    """Of every published law that has all of the table's knobs and reads sizes that the table has."""
    found = []
    for law in PUBLISHED:
        if set(law.needs) <= set(cells[0].sizes) and set(cells[0].knobs) <= set(law.knobs):
            places = np.array([[np.log(law.knobs[knob](cell.sizes)) for knob in cell.knobs] for cell in cells])
            found.append(Score.of(f"{law.name} ({law.source})", law.formula, excess_losses(cells, places)))
    return found
