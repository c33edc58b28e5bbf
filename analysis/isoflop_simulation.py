"""IsoFLOP tables of a known Chinchilla surface: how often each method's intervals hold the truth, and how far it is off without noise.

Owns the simulated tables and the figures that docs/isoflop.md prints: `python -m analysis.isoflop_simulation` (`--tables 50` for a quick
look). Six budgets from 1e18 to 1e21 FLOP, sizes evenly spaced in logs, noise as a share of the loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.fit_simulation import TRUTH
from analysis.fit_table import FitTable
from analysis.isoflop import isoflop
from analysis.isoflop_curve import METHODS, Method
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
    """Of one design and method. held, held_large: percent of 90 % intervals of a and of N_opt at LARGE that hold the truth; without a law
    is not held; biases: mean a, and a without noise, minus the truth; width: median width of the interval of a; used: mean usable budgets.
    """

    held: float
    held_large: float
    bias: float
    plain: float
    width: float
    used: float
    tables: int

    def __str__(self) -> str:
        cells = [f"{self.held:.1f}", f"{self.held_large:.1f}", f"{self.bias:+.4f}", f"{self.plain:+.4f}", f"{self.width:.3f}"]
        return " | ".join([*cells, f"{self.used:.1f}"])


def coverage(design: Design, method: Method, tables: int, seed: int = 0) -> Coverage:
    """Analyse `tables` tables of a design and count."""
    random = np.random.default_rng(seed)
    plain = isoflop(design.table(None), method, surface=False).params_law
    truth = float(design.optimum(LARGE))
    held, held_large, found, widths, used = [], [], [], [], []
    for _ in range(tables):
        result = isoflop(design.table(random), method, surface=False)
        used.append(len(result.usable))
        if result.params_law is None:
            held.append(False)
            held_large.append(False)
            continue
        (low, high), large = result.params_law.exponent.interval, result.params_law.at(LARGE).interval
        held.append(low <= design.exponent <= high)
        held_large.append(large[0] <= truth <= large[1])
        found.append(result.params_law.exponent.value)
        widths.append(high - low)
    missed = np.nan if plain is None else plain.exponent.value - design.exponent
    shares = 100 * float(np.mean(held)), 100 * float(np.mean(held_large))
    return Coverage(*shares, float(np.mean(found)) - design.exponent, missed, float(np.median(widths)), float(np.mean(used)), tables)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how often the intervals of IsoFLOP laws hold the truth.")
    parser.add_argument("--tables", type=int, default=300, help="tables a design")
    parser.add_argument("--seed", type=int, default=0, help="other tables")
    options = parser.parse_args()
    print(f"| surface, {len(BUDGETS)} budgets | method | a held | N_opt held | bias of a | without noise | width | budgets used |")
    print("|---|---|---|---|---|---|---|---|")
    for design in DESIGNS:
        for method in METHODS:
            print(f"| {design.name} | {method} | {coverage(design, method, options.tables, options.seed)} |", flush=True)


if __name__ == "__main__":
    main()
