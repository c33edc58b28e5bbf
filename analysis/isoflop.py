"""IsoFLOP analysis (Hoffmann et al.'s approach 2): the best size of each compute budget, and N_opt = k C^a through them.

Owns `isoflop`: rows of nearly equal FLOP form a budget, analysis.isoflop_curve finds each budget's minimum, analysis.isoflop_law the laws
through them, analysis.isoflop_result says what came out. Budgets whose minimum lies at an edge or is undecided are shown and stay out of
the laws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from analysis.fit_engine import Loss
from analysis.fit_result import Estimate
from analysis.fit_search import DELTA, search_minimum
from analysis.fit_table import FLOP_CONVENTION, FLOP_TOLERANCE, PARAMS_INCLUDE, FitTable, load_fit_table
from analysis.isoflop_curve import (
    DRAWS,
    METHODS,
    REACH,
    ROUNDING,
    SIZES,
    Budget,
    Method,
    Minimum,
    Noise,
    Window,
    find_minimum,
    fit_polynomial,
    moderated,
)
from analysis.isoflop_law import fit_power
from analysis.isoflop_result import Bias, BudgetOptimum, IsoFlopFit, Over
from analysis.laws import LAWS, Inputs
from analysis.results import Interval
from analysis.shapes import Array
from scaling.errors import DataError, Fault, raise_all

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Bias", "BudgetOptimum", "IsoFlopFit", "isoflop"]

TOLERANCE = 0.05
"""Rows whose FLOP exceed the smallest of their budget by no more than this share belong to it: steps and sizes are rounded."""
DECADE = 10.0
THIRD = (0.2, 0.45)
"""Of 6 N D: a FLOP column in this range counts the forward pass alone."""
SURFACE_STARTS, SURFACE_GRID = 12, 4001


def isoflop(
    table: Path | str | pd.DataFrame | FitTable,
    method: Method = "spline",
    *,
    columns: Mapping[str, str] | None = None,
    window: float | None = None,
    points: int | None = None,
    over: Over = "params",
    tolerance: float = TOLERANCE,
    level: float = 0.9,
    draws: int = DRAWS,
    surface: bool = True,
    **reading: Any,
) -> IsoFlopFit:
    """Best size of each budget and the power laws through them.

    method: Akima spline, parabola or cubic of the loss over the log of `over`. window: factor of the best size, either way, that a
    polynomial reads (inf: all sizes), or points: that many sizes about it. tolerance: share of FLOP by which rows of a budget may differ.
    draws: of the spline's bootstrap. surface: also compute the method's bias. reading: further keys of `load_fit_table`.
    Raises DataError with all faults, also where no budget has three sizes.
    """
    raise_all(_faults(method, window, points, over, tolerance, level, draws), DataError)
    rows = load_fit_table(table, columns, **reading)
    rows.require(["params", "tokens", "flops"])
    read = Window(method, REACH[method] if window is None else window, points)
    budgets, notes = make_budgets(rows, over, tolerance)
    minima, noises, source = _minima(budgets, read, level, draws)
    optima = [_optimum(*item, over) for item in zip(budgets, minima, noises, strict=True)]
    freedom = min(noise.freedom for noise in noises)
    found = _concluded(rows, read, over, level, tolerance, optima, (source, *notes), freedom)
    if surface and found.success:
        bias = _surface_bias(found, budgets)
        unknown = (
            ()
            if bias
            else ("the method's own bias is unknown: no Chinchilla surface of these runs has two minima inside the sizes",)
        )
        found = replace(found, bias=bias, notes=(*found.notes, *unknown))
        found = replace(found, flags=(*found.flags, *_bias_flags(found)))
    return found


def _faults(
    method: str, window: float | None, points: int | None, over: str, tolerance: float, level: float, draws: int
) -> list[Fault]:
    faults = []
    if method not in METHODS:
        faults.append(Fault(f"method {method!r}", "is not known", f"choose from: {', '.join(METHODS)}"))
    if over not in ("params", "tokens"):
        faults.append(Fault(f"over {over!r}", "is not known", "choose from: params, tokens"))
    if window is not None and points is not None:
        faults.append(Fault("window and points", "both say what is read", "leave one out"))
    if (window is not None or points is not None) and method == "spline":
        faults.append(Fault("window or points", "do not apply to the spline, which reads every size", "leave them out"))
    if window is not None and not window > 1:
        faults.append(Fault(f"window {window:g}", "is no factor above 1", "for example 4, or inf for every size"))
    if points is not None and points < (4 if method == "cubic" else 3):
        faults.append(Fault(f"points {points}", "are too few for the curve", "give 5 or more"))
    if not 0 <= tolerance < 0.5:
        faults.append(Fault(f"tolerance {tolerance:g}", "is no share between 0 and 0.5", f"for example {TOLERANCE:g}"))
    if not 0.5 <= level < 1:
        faults.append(Fault(f"level {level:g}", "is no level of an interval", "give a number such as 0.9"))
    if draws < 50:
        faults.append(Fault(f"draws {draws}", "are too few for an interval", "give 200 or more"))
    return faults


def group_rows(flops: Array, tolerance: float) -> list[NDArray[np.intp]]:
    """Indices of the rows of each budget, from the smallest; a row opens one where it exceeds the last's smallest by over the tolerance."""
    groups: list[list[int]] = []
    for row in np.argsort(flops, kind="stable"):
        if not groups or flops[row] > flops[groups[-1][0]] * (1 + tolerance):
            groups.append([])
        groups[-1].append(int(row))
    return [np.array(group) for group in groups]


def make_budgets(rows: FitTable, over: Over, tolerance: float) -> tuple[list[Budget], list[str]]:
    """The budgets of at least three sizes, and what to say of them and of the others. Raises DataError where there is none."""
    flops = rows.columns["flops"]
    size, other = ("params", "tokens") if over == "params" else ("tokens", "params")
    weights = np.ones(len(rows)) if rows.weights is None else rows.weights
    weights = weights if rows.stderr_known else weights / weights.mean()
    budgets, thin = [], []
    for group in group_rows(flops, tolerance):
        mine = group[np.argsort(rows.columns[size][group], kind="stable")]
        if len(np.unique(rows.columns[size][mine])) < SIZES:
            thin.append(len(mine))
            continue
        mean = float(flops[mine].mean())
        log_size, log_other = np.log(rows.columns[size][mine]), np.log(rows.columns[other][mine])
        budgets.append(Budget(mean, log_size, log_other, rows.loss[mine], weights[mine], rows.stderr_known))
    notes = [f"rows within {100 * tolerance:g} % of the smallest FLOP of a budget belong to it; its FLOP is their mean"]
    if thin:
        notes.append(f"{sum(thin)} rows in {len(thin)} budgets of fewer than {SIZES} sizes are in no curve")
    if not budgets:
        cure = "check the column flops, raise the tolerance, or fit a law instead (--law chinchilla)"
        raise DataError(Fault("IsoFLOP", f"no budget has {SIZES} sizes within {100 * tolerance:g} % of FLOP", cure))
    return budgets, notes


def _minima(budgets: Sequence[Budget], window: Window, level: float, draws: int) -> tuple[list[Minimum], list[Noise], str]:
    """Minimum and noise (nats) of each budget, and in words where the noise comes from."""
    fits = [fit_polynomial(budget, window) for budget in budgets]
    squares = [0.0 if fit is None else fit.squares for fit in fits]
    freedom = [0 if fit is None else fit.freedom for fit in fits]
    total = sum(freedom)
    if budgets[0].known:
        ratio = float(np.sqrt(sum(squares) / total)) if total else 1.0
        source = "noise: the column stderr"
        if ratio > 1:
            source += f", times {ratio:.3g}, since the runs scatter by that much more about their curves"
        noises = [Noise(max(ratio, 1.0), float(total) if ratio > 1 else np.inf)] * len(budgets)
    else:
        shares = moderated(squares, freedom)
        noises = [
            Noise(share.sd * float(budget.loss.min()), share.freedom) for share, budget in zip(shares, budgets, strict=True)
        ]
        degree = "cubic" if window.method != "parabola" else "parabola"
        source = f"noise of a run: its scatter about a {degree} in log size, {total} degrees of freedom over all budgets"
        source = source if total else "noise of a run: unknown, there are no more sizes than the curves have parameters"
    minima = [find_minimum(*item, level, draws) for item in zip(budgets, [window] * len(budgets), fits, noises, strict=True)]
    return minima, noises, source


def _optimum(budget: Budget, minimum: Minimum, noise: Noise, over: Over) -> BudgetOptimum:
    """The minimum in parameters and tokens; they fall as each other rises."""
    place, ends = minimum.log_size, minimum.interval
    sizes = budget.sizes
    if np.isfinite(place):
        near = np.clip([place - 1e-3, place + 1e-3], sizes[0], sizes[-1])
        fall = float(np.diff(budget.other_at(near))[0] / np.diff(near)[0])
        other = float(budget.other_at(place))
        turned = tuple(float(budget.other_at(end)) if np.isfinite(end) else -end for end in (ends[1], ends[0]))
    else:
        fall, other, turned = np.nan, np.nan, (-np.inf, np.inf)
    errors = (minimum.stderr, abs(fall) * minimum.stderr)
    pair = [_estimate(place, errors[0], ends), _estimate(other, errors[1], (turned[0], turned[1]))]
    censored, logs, reason = minimum.censored, budget.log_size, minimum.reason
    line = minimum.line[0]
    if over == "tokens":
        pair, errors, logs, line = pair[::-1], errors[::-1], budget.log_other, budget.other_at(line)
        reason = reason.replace("size has", "token count has")
        censored = {"low": "high", "high": "low"}.get(censored, censored) if censored else None  # type: ignore[assignment]
    sampled = (float(np.exp(logs.min())), float(np.exp(logs.max())))
    points, drawn = (np.exp(logs), budget.loss), (np.exp(line), minimum.line[1])
    return BudgetOptimum(
        budget.flops, pair[0], pair[1], minimum.loss, censored, reason, sampled, len(sizes), len(budget.loss),
        noise.sd / float(np.sqrt(budget.weights.mean())), errors,
        points, drawn,
    )  # fmt: skip


def _estimate(log_value: float, stderr: float, interval: Interval) -> Estimate:
    value = float(np.exp(log_value))
    return Estimate(value, value * stderr, (float(np.exp(interval[0])), float(np.exp(interval[1]))))


def _concluded(
    rows: FitTable, window: Window, over: Over, level: float, tolerance: float, optima: Sequence[BudgetOptimum], notes: Sequence[str],
    freedom: float,
) -> IsoFlopFit:  # fmt: skip
    """The laws through the usable budgets, with what casts doubt on them."""
    usable = [optimum for optimum in optima if optimum.usable]
    flops = [optimum.flops for optimum in usable]
    errors = law_errors(window.method, np.array([optimum.log_stderr for optimum in usable]).reshape(-1, 2))
    params, tokens, ratio = (
        fit_power(flops, values, stderr, level, freedom=freedom)
        for values, stderr in (
            ([optimum.params.value for optimum in usable], errors[:, 0]),
            ([optimum.tokens.value for optimum in usable], errors[:, 1]),
            ([optimum.ratio for optimum in usable], errors.sum(axis=1)),
        )
    )
    out = [f"budget {optimum.flops:.4g}: {_left_out(optimum)}, so it is in no law" for optimum in optima if not optimum.usable]
    said = (*rows.notes, *notes, *out)
    return IsoFlopFit(
        rows, window, over, level, tolerance, tuple(optima), params, tokens, ratio, None,
        (*rows.warnings, *_flags(rows, optima, usable, tolerance)), tuple(_warnings(rows)), said,
    )  # fmt: skip


def law_errors(method: Method, errors: Array) -> Array:
    """Errors (n, 2) that weigh optima in the laws.

    A spline's are read off one noisy curve each: a chance dip looks sure, and weights that believe it make the law's interval too narrow.
    They are pulled halfway, in logs, to their common level.
    """
    if method != "spline" or not len(errors):
        return errors
    logs = np.log(np.maximum(errors, ROUNDING))
    return np.asarray(np.exp((logs + logs.mean(axis=0)) / 2))


def _left_out(optimum: BudgetOptimum) -> str:
    words = {"low": f"at most {optimum.params.value:.4g} parameters", "high": f"at least {optimum.params.value:.4g} parameters"}
    return f"{words.get(optimum.censored or '', 'undecided')} ({optimum.reason})"


def _flags(rows: FitTable, optima: Sequence[BudgetOptimum], usable: Sequence[BudgetOptimum], tolerance: float) -> list[str]:
    flags = []
    if len(usable) < 2:
        flags.append(f"{len(usable)} of {len(optima)} budgets have a minimum between their sizes: a law needs two")
    elif len(usable) == 2:
        flags.append("two budgets have a minimum: whether a power law holds cannot be seen")
    if 2 <= len(usable) < 0.5 * len(optima):
        flags.append(f"{len(optima) - len(usable)} of {len(optima)} budgets have no minimum between their sizes")
    if len(usable) > 1 and (span := usable[-1].flops / usable[0].flops) < DECADE:
        flags.append(f"budgets span a factor of {span:.3g}, under a decade: exponents are hardly identified")
    flops = rows.columns["flops"]
    groups = group_rows(flops, tolerance)
    close = sum(flops[above].min() <= flops[below].max() * (1 + tolerance) for below, above in pairwise(groups))
    if close:
        flags.append(f"compute is scattered: {close} budgets begin within the tolerance of the one below")
    return flags


def _warnings(rows: FitTable) -> list[str]:
    """What the numbers mean, where the table does not say or says something unusual."""
    found = []
    if rows.conventions.get("params", "not stated") == "not stated":
        ask = f"state it with --params-include {' or '.join(PARAMS_INCLUDE)}"
        found.append(f"whether params count embeddings is not stated: at small sizes the exponents depend on it; {ask}")
    ratio = rows.columns["flops"] / (6.0 * rows.columns["params"] * rows.columns["tokens"])
    low, high = float(ratio.min()), float(ratio.max())
    if max(1 - low, high - 1) > FLOP_TOLERANCE:
        text = (
            f"column flops is {low:.3g} to {high:.3g} times {FLOP_CONVENTION}: budgets and coefficients are in the column's FLOP"
        )
        if THIRD[0] <= low and high <= THIRD[1]:
            text += "; about a third, as where the forward pass alone is counted: then the runs cost three times what it says"
        found.append(text)
    return found


def _surface_bias(found: IsoFlopFit, budgets: Sequence[Budget]) -> Bias | None:
    """The same analysis of a Chinchilla law fitted to the same rows, without noise, against that law's own minima."""
    law, rows = LAWS["chinchilla"], found.table
    if len(rows) < len(law.parameters) + 1:
        return None
    search = search_minimum(law, rows, Loss("huber-log", DELTA), SURFACE_STARTS)
    centres = Inputs.of({name: rows.columns[name] for name in law.columns}).centres

    def losses(params: Array, tokens: Array) -> Array:
        return np.asarray(law.value(search.theta[None], Inputs.of({"params": params, "tokens": tokens}, centres))[0][0])

    misses = [
        _miss(budget, found, losses) if optimum.usable else np.nan for budget, optimum in zip(budgets, found.budgets, strict=True)
    ]
    seen = [(miss, optimum) for miss, optimum in zip(misses, found.budgets, strict=True) if np.isfinite(miss)]
    if len(seen) < 2:
        return None
    missed, flops = np.array([miss for miss, _ in seen]), [optimum.flops for _, optimum in seen]
    errors, scatter = [optimum.log_stderr[0] for _, optimum in seen], found.params_law.scatter if found.params_law else 0.0
    slope = fit_power(flops, np.exp(missed), errors, found.level, scatter)
    assert slope is not None, "two budgets differ in FLOP"
    values = dict(zip(law.parameters, law.public(search.theta[None], centres)[0].tolist(), strict=True))
    return Bias(slope.exponent.value, (float(np.exp(missed.min())), float(np.exp(missed.max()))), values)


def _miss(budget: Budget, found: IsoFlopFit, losses: Callable[[Array, Array], Array]) -> float:
    """log of the N_opt that the method finds on a surface over the surface's own; NaN where either lies at an edge."""
    swapped = found.over == "tokens"

    def on_surface(log_size: Array, log_other: Array) -> Array:
        pair = np.exp(log_size), np.exp(log_other)
        return losses(*(pair[::-1] if swapped else pair))

    grid = np.linspace(budget.sizes[0], budget.sizes[-1], SURFACE_GRID)
    truth = int(np.argmin(on_surface(grid, budget.other_at(grid))))
    loss = on_surface(budget.log_size, budget.log_other)
    plain = replace(budget, loss=loss, weights=np.ones_like(loss), known=False)
    minimum = find_minimum(plain, found.window, fit_polynomial(plain, found.window), Noise(np.nan, 0.0), found.level, DRAWS)
    if minimum.censored is not None or truth in (0, SURFACE_GRID - 1):
        return np.nan
    ends = np.array([minimum.log_size, grid[truth]])
    own, true = budget.other_at(ends) if swapped else ends
    return float(own - true)


def _bias_flags(found: IsoFlopFit) -> list[str]:
    if found.bias is None or found.params_law is None:
        return []
    low, high = found.params_law.exponent.interval
    if not abs(found.bias.exponent) > (high - low) / 2:
        return []
    return [
        f"the {found.method}'s own bias of the exponent, {found.bias.exponent:+.4f}, is larger than its interval's half width"
    ]
