"""Hoffmann et al.'s three approaches to the compute-optimal size, side by side on one table, and whether they agree.

Owns `compare_approaches`; the first approach is analysis.isoflop_envelope, the second analysis.isoflop, the third analysis.fit. Each gives
the exponent of N_opt against FLOP, and parameters, tokens and their ratio at one budget, with intervals. Agreement is said in numbers.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.fit import fit
from analysis.fit_result import FLOP_PER_PARAM_TOKEN, Estimate, ScalingLawFit, estimates
from analysis.fit_search import DELTA
from analysis.fit_table import FLOP_TOLERANCE, FitTable, load_fit_table
from analysis.fit_uncertainty import profile
from analysis.isoflop import TOLERANCE, isoflop
from analysis.isoflop_curve import Method
from analysis.isoflop_envelope import Envelope, envelope
from analysis.isoflop_result import IsoFlopFit, between
from analysis.laws import Array
from analysis.results import html_table, text_table
from scaling.errors import DataError, Fault

if TYPE_CHECKING:
    import pandas as pd

FACTOR = 1.25
"""Tokens at the budget that differ by more are a disagreement, whatever the intervals say."""
UNKNOWN_ESTIMATE = Estimate(np.nan, np.nan, (np.nan, np.nan))
STEP = 0.05
"""Of log FLOP, either way, for the exponent of a law's optimum."""


@dataclass(frozen=True)
class Approach:
    """One approach at one budget; `reason` says why where it could not be taken (its numbers are NaN then)."""

    number: int
    name: str
    exponent: Estimate
    params: Estimate
    tokens: Estimate
    ratio: Estimate
    detail: str = ""
    flags: tuple[str, ...] = ()
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name).to_dict() for name in ("exponent", "params", "tokens")}
        return {
            "approach": self.number,
            "name": self.name,
            **numbers,
            "tokens_per_param": self.ratio.to_dict(),
            "detail": self.detail,
            "flags": list(self.flags),
            "reason": self.reason,
        }

    def cells(self) -> list[str]:
        def cell(estimate: Estimate, text: str) -> str:
            return f"{text} {between(estimate.interval)}"

        if self.reason:
            return [f"{self.number} {self.name}", "-", "-", "-", "-"]
        exponent = cell(self.exponent, f"{self.exponent.value:.4f}")
        sizes = [cell(estimate, f"{estimate.value:.4g}") for estimate in (self.params, self.tokens, self.ratio)]
        return [f"{self.number} {self.name}", exponent, *sizes]


@dataclass(frozen=True)
class Agreement:
    """Two approaches. overlap: of the exponents' intervals, None where one is unknown; factor: larger tokens at the budget over smaller."""

    first: Approach
    second: Approach
    overlap: bool | None
    factor: float
    limit: float

    @property
    def agrees(self) -> bool:
        return bool(self.overlap) and self.factor <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {
            "approaches": [self.first.number, self.second.number],
            "exponents_overlap": self.overlap,
            "tokens_factor": self.factor,
            "limit": self.limit,
            "agrees": self.agrees,
        }

    def __str__(self) -> str:
        one, two = self.first, self.second
        word = {True: "overlap", False: "do not overlap", None: "cannot be compared: an interval is unknown"}[self.overlap]
        exponents = f"exponents {one.exponent.value:.4f} {between(one.exponent.interval)} and {two.exponent.value:.4f}"
        within = "within" if self.factor <= self.limit else "beyond"
        return (
            f"approaches {one.number} and {two.number} {'agree' if self.agrees else 'disagree'}: {exponents} "
            f"{between(two.exponent.interval)} {word}; tokens {one.tokens.value:.4g} and {two.tokens.value:.4g} differ by "
            f"x{self.factor:.3g}, {within} x{self.limit:g}"
        )


@dataclass(frozen=True, eq=False)
class Approaches:
    """The three approaches at `flops`, and what they were made of; trusted: at least two, none with a flag, no pair apart."""

    flops: float
    level: float
    approaches: tuple[Approach, ...]
    agreements: tuple[Agreement, ...]
    envelope: Envelope | None
    isoflop: IsoFlopFit | None
    parametric: ScalingLawFit | None
    warnings: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """What casts doubt on each approach, and each pair that disagrees."""
        own = [f"approach {item.number}: {flag}" for item in self.approaches for flag in item.flags]
        apart = [str(pair) for pair in self.agreements if not pair.agrees]
        few = ["fewer than two approaches could be taken: nothing is compared"] if not self.agreements else []
        return (*own, *apart, *few)

    @property
    def trusted(self) -> bool:
        return not self.flags

    def to_dict(self) -> dict[str, Any]:
        """The document of `mutransfer fit --isoflop --json`, its part `approaches`."""
        return {
            "flops": self.flops,
            "level": self.level,
            "approaches": [item.to_dict() for item in self.approaches],
            "agreements": [pair.to_dict() for pair in self.agreements],
            "trusted": self.trusted,
            "flags": list(self.flags),
            "warnings": list(self.warnings),
        }

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        head = ["approach", "exponent of N_opt", "parameters", "tokens", "tokens a parameter"]
        return head, [item.cells() for item in self.approaches]

    def _lines(self) -> list[str]:
        details = [f"{item.number} {item.name}: {item.reason or item.detail}" for item in self.approaches]
        said = [str(pair) for pair in self.agreements if pair.agrees]
        marked = [*(f"  ! {flag}" for flag in self.flags), *(f"  ? {warning}" for warning in self.warnings)]
        return [*details, *said, *marked]

    def _head(self) -> str:
        return f"compute-optimal at {self.flops:.4g} FLOP, {100 * self.level:g} % intervals"

    def __str__(self) -> str:
        return "\n".join([self._head(), text_table(*self._rows()), *self._lines()])

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        return f"<div><p>{html.escape(self._head())}</p>{html_table(*self._rows())}{lines}</div>"


def compare_approaches(
    table: Path | str | pd.DataFrame | FitTable,
    flops: float | None = None,
    method: Method = "spline",
    *,
    law: str = "chinchilla",
    loss: str = "huber-log",
    delta: float = DELTA,
    columns: Mapping[str, str] | None = None,
    tolerance: float = TOLERANCE,
    factor: float = FACTOR,
    level: float = 0.9,
    window: float | None = None,
    points: int | None = None,
    **reading: Any,
) -> Approaches:
    """Approaches 1, 2 and 3 on one table, at one budget (FLOP as the table counts them; default: its largest run's).

    The first takes training curves where the table has them (columns run_id and several checkpoints a run), else final runs. method,
    window, points, tolerance: of `isoflop`; law, loss, delta: of `fit`; factor: by which tokens may differ. An approach that the table
    does not allow says why. Raises DataError with what is wrong with the table or the options.
    """
    if not factor > 1:
        raise DataError(Fault(f"factor {factor:g}", "is no factor above 1", f"for example {FACTOR:g}"))
    rows = load_fit_table(table, columns, **reading)
    rows.require(["params", "tokens", "flops"])
    budget = float(rows.columns["flops"].max()) if flops is None else float(flops)
    if not (budget > 0 and np.isfinite(budget)):
        raise DataError(Fault(f"budget {budget:g} FLOP", "is not positive and finite", "give FLOP, such as 1e21"))
    curves = _curves(table, columns, reading)
    if curves is not None and len(curves) == len(rows):
        text = "rows of one run_id are taken for finished runs: without a column step the last checkpoint is not known"
        rows = replace(rows, warnings=(*rows.warnings, text))
    first, curve = _first(curves, rows, budget, tolerance, level)
    second, minima = _second(rows, budget, level, {"method": method, "window": window, "points": points, "tolerance": tolerance})
    parametric = fit(rows, law, loss, delta, level=level)
    third = law_approach(parametric, budget)
    taken = [item for item in (first, second, third) if not item.reason]
    pairs = tuple(_agreement(one, two, factor) for one, two in combinations(taken, 2))
    warnings = minima.warnings if minima is not None else ()
    return Approaches(budget, level, (first, second, third), pairs, curve, minima, parametric, warnings)


def _curves(table: Any, columns: Mapping[str, str] | None, reading: Mapping[str, Any]) -> FitTable | None:
    """Every checkpoint, where runs have several."""
    if isinstance(table, FitTable):
        return None
    try:
        rows = load_fit_table(table, columns, **{**reading, "curves": True})
    except DataError:  # The table itself has been read before: all that can be missing is the name of the run.
        return None
    assert rows.groups is not None, "curves are groups"
    return rows if len(np.unique(rows.groups)) < len(rows) else None


def _without(number: int, name: str, reason: str) -> Approach:
    nothing = UNKNOWN_ESTIMATE
    return Approach(number, name, nothing, nothing, nothing, nothing, reason=reason)


def _first(
    curves: FitTable | None, rows: FitTable, flops: float, tolerance: float, level: float
) -> tuple[Approach, Envelope | None]:
    name = "envelope"
    try:
        found = envelope(curves if curves is not None else rows, tolerance, level, curves=curves is not None)
    except DataError as error:
        return _without(1, name, "; ".join(fault.what for fault in error.faults)), None
    params, tokens, ratio = (law.at(flops) for law in (found.params_law, found.tokens_law, found.ratio_law))
    return Approach(1, name, found.params_law.exponent, params, tokens, ratio, found.detail, found.flags), found


def _second(rows: FitTable, flops: float, level: float, options: Mapping[str, Any]) -> tuple[Approach, IsoFlopFit | None]:
    name = f"IsoFLOP, {options['method']}"
    try:
        found = isoflop(rows, level=level, **options)
    except DataError as error:
        if any(fault.where != "IsoFLOP" for fault in error.faults):
            raise
        return _without(2, name, "; ".join(fault.what for fault in error.faults)), None
    if found.params_law is None:
        return _without(2, name, "; ".join(found.flags)), found
    params, tokens, ratio, flags = found.at(flops)
    detail = f"{len(found.usable)} of {len(found.budgets)} budgets have a minimum between their sizes"
    detail += f"; {found.bias}" if found.bias else ""
    return Approach(2, name, found.params_law.exponent, params, tokens, ratio, detail, (*found.flags, *flags)), found


def law_approach(found: ScalingLawFit, flops: float) -> Approach:
    """The law's own split; its budget is turned into 6 N D by what the rows' FLOP are of it."""
    name, columns = f"law {found.law.name}", found.table.columns
    counted = columns["flops"] / (FLOP_PER_PARAM_TOKEN * columns["params"] * columns["tokens"])
    unit = float(np.median(counted))
    plain, flags = flops / unit, []
    if max(counted.max() / unit, unit / counted.min()) > 1 + FLOP_TOLERANCE:
        flags.append(
            f"FLOP are {counted.min():.3g} to {counted.max():.3g} times 6 N D, and a law splits 6 N D: x{unit:.3g} is taken"
        )
    try:
        split = found.optimal(plain)
    except DataError as error:
        return _without(3, name, "; ".join(fault.what for fault in error.faults))
    product, law, centres = float(np.log(plain / FLOP_PER_PARAM_TOKEN)), found.law, found.fitted.x.centres

    def exponent(theta: Array) -> Array:
        up, down = (law.optimum(theta, centres, product + step) for step in (STEP, -STEP))
        assert up is not None, "the split was found"
        assert down is not None, "the split was found"
        return np.asarray((up - down) / (2 * STEP))[:, None]

    slope = estimates(profile(found.fitted, exponent, found.level), [False])[0]
    n, d = split.params, split.tokens
    value, whole = d.value / n.value, d.value * n.value
    ratio = Estimate(value, 2 * value * n.stderr / n.value, (whole / n.interval[1] ** 2, whole / max(n.interval[0], 1e-300) ** 2))
    detail = f"{found.loss.kind} of {len(found.table)} runs" + (
        "" if abs(unit - 1) < 1e-3 else f"; FLOP are x{unit:.3g} of 6 N D"
    )
    return Approach(3, name, slope, n, d, ratio, detail, (*found.flags, *split.flags, *flags))


def _agreement(one: Approach, two: Approach, limit: float) -> Agreement:
    ends = np.array([one.exponent.interval, two.exponent.interval])
    overlap = None if np.isnan(ends).any() else bool(ends[:, 0].max() <= ends[:, 1].min())
    larger, smaller = sorted((one.tokens.value, two.tokens.value), reverse=True)
    return Agreement(one, two, overlap, larger / smaller, limit)
