"""Critical batch size from steps to a target loss: S = S_min (1 + B_n / B) at each size, and the law of sizes of what is
derived from it.

Owns `fit_critical_batch`. B_n is the batch at which a run needs twice the fewest steps and twice the fewest tokens (McCandlish
et al. 2018). A "critical batch" is a point of this curve that a `Definition` names; exponents of different definitions differ
on the same runs, so no number goes without one. Batches are in the table's unit (sequences or tokens), steps are optimizer
steps, losses are fitted in logs. A size whose batches do not reach its critical batch is censored ("at least the largest"),
shown, and left out of the law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from analysis.batch_table import StepsTable, load_steps_table
from analysis.fit_engine import Loss, minimise
from analysis.fit_guards import CORRELATION, DECADE, FAR
from analysis.fit_result import Estimate, estimates
from analysis.fit_search import DELTA, Starts, checked_loss
from analysis.fit_uncertainty import LEVEL, Fitted, profile
from analysis.law import Array, Inputs, Law
from analysis.law_fit import LawFit, Table, checked_options, checked_sizes
from analysis.log_line import PowerLaw, power_law
from scaling.errors import DataError, Fault

if TYPE_CHECKING:
    import pandas as pd

OPTIONS = ("definition", "overhead")
OVERHEAD = 0.2
NOISE_SCALE, SMALLEST = "noise-scale", "smallest"
LEAST_BATCHES = 3
"""Two batches fix S_min and B_n and leave nothing to judge them by."""
RANGE = 1e4
"""B_n is looked for within this factor of the measured batches: beyond it the curve is a straight line."""
FORMULA = "S = S_min (1 + B_n/B)"
SOURCE = "McCandlish et al. 2018; definition by overhead: Zhang et al. 2024"


@dataclass(frozen=True)
class Definition:
    """What is called critical. reference: the batch that linear scaling is reckoned from; None: B_n itself.

    A run at B needs S B sequences or tokens; at the critical batch it needs (1 + overhead) times as many as at the reference.
    """

    overhead: float = OVERHEAD
    reference: float | None = None

    def __call__(self, noise_scale: Any) -> Any:
        """The critical batch of a size with this B_n."""
        if self.reference is None:
            return noise_scale
        return (1 + self.overhead) * self.reference + self.overhead * noise_scale

    def words(self, unit: str) -> str:
        if self.reference is None:
            return "noise scale B_n"
        return f"{100 * self.overhead:g} % over linear scaling from B = {self.reference:g} {unit}"

    @property
    def head(self) -> str:
        """Of a column."""
        return "B_n" if self.reference is None else f"B* (+{100 * self.overhead:g} % from {self.reference:g})"


@dataclass(frozen=True)
class StepsLaw(Law):
    """S = exp(theta_0) (1 + exp(theta_1) / B)."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("S_min", "B_n")

    @property
    def positive(self) -> frozenset[str]:
        return frozenset(self.parameters)

    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        ratio = np.exp(np.clip(theta[:, 1:] - x.whole("batch"), -200, 200))
        least = np.exp(theta[:, :1])
        return least * (1 + ratio), np.stack([least * (1 + ratio), least * ratio], axis=-1)

    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:  # noqa: ARG002
        return np.asarray(np.exp(theta))

    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:
        batch, wide = x.whole("batch"), np.log(RANGE)
        low = [np.log(lowest) - 2 * wide, batch.min() - wide]
        return np.array(low), np.array([np.log(lowest) + 1.0, batch.max() + wide])

    def shapes(self, x: Inputs) -> Array:
        batch = x.whole("batch")
        return np.linspace(batch.min() - 2.0, batch.max() + 3.0, 8)[:, None]

    def design(self, shape: Array, x: Inputs) -> Array:
        return np.asarray(1 + np.exp(shape[0] - x.whole("batch")))[:, None]

    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        return np.array([np.log(max(float(weights[0]), 1e-3 * lowest)), shape[0]])


LAW = StepsLaw("critical-batch", FORMULA, SOURCE, ("batch",))


@dataclass(frozen=True, eq=False)
class SizeCurve:
    """One size. batches, steps: measured; critical: {definition in words: estimate}; beyond: definitions whose batch was not
    reached.
    """

    sizes: Mapping[str, float]
    batches: Array
    steps: Array
    least_steps: Estimate
    noise_scale: Estimate
    critical: Mapping[str, Estimate]
    beyond: tuple[str, ...]
    scatter: float
    """Of one run about the curve, in logs."""
    starts: Starts
    converged: bool
    fitted: Fitted = field(repr=False)

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.sizes.items())

    def curve(self, batches: Array) -> Array:
        """Fitted steps to the target at batches."""
        return np.asarray(self.least_steps.value * (1 + self.noise_scale.value / batches))

    def to_dict(self) -> dict[str, Any]:
        critical = {
            name: {**item.to_dict(), "censored": "high" if name in self.beyond else None} for name, item in self.critical.items()
        }
        head = {"S_min": self.least_steps.to_dict(), "B_n": self.noise_scale.to_dict(), "critical": critical}
        return {**self.sizes, **head, "scatter": self.scatter, "runs": len(self.steps)}


@dataclass(frozen=True, eq=False)
class CriticalBatchFit(LawFit):
    """Curves of every size, and laws: {definition: {regressors: law}}; `definition` is the one that params and predict speak
    of.
    """

    definition: str
    definitions: Mapping[str, Definition]
    unit: str
    curves: tuple[SizeCurve, ...]
    laws: Mapping[str, Mapping[tuple[str, ...], PowerLaw]]
    regressors: tuple[str, ...]

    def predict(self, **sizes: float) -> CriticalBatch:
        """The critical batch at a size by the fit's definition; give what one of its laws reads. Raises DataError for other
        sizes.
        """
        there = self.laws[self.definition]
        chosen = tuple(sizes) if tuple(sizes) in there else self.regressors
        checked_sizes(self.law, sizes, chosen)
        if chosen not in there:
            raise DataError(Fault("prediction", "no law of sizes was fitted", "; ".join(self.flags) or "give more sizes"))
        law = there[chosen]
        flags = [
            flag for name in chosen if (flag := _far(name, float(sizes[name]), [curve.sizes[name] for curve in self.curves]))
        ]
        return CriticalBatch(dict(sizes), law.predict(**sizes)[0], self.definition, self.unit, tuple(flags))

    def tables(self) -> list[Table]:
        head = [
            "size",
            "runs",
            "S_min",
            "B_n",
            f"{100 * self.level:g} % interval",
            *(item.head for item in self.definitions.values()),
        ]
        rows = []
        for curve in self.curves:
            cells = [curve.noise_scale.cells()[index] for index in (0, 2)]
            shown = [(">= " if name in curve.beyond else "") + f"{curve.critical[name].value:.4g}" for name in self.laws]
            rows.append([curve.name, str(len(curve.steps)), f"{curve.least_steps.value:.4g}", *cells, *shown])
        return [(head, rows)]

    def sentences(self) -> list[str]:
        lines = [f"batches in {self.unit}; critical batch below: {self.definition}"]
        for name, laws in self.laws.items():
            for law in laws.values():
                ends = ", ".join(f"{key}: {item.cells()[2]}" for key, item in law.exponents.items())
                lines.append(f"{name}: B* = {law.formula(self.unit)}, exponent of {ends}, from {law.points} sizes")
        return lines

    def details(self) -> dict[str, Any]:
        laws = {
            name: {" ".join(columns): {**law.to_dict(), "definition": name, "unit": self.unit} for columns, law in found.items()}
            for name, found in self.laws.items()
        }
        return {
            "definition": self.definition,
            "unit": self.unit,
            "sizes": [curve.to_dict() for curve in self.curves],
            "laws": laws,
        }


@dataclass(frozen=True)
class CriticalBatch:
    """A predicted critical batch; the interval is the law's."""

    at: Mapping[str, float]
    batch: Estimate
    definition: str
    unit: str
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        named = {"definition": self.definition, "unit": self.unit}
        return {**self.at, "batch": self.batch.to_dict(), **named, "trusted": not self.flags, "flags": list(self.flags)}

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value:.6g}" for name, value in self.at.items())
        line = f"critical batch at {place}: {self.batch.value:.4g} {self.unit} {self.batch.cells()[2]} ({self.definition})"
        return "\n".join([line, *(f"  ! {flag}" for flag in self.flags)])


def fit_critical_batch(
    source: Path | str | pd.DataFrame | StepsTable,
    loss: str = "huber-log",
    delta: float = DELTA,
    *,
    columns: Mapping[str, str] | None = None,
    where: Sequence[str] = (),
    level: float = LEVEL,
    **options: Any,
) -> CriticalBatchFit:
    """Fit S = S_min (1 + B_n/B) at every size, and power laws of the critical batch.

    options: definition, "smallest" (the default: overhead over linear scaling from the table's smallest batch), "noise-scale",
    or a reference batch in the table's unit; overhead, 0.2 by default. All definitions are reported. loss, delta: as in
    analysis.fit, for both stages, in logs. Raises DataError.
    """
    checked_options("critical-batch", options, OPTIONS)
    chosen_loss = checked_loss(loss, delta)
    if not chosen_loss.in_logs:
        raise DataError(
            Fault(f"loss {loss!r}", "is not in logs: steps of all batches count alike only there", "for example huber-log")
        )
    table = source if isinstance(source, StepsTable) else load_steps_table(source, columns, where)
    definitions, chosen = _definitions(table, options)
    curves = [_curve(table, sizes, rows, chosen_loss, level, definitions) for sizes, rows in table.sizes()]
    flags = [flag for curve in curves for flag in _curve_flags(curve, level)]
    laws = {name: _laws(curves, name, chosen_loss, level, flags if name == chosen else []) for name in definitions}
    regressors = next(iter(laws[chosen]), ())
    if regressors and (flag := _span(curves, regressors)):
        flags.append(flag)
    law = laws[chosen].get(regressors)
    params = {"k": law.k, **{f"{name}_exponent": item for name, item in law.exponents.items()}} if law else {}
    final = chosen_loss.path[-1]
    objective = sum(float(np.sum(final.rho(curve.fitted.residuals()))) for curve in curves)
    starts = Starts(
        sum(c.starts.total for c in curves), sum(c.starts.at_optimum for c in curves), max(c.starts.spread for c in curves)
    )
    success = all(curve.converged for curve in curves) and all(item.success for found in laws.values() for item in found.values())
    return CriticalBatchFit(
        "critical-batch", FORMULA, SOURCE, level, params, objective, starts, success, tuple(flags), (*table.notes, *table.warnings),
        chosen, definitions, table.unit, tuple(curves), laws, regressors,
    )  # fmt: skip


def _definitions(table: StepsTable, options: Mapping[str, Any]) -> tuple[dict[str, Definition], str]:
    """Every definition by its words, and the words of the one that was asked for."""
    overhead, wanted = options.get("overhead", OVERHEAD), options.get("definition", SMALLEST)
    if not (isinstance(overhead, (int, float)) and 0 < overhead < np.inf):
        raise DataError(Fault(f"overhead {overhead!r}", "is not a positive number", "0.2 stands for 20 %"))
    smallest = Definition(float(overhead), float(table.batch.min()))
    found = [smallest, Definition(float(overhead), None)]
    if wanted not in (SMALLEST, NOISE_SCALE):
        try:
            reference = float(wanted)
        except (TypeError, ValueError):
            reference = np.nan
        if not 0 < reference < np.inf:
            cure = f"choose from: {SMALLEST}, {NOISE_SCALE}, or a batch in {table.unit} that linear scaling is reckoned from"
            raise DataError(Fault(f"definition {wanted!r}", "is not known", cure))
        found.insert(0, Definition(float(overhead), reference))
    chosen = found[1 if wanted == NOISE_SCALE else 0]
    return {item.words(table.unit): item for item in found}, chosen.words(table.unit)


def _curve(
    table: StepsTable, sizes: Mapping[str, float], rows: NDArray[np.intp], loss: Loss, level: float, definitions: Mapping[str, Definition]
) -> SizeCurve:  # fmt: skip
    batches, steps = table.batch[rows], table.steps[rows]
    if len(np.unique(batches)) < LEAST_BATCHES:
        place = ", ".join(f"{name} {value:.4g}" for name, value in sizes.items())
        raise DataError(
            Fault(
                place,
                f"has {len(np.unique(batches))} batch sizes that reached the target, {LEAST_BATCHES} are needed",
                "measure more batches, or leave the size out with --where",
            )
        )
    x = Inputs.of({"batch": batches})
    bounds, weights = LAW.bounds(float(steps.min()), x), np.ones(len(steps))
    seeds = [
        LAW.assemble(shape, np.array([np.exp(np.mean(np.log(steps / LAW.design(shape, x)[:, 0])))]), steps.min())
        for shape in LAW.shapes(x)
    ]
    theta = np.array(seeds)
    for step in loss.path:
        minima = minimise(LAW, x, steps, weights, theta, step, bounds)
        theta = minima.theta
    best = int(np.argmin(minima.objective))
    reached = int((minima.objective <= minima.objective[best] * (1 + 1e-6) + 1e-20).sum())
    starts = Starts(len(theta), reached, float(minima.objective.max() / max(float(minima.objective[best]), 1e-300)))
    fitted = Fitted(LAW, x, steps, weights, loss, bounds, theta[best])

    def quantities(batch: Array) -> Array:
        derived = [np.log(item(np.exp(batch[:, 1]))) for item in definitions.values()]
        return np.stack([batch[:, 0], batch[:, 1], *derived], axis=1)

    least, scale, *critical = estimates(profile(fitted, quantities, level), [True] * (2 + len(definitions)))
    named = dict(zip(definitions, critical, strict=True))
    beyond = tuple(name for name, item in named.items() if item.value > batches.max())
    # Never extrapolated: the largest batch that was run is all that is known.
    named = {
        name: Estimate(float(batches.max()), np.nan, (item.interval[0], np.inf)) if name in beyond else item
        for name, item in named.items()
    }
    return SizeCurve(
        dict(sizes), batches, steps, least, scale, named, beyond, fitted.noise(), starts, bool(minima.converged[best]), fitted
    )


def _curve_flags(curve: SizeCurve, level: float) -> list[str]:
    low, high = curve.noise_scale.interval
    ends = [word for word, known in (("lower", low > 0), ("upper", np.isfinite(high))) if not known]
    if not ends or not np.isfinite(level):
        return []
    return [f"{curve.name}: the batches set no {' and no '.join(ends)} end to B_n"]


def _laws(
    curves: Sequence[SizeCurve], name: str, loss: Loss, level: float, flags: list[str]
) -> dict[tuple[str, ...], PowerLaw]:  # fmt: skip
    """Power laws of what the sizes identify: of all columns together where they are separable, else of each alone."""
    kept = [curve for curve in curves if name not in curve.beyond]
    if len(kept) < len(curves):
        left = ", ".join(curve.name for curve in curves if name in curve.beyond)
        flags.append(f"{left}: the critical batch lies above the largest batch; left out of the law, not extrapolated")
    sizes = {key: np.array([curve.sizes[key] for curve in kept]) for key in (kept[0].sizes if kept else ())}
    varied = [key for key, values in sizes.items() if len(np.unique(values)) > 1]
    flags += [f"the sizes have one level of {key}: its exponent is refused" for key in sizes if key not in varied]
    groups = [tuple(varied)] if varied else []
    if len(varied) > 1:
        correlation = float(np.corrcoef(*(np.log(sizes[key]) for key in varied))[0, 1])
        if abs(correlation) > CORRELATION:
            flags.append(
                f"{' and '.join(varied)} are collinear (correlation {correlation:.3f}): exponents of both together are refused, "
                "each stands alone"
            )
            groups = [(key,) for key in varied]
    found = {}
    for group in groups:
        if len(kept) <= len(group) + 1:
            flags.append(f"{len(kept)} sizes for {len(group) + 1} parameters of a law of {' and '.join(group)}: none is fitted")
            continue
        values = np.array([curve.critical[name].value for curve in kept])
        found[group] = power_law({key: sizes[key] for key in group}, values, loss, level)
    return found


def _span(curves: Sequence[SizeCurve], regressors: tuple[str, ...]) -> str:
    for name in regressors:
        values = [curve.sizes[name] for curve in curves]
        if max(values) / min(values) < DECADE:
            return f"{name} spans a factor of {max(values) / min(values):.3g}, under a decade: its exponent is hardly identified"
    return ""


def _far(name: str, value: float, measured: Sequence[float]) -> str:
    beyond = max(value / max(measured), min(measured) / value)
    return f"{name} {value:.4g} lies x{beyond:.3g} from what was measured, beyond x{FAR:g}" if beyond > FAR else ""
