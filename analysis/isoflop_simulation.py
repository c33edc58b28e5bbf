"""IsoFLOP tables of a known Chinchilla surface: how often each method's intervals hold the truth, and how far it is off without noise.

Owns the simulated tables and the figures that docs/isoflop.md prints: `python -m analysis.isoflop_simulation` (`--tables 50` for a quick
look, `--others` for approaches 1 and 3). Six budgets from 1e18 to 1e21 FLOP, sizes evenly spaced in logs, noise as a share of the loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.approaches import law_approach
from analysis.fit import fit
from analysis.fit_simulation import TRUTH
from analysis.fit_table import FitTable
from analysis.isoflop import isoflop
from analysis.isoflop_curve import METHODS, Method
from analysis.isoflop_envelope import envelope
from analysis.laws import Array

BUDGETS = np.geomspace(1e18, 1e21, 6)
LARGE = 1e22
"""FLOP at which N_opt is asked for: ten times the largest budget."""
EQUAL = {"E": 1.8, "A": 450.0, "B": 2100.0, "alpha": 0.35, "beta": 0.35}
UNEQUAL = {"E": 1.8, "A": 30.0, "B": 60000.0, "alpha": 0.2, "beta": 0.55}


@dataclass(frozen=True)
class Design:
    """truth: the surface. sizes: of a budget, over a factor `span`; offsets: factor of the true optimum on which the smallest and the
    largest budget's sizes are centred; noise: standard deviation of the log loss.
    """

    name: str
    truth: Mapping[str, float] = field(default_factory=lambda: TRUTH)
    sizes: int = 8
    span: float = 16.0
    offsets: tuple[float, float] = (1.0, 1.0)
    noise: float = 0.002

    def losses(self, params: Array, tokens: Array) -> Array:
        t = self.truth
        return np.asarray(t["E"] + t["A"] * params ** -t["alpha"] + t["B"] * tokens ** -t["beta"])

    @property
    def exponent(self) -> float:
        return self.truth["beta"] / (self.truth["alpha"] + self.truth["beta"])

    def optimum(self, flops: Array | float) -> Array:
        t = self.truth
        ratio = t["alpha"] * t["A"] / (t["beta"] * t["B"])
        return np.asarray((ratio * (np.asarray(flops) / 6) ** t["beta"]) ** (1 / (t["alpha"] + t["beta"])))

    def table(self, random: np.random.Generator | None) -> FitTable:
        """One table; without noise where `random` is None."""
        centres = self.optimum(BUDGETS) * np.geomspace(*self.offsets, len(BUDGETS))
        steps = np.geomspace(self.span**-0.5, self.span**0.5, self.sizes)
        params = (centres[:, None] * steps).ravel()
        flops = np.repeat(BUDGETS, self.sizes)
        tokens = flops / (6 * params)
        loss = self.losses(params, tokens)
        if random is not None:
            loss = loss * np.exp(self.noise * random.standard_normal(len(loss)))
        return FitTable({"params": params, "tokens": tokens, "flops": flops}, loss)

    def curves(self, random: np.random.Generator) -> FitTable:
        """Twelve training curves of 40 checkpoints, from 1 to 200 tokens a parameter; a run's noise is its own, not a checkpoint's."""
        sizes, steps = np.geomspace(1e8, 2e10, 12), np.geomspace(1, 200, 40)
        params = np.repeat(sizes, len(steps))
        tokens = params * np.tile(steps, len(sizes))
        loss = self.losses(params, tokens) * np.exp(np.repeat(self.noise * random.standard_normal(len(sizes)), len(steps)))
        names = np.repeat([f"run {index}" for index in range(len(sizes))], len(steps))
        return FitTable({"params": params, "tokens": tokens, "flops": 6 * params * tokens}, loss, groups=names)


DESIGNS: Sequence[Design] = (
    Design("alpha = beta, centred", EQUAL),
    Design("2404.10102, centred"),
    Design("2404.10102, sizes over x100", span=100.0),
    Design("2404.10102, off centre x0.5 to x2", offsets=(0.5, 2.0)),
    Design("2404.10102, off centre x2", offsets=(2.0, 2.0)),
    Design("alpha 0.2, beta 0.55, centred", UNEQUAL),
    Design("2404.10102, noise of 0.5 %", noise=0.005),
    Design("2404.10102, 5 sizes", sizes=5),
)


@dataclass(frozen=True)
class Coverage:
    """Of one design and method. held, optima, held_large: percent of 90 % intervals of a, of the budgets' N_opt and of N_opt at LARGE that
    hold the truth (without a law is not held); bias, plain: mean a, and a without noise, minus the truth; width: median width of the
    interval of a; used: mean of usable budgets.
    """

    held: float
    optima: float
    held_large: float
    bias: float
    plain: float
    width: float
    used: float
    tables: int

    def __str__(self) -> str:
        cells = [
            f"{self.held:.1f}",
            f"{self.optima:.1f}",
            f"{self.held_large:.1f}",
            f"{self.bias:+.4f}",
            f"{self.plain:+.4f}",
            f"{self.width:.3f}",
        ]
        return " | ".join([*cells, f"{self.used:.1f}"])


def coverage(design: Design, method: Method, tables: int, seed: int = 0) -> Coverage:
    """Analyse `tables` tables of a design and count."""
    random = np.random.default_rng(seed)
    plain = isoflop(design.table(None), method, surface=False).params_law
    truth = float(design.optimum(LARGE))
    held, held_large, found, widths, used, optima = [], [], [], [], [], []
    for _ in range(tables):
        result = isoflop(design.table(random), method, surface=False)
        used.append(len(result.usable))
        optima += [
            low <= design.optimum(budget.flops) <= high for budget in result.usable for low, high in [budget.params.interval]
        ]
        if result.params_law is None:
            held.append(False)
            held_large.append(False)
            continue
        (low, high), ends = result.params_law.exponent.interval, result.params_law.at(LARGE).interval
        held.append(low <= design.exponent <= high)
        held_large.append(ends[0] <= truth <= ends[1])
        found.append(result.params_law.exponent.value)
        widths.append(high - low)
    missed = np.nan if plain is None else plain.exponent.value - design.exponent
    a, each, large = (100 * float(np.mean(counted)) for counted in (held, optima, held_large))
    bias = float(np.mean(found)) - design.exponent
    return Coverage(a, each, large, bias, missed, float(np.median(widths)), float(np.mean(used)), tables)


def others_coverage(design: Design, tables: int, seed: int = 0) -> dict[str, tuple[float, float, float]]:
    """{approach: (percent of intervals of a held, of N_opt at LARGE held, mean a minus the truth)}, of approaches 1 and 3."""
    random, truth = np.random.default_rng([seed, 1]), float(design.optimum(LARGE))
    found: dict[str, list[tuple[bool, bool, float]]] = {
        "1, lowest run of a budget": [],
        "1, training curves": [],
        "3, huber-log": [],
    }
    for _ in range(tables):
        table = design.table(random)
        laws = (envelope(table, 0.05, 0.9, curves=False), envelope(design.curves(random), 0.05, 0.9, curves=True))
        third = law_approach(fit(table, starts=12), LARGE)
        numbers = [(item.params_law.exponent, item.params_law.at(LARGE)) for item in laws] + [(third.exponent, third.params)]
        for counted, (exponent, large) in zip(found.values(), numbers, strict=True):
            held = exponent.interval[0] <= design.exponent <= exponent.interval[1]
            counted.append((held, large.interval[0] <= truth <= large.interval[1], exponent.value - design.exponent))
    means = {name: np.mean(np.array(counted, dtype=float), axis=0) for name, counted in found.items()}
    return {name: (100 * float(a), 100 * float(b), float(c)) for name, (a, b, c) in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how often the intervals of IsoFLOP laws hold the truth.")
    parser.add_argument("--tables", type=int, default=500, help="tables a design")
    parser.add_argument("--seed", type=int, default=0, help="other tables")
    parser.add_argument("--others", action="store_true", help="approaches 1 and 3 instead, on the centred designs")
    options = parser.parse_args()
    if options.others:
        print("| surface | approach | a held | N_opt at 1e22 held | bias of a |\n|---|---|---|---|---|")
        for design in (DESIGNS[1], DESIGNS[5], DESIGNS[6]):
            for name, (a, large, bias) in others_coverage(design, options.tables, options.seed).items():
                print(f"| {design.name} | {name} | {a:.1f} | {large:.1f} | {bias:+.4f} |", flush=True)
        return
    columns = ["surface", "method", "a held", "a budget's N_opt held", "N_opt at 1e22 held", "bias of a", "without noise"]
    print(f"| {' | '.join([*columns, 'width', 'budgets used'])} |\n{'|---' * 9}|")
    for design in DESIGNS:
        for method in METHODS:
            print(f"| {design.name} | {method} | {coverage(design, method, options.tables, options.seed)} |", flush=True)


if __name__ == "__main__":
    main()
