"""Tables of runs with a known law: how often the intervals of a fit hold the truth.

Owns the simulated tables and the coverage that docs/scaling-laws.md prints: `python -m analysis.fit_simulation` (about 25 minutes on
one core; `--tables 20` for a quick look). The truth is Chinchilla's law with the constants of 2404.10102, run on a grid of sizes over
two decades each, or its first two terms (`--law power-constant`, three parameters), run on a line of sizes over three decades.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.fit import fit
from analysis.fit_result import ScalingLawFit
from analysis.fit_table import FitTable
from analysis.laws import Array
from analysis.results import Interval

TRUTH = {"E": 1.8172, "A": 482.0, "B": 2085.4, "alpha": 0.3478, "beta": 0.3658}
GRIDS = {9: (3, 3), 16: (4, 4), 50: (5, 10)}
"""Runs -> levels of parameters and of tokens."""
LARGE = {"params": 1e11, "tokens": 2e12}
"""Where a loss is predicted: ten times the largest run in each."""
BUDGET = 1e24
SMALL_TRUTH = {name: TRUTH[name] for name in ("E", "A", "alpha")}
SMALL_RUNS = (6, 12)


@dataclass(frozen=True)
class Design:
    """runs: a key of GRIDS; tails: normal or t3 (Student's t with 3 degrees of freedom, same scale); noise: log loss.

    law: chinchilla, or power-constant with any number of runs.
    """

    runs: int
    loss: str
    tails: str = "normal"
    noise: float = 0.005
    law: str = "chinchilla"

    def __str__(self) -> str:
        return f"{self.law}, {self.runs} runs, {self.loss}, {self.tails} noise of {100 * self.noise:g} %"

    @property
    def truth(self) -> dict[str, float]:
        """By the names of what is counted: parameters, predicted loss and, for a law that splits a budget, N_opt."""
        if self.law == "power-constant":
            return {**SMALL_TRUTH, "predicted loss": float(small_loss(np.array(LARGE["params"])))}
        predicted = float(true_loss(np.array(LARGE["params"]), np.array(LARGE["tokens"])))
        return {**TRUTH, "predicted loss": predicted, "N_opt": true_optimum(BUDGET)}


def true_loss(params: Array, tokens: Array) -> Array:
    return np.asarray(TRUTH["E"] + TRUTH["A"] * params ** -TRUTH["alpha"] + TRUTH["B"] * tokens ** -TRUTH["beta"])


def small_loss(params: Array) -> Array:
    return np.asarray(TRUTH["E"] + TRUTH["A"] * params ** -TRUTH["alpha"])


def true_optimum(flops: float) -> float:
    alpha, beta = TRUTH["alpha"], TRUTH["beta"]
    return float((alpha * TRUTH["A"] / (beta * TRUTH["B"]) * (flops / 6) ** beta) ** (1 / (alpha + beta)))


def simulate(design: Design, random: np.random.Generator) -> FitTable:
    """One table: parameters from 1e8 to 1e10, tokens from 2e9 to 2e11; for power-constant parameters from 1e7 to 1e10."""
    draw = random.standard_normal if design.tails == "normal" else lambda count: random.standard_t(3, count)
    if design.law == "power-constant":
        params = np.geomspace(1e7, 1e10, design.runs)
        return FitTable({"params": params}, small_loss(params) * np.exp(design.noise * draw(design.runs)))
    levels = GRIDS[design.runs]
    params, tokens = (
        part.ravel() for part in np.meshgrid(np.geomspace(1e8, 1e10, levels[0]), np.geomspace(2e9, 2e11, levels[1]))
    )
    loss = true_loss(params, tokens) * np.exp(design.noise * draw(len(params)))
    return FitTable({"params": params, "tokens": tokens, "flops": 6 * params * tokens}, loss)


def intervals(result: ScalingLawFit) -> list[Interval]:
    """Of the names of `Design.truth`."""
    predicted = result.predict(**{name: LARGE[name] for name in result.law.columns})[0].loss
    split = [result.optimal(BUDGET).params.interval] if result.law.name == "chinchilla" else []
    return [*result.intervals.values(), predicted.interval, *split]


@dataclass(frozen=True)
class Coverage:
    """Percent of intervals that hold the truth, by names; naive: of the percentiles of a bootstrap of pairs, parameters only."""

    names: tuple[str, ...]
    held: tuple[float, ...]
    naive: tuple[float, ...]
    tables: int

    def __str__(self) -> str:
        ours = "  ".join(f"{name} {value:.1f}" for name, value in zip(self.names, self.held, strict=True))
        naive = (
            "  ".join(f"{name} {value:.1f}" for name, value in zip(self.names, self.naive, strict=False)) if self.naive else ""
        )
        return f"{self.tables} tables: {ours}" + (f"\n    percentiles of a bootstrap of pairs: {naive}" if naive else "")


def coverage(design: Design, tables: int, seed: int = 0, naive_draws: int = 0) -> Coverage:
    """Simulate `tables` tables of a design and count; naive_draws: of the compared bootstrap, 0 leaves it out."""
    random = np.random.default_rng([seed, design.runs, design.tails == "normal"])
    truth = list(design.truth.values())
    held, naive = [], []
    for _ in range(tables):
        result = fit(simulate(design, random), design.law, loss=design.loss, starts=12)
        held.append([low <= value <= high for (low, high), value in zip(intervals(result), truth, strict=True)])
        if naive_draws:
            drawn = result.bootstrap("pairs", naive_draws).intervals.values()
            naive.append([low <= value <= high for (low, high), value in zip(drawn, truth[: len(drawn)], strict=True)])
    return Coverage(
        tuple(design.truth), tuple(100 * np.mean(held, axis=0)), tuple(100 * np.mean(naive, axis=0)) if naive else (), tables
    )


DESIGNS: Sequence[Design] = [
    *(Design(runs, loss) for runs in GRIDS for loss in ("least-squares-log", "huber-log")),
    *(Design(runs, "huber-log", "t3") for runs in GRIDS),
]
SMALL_DESIGNS: Sequence[Design] = [
    Design(runs, loss, tails, law="power-constant")
    for runs in SMALL_RUNS
    for loss, tails in (("least-squares-log", "normal"), ("huber-log", "normal"), ("huber-log", "t3"))
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how often the intervals of scaling-law fits hold the truth.")
    parser.add_argument("--tables", type=int, default=400, help="tables a design")
    parser.add_argument("--runs", type=int, choices=[*GRIDS, *SMALL_RUNS], help="only designs of so many runs")
    parser.add_argument("--law", choices=("chinchilla", "power-constant"), default="chinchilla", help="what makes the tables")
    parser.add_argument("--seed", type=int, default=0, help="other tables")
    options = parser.parse_args()
    designs = DESIGNS if options.law == "chinchilla" else SMALL_DESIGNS
    for design in (design for design in designs if options.runs in (None, design.runs)):
        naive_draws = 200 if design.loss == "least-squares-log" else 0
        print(f"{design}, {coverage(design, options.tables, options.seed, naive_draws)}", flush=True)


if __name__ == "__main__":
    main()
