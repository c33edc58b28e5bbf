"""The multi-power law fitted to loss curves of a few schedules: what another schedule would have ended with, and how sure that
is.

Owns `fit_multi_power` (formula: analysis.schedule_curves; Luo et al. 2025). A few curves hardly identify the shape of the decay
term (C, beta, gamma): their logs are pulled to published values with a standard deviation of `SHAPE_SD`, weighed against
residuals whose correlation along a curve counts. Intervals of predictions have two parts: the parameters' (residuals' variance
times their correlation time) and the law's own error on a schedule that it was not fitted to, measured by leaving out each
fitted curve in turn. Losses are nats per token, steps are updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

from analysis.fit_engine import Loss
from analysis.fit_result import Estimate
from analysis.fit_search import DELTA, Starts
from analysis.fit_uncertainty import LEVEL
from analysis.law import Array
from analysis.law_fit import checked_options
from analysis.schedule_curves import PARAMETERS, Curve, Terms, load_curves, multi_power
from analysis.schedule_result import CurveError, MultiPowerFit, Uncertainty, curve_error
from analysis.table import nearest
from scaling.errors import DataError, Fault

if TYPE_CHECKING:
    import pandas as pd

OPTIONS = ("train", "warmup_steps", "schedules", "shape_sd")
FORMULA = "L0 + A S1^-alpha - B sum_k (lr[k-1] - lr[k]) (1 - (1 + C lr[k]^-gamma S_k)^-beta)"
SOURCE = "Luo et al. 2025, 2503.12811"
SHAPE = {"C": 2.0, "beta": 0.6, "gamma": 0.65}
"""Rounded from the published fits of three sizes at one peak LR (C 2.07 to 2.13, beta 0.58 to 0.60, gamma 0.64 to 0.66)."""
SHAPE_SD = 0.5
"""Standard deviation of the logs of SHAPE about these values before the curves are seen: a factor of 1.65."""
BLOCK = 16
"""LR changes that are taken together while fitting; predictions are exact."""
ROUNDS = 3
"""Of fit and noise: the noise weighs the pull to SHAPE."""
SAME = 1e-6
LOW = {"L0": 1e-3, "A": 1e-4, "alpha": 0.02, "B": 1e-3, "C": 1e-6, "beta": 0.01, "gamma": 0.01}
HIGH = {"L0": 1e2, "A": 1e4, "alpha": 3.0, "B": 1e6, "C": 1e8, "beta": 20.0, "gamma": 4.0}


@dataclass(frozen=True, eq=False)
class _Problem:
    """Curves to fit, as log residuals under Huber's loss, and the pull to SHAPE with strength (residual units over log units)."""

    curves: Sequence[Curve]
    terms: Sequence[Terms]
    loss: Loss
    shape_sd: float

    def residuals(self, theta: Array) -> tuple[Array, Array]:
        """log(law) - log(loss) (n,) of all curves and the gradient (n, 7)."""
        rows, slopes = [], []
        for curve, terms in zip(self.curves, self.terms, strict=True):
            value, gradient = multi_power(theta, terms, curve.steps)
            value = np.maximum(value, 1e-6)
            rows.append(np.log(value / curve.loss))
            slopes.append(gradient / value[:, None])
        return np.concatenate(rows), np.concatenate(slopes)

    def bent(self, theta: Array, scale: float) -> tuple[Array, Array]:
        """Residuals whose half squares sum to Huber's loss over scale^2, and those of the pull."""
        residual, slope = self.residuals(theta)
        size = np.abs(residual)
        root = np.where(size <= self.loss.knee, residual, np.sign(residual) * np.sqrt(2 * self.loss.rho(residual)))
        chain = np.where(size <= self.loss.knee, 1.0, np.minimum(size, self.loss.knee) / np.maximum(np.abs(root), 1e-300))
        pull, towards = self.pull(theta)
        return np.concatenate([root / scale, pull]), np.concatenate([slope * (chain / scale)[:, None], towards])

    def pull(self, theta: Array) -> tuple[Array, Array]:
        places = [PARAMETERS.index(name) for name in SHAPE] if np.isfinite(self.shape_sd) else []
        slopes = np.zeros((len(places), len(PARAMETERS)))
        slopes[np.arange(len(places)), places] = 1 / self.shape_sd
        return (theta[places] - np.log([*SHAPE.values()][: len(places)])) / self.shape_sd, slopes

    def solve(self, start: Array, scale: float) -> tuple[Array, float, bool]:
        """theta, half the sum of squares, whether it converged."""
        low, high = (np.log([ends[name] for name in PARAMETERS]) for ends in (LOW, HIGH))

        def value(theta: Array) -> Array:
            return self.bent(theta, scale)[0]

        def slope(theta: Array) -> Array:
            return self.bent(theta, scale)[1]

        found = least_squares(value, np.clip(start, low + 1e-6, high - 1e-6), slope, (low, high), x_scale="jac", max_nfev=300)
        return np.asarray(found.x), float(found.cost), bool(found.success)


@dataclass(frozen=True, eq=False)
class _Found:
    """theta, half sums of squares of all starts, whether it converged, noise (s.d. of a log residual) and its correlation time
    in points.
    """

    theta: Array
    costs: tuple[float, ...]
    converged: bool
    noise: float
    time: float


def fit_multi_power(
    source: Path | str | pd.DataFrame,
    delta: float = DELTA,
    *,
    columns: Mapping[str, str] | None = None,
    where: Sequence[str] = (),
    loss_unit: str = "nats",
    level: float = LEVEL,
    **options: Any,
) -> MultiPowerFit:
    """Fit the law to curves (columns schedule, step, lr, loss); the curves that are not fitted are predicted, and their errors
    reported.

    options: train, names of the schedules to fit ("a,b" or a list; default: all); warmup_steps, schedules: see `load_curves`;
    shape_sd: of the pull on C, beta, gamma (inf: none). delta: Huber's knee in log loss. Raises DataError.
    """
    checked_options("multi-power", options, OPTIONS)
    shape_sd, warmup = _numbers(options)
    curves, notes = load_curves(
        source, columns, where=where, loss_unit=loss_unit, warmup_steps=warmup, schedules=options.get("schedules")
    )
    fitted, others = _chosen(curves, options.get("train"))
    problem = _Problem(fitted, [Terms.of(curve.schedule, BLOCK) for curve in fitted], Loss("huber-log", delta), shape_sd)
    if sum(len(curve.steps) for curve in fitted) <= len(PARAMETERS):
        raise DataError(Fault("the curves to fit", "have fewer points than the law has parameters (7)", "log more steps"))
    found = _search(problem, _starts(fitted))
    left_out = _left_out(problem, found)
    uncertainty = _uncertainty(problem, found, left_out, level)
    tested = tuple(curve_error(found.theta, curve) for curve in others)
    starts = Starts(
        len(found.costs),
        sum(cost <= min(found.costs) * (1 + SAME) + 1e-12 for cost in found.costs),
        max(found.costs) / max(min(found.costs), 1e-300),
    )
    flags = _flags(fitted, found, problem, uncertainty)
    residual = problem.residuals(found.theta)[0]
    if others:
        notes.append(f"{len(others)} curves are predicted and not fitted: {', '.join(curve.name for curve in others)}")
    return MultiPowerFit(
        "multi-power", FORMULA, SOURCE, level, _params(found.theta, uncertainty, level), float(np.sum(problem.loss.rho(residual))), starts,
        found.converged, tuple(flags), tuple(notes), found.theta, tuple(curves), tuple(curve.name for curve in fitted),
        tuple(curve_error(found.theta, curve) for curve in fitted), tested, left_out, uncertainty, shape_sd,
    )  # fmt: skip


def _numbers(options: Mapping[str, Any]) -> tuple[float, int | None]:
    faults = []
    shape_sd, warmup = options.get("shape_sd", SHAPE_SD), options.get("warmup_steps")
    if isinstance(shape_sd, bool) or not isinstance(shape_sd, (int, float)) or not shape_sd > 0:
        faults.append(
            Fault(f"shape_sd {shape_sd!r}", "is not positive", "0.5 pulls C, beta and gamma to published values; inf does not")
        )
    if warmup is not None and (
        isinstance(warmup, bool) or not isinstance(warmup, (int, float)) or warmup < 0 or warmup != int(warmup)
    ):
        faults.append(
            Fault(f"warmup_steps {warmup!r}", "is no number of steps", "for example 2160, or 0 where there was no warm-up")
        )
    if faults:
        raise DataError(*faults)
    return float(shape_sd), None if warmup is None else int(warmup)


def _chosen(curves: Sequence[Curve], train: Any) -> tuple[list[Curve], list[Curve]]:
    """The curves to fit and the others."""
    if train is None:
        return list(curves), []
    names = [part.strip() for part in train.split(",")] if isinstance(train, str) else list(train)
    there = [curve.name for curve in curves]
    faults = [Fault(f"train {name}", "is no schedule of the table", nearest(name, there)) for name in names if name not in there]
    if faults or not names:
        raise DataError(*(faults or [Fault("train", "names no schedule", f"there are: {', '.join(there)}")]))
    return [curve for curve in curves if curve.name in names], [curve for curve in curves if curve.name not in names]


def _starts(curves: Sequence[Curve]) -> list[Array]:
    """For exponents and decay strengths around published ones: the rest from the curves' ends."""
    lowest = min(float(curve.loss.min()) for curve in curves)
    first = curves[0]
    early = float(np.cumsum(first.schedule.lr)[first.steps[0]])
    peak = max(curve.schedule.peak_lr for curve in curves)
    starts = []
    for share, alpha, decay in ((0.93, 0.5, 0.12), (0.9, 0.4, 0.2), (0.96, 0.7, 0.06), (0.85, 0.3, 0.12)):
        level = share * lowest
        scale = max(float(first.loss[0]) - level, 1e-2) * early**alpha
        starts.append(np.log([level, scale, alpha, decay / peak, *SHAPE.values()]))
    return starts


def _search(problem: _Problem, starts: Sequence[Array]) -> _Found:
    """Fit, read the noise off the residuals, fit again: the noise says how much the pull on the shape weighs."""
    costs: tuple[float, ...] = (0.0,)
    scale, theta, converged = problem.loss.knee, starts[0], False
    noise, time = np.nan, np.nan
    for _ in range(ROUNDS):
        ends = [problem.solve(start, scale) for start in starts]
        best = min(ends, key=lambda end: end[1])
        theta, converged = best[0], best[2]
        costs = tuple(end[1] for end in ends)
        noise, time = _noise(problem, theta)
        scale, starts = noise * np.sqrt(time), [theta, *starts[1:]]
    return _Found(theta, costs, converged, noise, time)


def _noise(problem: _Problem, theta: Array) -> tuple[float, float]:
    """Standard deviation of a log residual, and the residuals' correlation time along a curve, in points: the sum of
    autocorrelations up to the first that is not positive, both ways; the longest of the curves.
    """
    residual = problem.residuals(theta)[0]
    freedom = max(len(residual) - len(PARAMETERS), 1)
    times = []
    for part in np.split(residual, np.cumsum([len(curve.steps) for curve in problem.curves])[:-1]):
        power = float(np.sum(part**2))
        total = 1.0
        for lag in range(1, len(part) // 2):
            share = float(np.sum(part[lag:] * part[:-lag])) / max(power, 1e-300)
            if share <= 0:
                break
            total += 2 * share
        times.append(total)
    return max(float(np.sqrt(np.sum(residual**2) / freedom)), 1e-9), max(times)


def _left_out(problem: _Problem, found: _Found) -> tuple[CurveError, ...]:
    """Errors of every fitted curve under the law of the others; none where there are fewer than three curves."""
    if len(problem.curves) < 3:
        return ()
    errors = []
    for index, curve in enumerate(problem.curves):
        kept = [other for other in range(len(problem.curves)) if other != index]
        others = replace(
            problem, curves=[problem.curves[other] for other in kept], terms=[problem.terms[other] for other in kept]
        )
        theta = others.solve(found.theta, found.noise * float(np.sqrt(found.time)))[0]
        errors.append(curve_error(theta, curve))
    return tuple(errors)


def _uncertainty(problem: _Problem, found: _Found, left_out: Sequence[CurveError], level: float) -> Uncertainty:
    """Covariance of theta from the curvature, points counted by their correlation time; the law's own error from the curves
    left out.
    """
    slope = problem.residuals(found.theta)[1]
    towards = problem.pull(found.theta)[1]
    matrix = slope.T @ slope / (found.noise**2 * found.time) + towards.T @ towards
    covariance = np.asarray(np.linalg.pinv(matrix, hermitian=True), dtype=np.float64)
    own = float(np.sqrt(np.mean([error.log_rms**2 for error in left_out]))) if left_out else float("nan")
    quantile = float(student.ppf((1 + level) / 2, len(left_out) - 1)) if len(left_out) > 1 else float("nan")
    return Uncertainty(covariance, own, quantile, found.noise, found.time)


def _params(theta: Array, uncertainty: Uncertainty, level: float) -> dict[str, Estimate]:
    """Parameters with intervals by the curvature: how well the curves (and the pull) fix them if the law is right."""
    found = {}
    reach = float(student.ppf((1 + level) / 2, 1000))
    for name, value, variance in zip(PARAMETERS, theta, np.diag(uncertainty.covariance), strict=True):
        plain, stderr = float(np.exp(value)), float(np.sqrt(max(variance, 0.0)))
        ends = np.exp(np.clip([value - reach * stderr, value + reach * stderr], -700, 700))
        found[name] = Estimate(plain, plain * stderr, (float(ends[0]), float(ends[1])))
    return found


def _flags(curves: Sequence[Curve], found: _Found, problem: _Problem, uncertainty: Uncertainty) -> list[str]:
    flags = []
    if not any(np.ptp(curve.schedule.lr[np.argmax(curve.schedule.lr) :]) > 0.01 * curve.schedule.peak_lr for curve in curves):
        flags.append("no fitted schedule decays: what a decay gains is not identified")
    if len(curves) < 3:
        flags.append(
            f"{len(curves)} curves fitted: how well the law predicts another schedule cannot be measured, three are needed"
        )
    low, high = (np.log([ends[name] for name in PARAMETERS]) for ends in (LOW, HIGH))
    for name, value, bottom, top in zip(PARAMETERS, found.theta, low, high, strict=True):
        if min(value - bottom, top - value) < 1e-3:
            flags.append(f"{name} lies on a bound of its range")
    loose = [
        name
        for name in SHAPE
        if not np.isfinite(problem.shape_sd) and uncertainty.covariance[PARAMETERS.index(name), PARAMETERS.index(name)] > 1
    ]
    if loose:
        flags.append(f"the curves do not identify {', '.join(loose)} (standard error of the log above 1)")
    return flags
