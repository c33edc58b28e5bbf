"""Sweeps with a known truth: how often the intervals and verdicts of this package are right.

Owns the truths, the simulated tables and the two measurements, coverage and verdict rates. `python -m analysis.simulation`
prints them (about twenty minutes on one core; `--tables 1` for a quick look). The truths are deliberately other curves than
those that the fit weighs: only some are members of its library.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.shapes import Array
from analysis.table import RunTable, load_table

if TYPE_CHECKING:
    import pandas as pd

Truth = Callable[[Array], Array]
"""Rise over the best loss in nats, at u octaves from the optimum."""

BEST_LOSS = 2.0
SEED_SD = 0.01
"""Level of a seed, nats."""


def smooth(k: float, a: float) -> Truth:
    """k (exp(a u) - a u - 1) 2 / a^2."""
    return lambda u: np.asarray(k * 2.0 * (np.exp(a * u) - a * u - 1.0) / a**2)


def piecewise(k: float, ratio: float) -> Truth:
    """Curvature that jumps at the bottom."""
    return lambda u: np.asarray(np.where(u < 0, k * u**2, ratio * k * u**2))


def centred(curve: Truth) -> Truth:
    """`curve` moved so that its minimum is 0 at u = 0."""
    grid = np.linspace(-5.0, 5.0, 200_001)
    values = curve(grid)
    at, bottom = float(grid[values.argmin()]), float(values.min())
    return lambda u: np.asarray(curve(np.asarray(u) + at) - bottom)


def wall(decay: float, height: float, width: float) -> Truth:
    """Loss that decays with the LR until instability builds a wall."""
    return centred(lambda u: np.asarray(0.25 * np.exp(-decay * u) + height * width * np.logaddexp(0.0, u / width)))


def blended() -> Truth:
    one, two = smooth(0.04, 0.4), piecewise(0.025, 4.0)
    return lambda u: np.asarray(0.5 * one(u) + 0.5 * two(u))


TRUTHS: Mapping[str, Truth] = {
    "quadratic": lambda u: np.asarray(0.04 * u**2),
    "smooth .4": smooth(0.04, 0.4),
    "smooth .8": smooth(0.03, 0.8),
    "steep": smooth(0.1, 0.5),
    "flat": smooth(0.015, 0.3),
    "piecewise 2": piecewise(0.03, 2.0),
    "piecewise 4": piecewise(0.025, 4.0),
    "blended": blended(),
    "wall": wall(0.35, 0.25, 0.5),
    "sharp wall": wall(0.4, 0.25, 0.15),
    "saturating": lambda u: np.asarray(smooth(0.05, 0.4)(u) / (1.0 + np.abs(u) / 4.0)),
    "quartic": lambda u: np.asarray(0.035 * (u**2 + 0.12 * u**3 + 0.015 * u**4)),
    "linear walls": centred(
        lambda u: np.asarray(0.1 * np.log(np.cosh(u)) + 0.05 * np.log1p(np.exp(np.clip((u - 1.0) / 0.5, -50, 50))))
    ),
}


@dataclass(frozen=True)
class Design:
    """Which runs are made."""

    points: int = 6
    spacing: float = 1.0
    """Octaves between learning rates."""
    seeds: int = 1
    noise: float = 0.01
    """Standard deviation of a run, nats."""
    widths: tuple[int, ...] = (32, 64, 128)
    scatter: float = 0.0
    """Standard deviation of true optima about their line, octaves; only for verdicts."""

    def __str__(self) -> str:
        return (
            f"{self.points} LRs at {self.spacing:g} octave, {self.seeds} seed(s), noise {self.noise:g}, scatter {self.scatter:g}"
        )


def simulate(truth: Truth, optima: Sequence[float], design: Design, random: np.random.Generator) -> RunTable:
    """One table: LR curve `truth` at each width, optimum at `optima` (octaves above the lowest sampled LR 2^-10)."""
    import pandas as pd

    frames = [_cell(truth, optimum, width, design, random) for width, optimum in zip(design.widths, optima, strict=True)]
    return load_table(pd.concat(frames, ignore_index=True))


def _cell(truth: Truth, optimum: float, width: int, design: Design, random: np.random.Generator) -> pd.DataFrame:
    import pandas as pd

    rates = np.tile(np.arange(design.points) * design.spacing, design.seeds)
    seed = np.repeat(np.arange(design.seeds), design.points)
    level = BEST_LOSS - 0.1 * np.log2(width / 32) + SEED_SD * random.standard_normal(design.seeds)[seed]
    loss = level + truth(rates - optimum) + design.noise * random.standard_normal(len(rates))
    return pd.DataFrame({"parametrization": "mup", "width": width, "log2_lr": rates - 10.0, "loss": loss, "seed": seed})


@dataclass(frozen=True)
class Coverage:
    """How often 90 % intervals of log2 LR* held the truth."""

    covered: dict[str, tuple[int, int]]
    """{truth: (held, cells that were not censored)}."""
    censored: int
    open_ended: int
    widths: tuple[float, ...]
    """Of closed intervals, octaves."""
    errors: tuple[float, ...]

    @property
    def share(self) -> float:
        return sum(held for held, _ in self.covered.values()) / max(1, sum(total for _, total in self.covered.values()))

    def __str__(self) -> str:
        each = ", ".join(f"{name} {100 * held / max(total, 1):.0f}" for name, (held, total) in self.covered.items())
        rms = float(np.sqrt(np.mean(np.square(self.errors))))
        median = float(np.median(self.widths)) if self.widths else float("nan")
        return (
            f"coverage {100 * self.share:.1f} %, median width {median:.2f}, rms error {rms:.2f} octaves, "
            f"{self.censored} censored, {self.open_ended} open ({each})"
        )


def coverage(design: Design, tables: int, names: Sequence[str] = tuple(TRUTHS), seed: int = 0) -> Coverage:
    """Fit `tables` tables of each truth, optima drawn evenly between the second and the last but one LR."""
    from analysis.optimum import cell_optima

    random = np.random.default_rng(seed)
    covered: dict[str, tuple[int, int]] = {}
    censored = open_ended = 0
    widths: list[float] = []
    errors: list[float] = []
    for name in names:
        held = total = 0
        for _ in range(tables):
            optima = random.uniform(1.0, design.points - 2.0, len(design.widths)) * design.spacing
            for optimum, true in zip(cell_optima(simulate(TRUTHS[name], list(optima), design, random)), optima, strict=True):
                if optimum.censored is not None:
                    censored += 1
                    continue
                low, high = optimum.interval
                held, total = held + int(low <= true - 10.0 <= high), total + 1
                errors.append(optimum.log2_lr - (true - 10.0))
                open_ended += int(not np.isfinite(high - low))
                widths += [high - low] if np.isfinite(high - low) else []
        covered[name] = (held, total)
    return Coverage(covered, censored, open_ended, tuple(widths), tuple(errors))


@dataclass(frozen=True)
class VerdictRates:
    """How often each verdict was given, and how often the slope's 90 % interval held the true slope."""

    transfers: float
    drifts: float
    inconclusive: float
    slope_covered: float
    slope_width: float
    """Median width of the slope's interval."""
    regret_covered: float
    """How often the regret's interval held the true loss of the transferred LR."""

    def __str__(self) -> str:
        names = ("transfers", "drifts", "inconclusive", "slope_covered", "regret_covered")
        shares = ", ".join(f"{name.replace('_', ' ')} {100 * getattr(self, name):.1f} %" for name in names)
        return f"{shares}, width of the slope's interval {self.slope_width:.2f}"


def verdict_rates(design: Design, slope: float, tables: int, names: Sequence[str] = tuple(TRUTHS), seed: int = 0) -> VerdictRates:
    """Judge `tables` tables whose optimum moves by `slope` octaves a doubling; the truths take turns."""
    from analysis.transfer import transfer

    random = np.random.default_rng(seed)
    verdicts: list[str] = []
    covered, widths, regrets = [], [], []
    doublings = np.log2(design.widths) - float(np.mean(np.log2(design.widths)))
    for index in range(tables):
        truth = TRUTHS[names[index % len(names)]]
        optima = (design.points - 1) / 2 * design.spacing + random.uniform(-0.5, 0.5) + slope * doublings
        optima = optima + design.scatter * random.standard_normal(len(optima))
        fit = transfer(simulate(truth, list(optima), design, random))["mup"]
        verdicts.append(fit.verdict)
        low, high = fit.slope.interval
        covered.append(low <= slope <= high)
        widths.append(high - low)
        if np.isfinite(fit.regret.value):
            true = float(truth(np.array([fit.regret.log2_lr + 10.0 - optima[-1]]))[0])
            regrets.append(fit.regret.interval[0] <= true <= fit.regret.interval[1])
    transfers, drifts, inconclusive = (verdicts.count(name) / tables for name in ("transfers", "drifts", "inconclusive"))
    regret = float(np.mean(regrets)) if regrets else float("nan")
    return VerdictRates(transfers, drifts, inconclusive, float(np.mean(covered)), float(np.median(widths)), regret)


DESIGNS = (
    *(Design(6, 1.0, 1, noise) for noise in (0.001, 0.005, 0.01, 0.02)),
    *(Design(7, 0.5, 1, noise) for noise in (0.001, 0.005, 0.01, 0.02)),
    *(Design(5, 1.0, 1, noise) for noise in (0.005, 0.01)),
    *(Design(6, 1.0, 3, noise) for noise in (0.001, 0.005, 0.01, 0.02)),
)
SLOPES = (0.0, 0.25, -0.25, -0.5, -1.0)
VERDICT_DESIGNS = (
    *((Design(seeds=seeds, noise=noise), slope) for seeds in (1, 3) for noise in (0.005, 0.01) for slope in SLOPES),
    *((Design(noise=0.005, scatter=0.12), slope) for slope in (0.0, 0.25, -0.5)),
    *((Design(noise=0.005, scatter=0.25), slope) for slope in (0.0, 0.25, -0.5)),
)


def main() -> None:
    """Print both measurements."""
    parser = argparse.ArgumentParser(description="Measure the coverage of intervals and the error rates of verdicts.")
    parser.add_argument("--tables", type=int, default=10, help="tables per truth and design")
    parser.add_argument("--only", choices=("coverage", "verdicts"), help="one of the two measurements")
    options = parser.parse_args()
    if options.only != "verdicts":
        for design in DESIGNS:
            print(f"{design}: {coverage(design, options.tables)}", flush=True)
    if options.only != "coverage":
        for design, slope in VERDICT_DESIGNS:
            rates = verdict_rates(design, slope, options.tables * len(TRUTHS))
            print(f"{design}, slope {slope:g}: {rates}", flush=True)


if __name__ == "__main__":
    main()
