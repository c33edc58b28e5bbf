"""What a multi-power fit says: `MultiPowerFit` with parameters, errors on curves it was not fitted to, predictions and
comparisons of schedules.

Owns the result objects; analysis.schedule_law makes them. Losses are nats per token, intervals at the fit's level. A
prediction's interval holds the parameters' uncertainty and the law's own error on schedules left out, which counts as one
number a schedule: points of a curve move together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.fit_guards import FAR
from analysis.fit_result import Estimate
from analysis.law import Array
from analysis.law_fit import LawFit, Table
from analysis.results import Interval
from analysis.schedule_curves import Curve, LrSchedule, Terms, multi_power, schedule_of
from scaling.errors import DataError, Fault

PEAK = 0.05
"""A peak LR that differs by more than that share from all fitted ones is another training run, which the law does not speak of.
"""
POINTS = 200


@dataclass(frozen=True)
class CurveError:
    """Errors of predictions of a curve, nats: mean absolute, root mean square, at its last point; log_rms: of the log loss; r2."""

    name: str
    mae: float
    rmse: float
    r2: float
    last: float
    log_rms: float
    points: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.name,
            "mae": self.mae,
            "rmse": self.rmse,
            "r2": self.r2,
            "last": self.last,
            "points": self.points,
        }


def curve_error(theta: Array, curve: Curve) -> CurveError:
    """Errors of the law with theta (logs of the parameters) on a curve; exact sums."""
    predicted = multi_power(theta, Terms.of(curve.schedule), curve.steps)[0]
    off = predicted - curve.loss
    spread = float(np.sum((curve.loss - curve.loss.mean()) ** 2))
    r2 = 1 - float(np.sum(off**2)) / spread if spread > 0 else float("nan")
    log_rms = float(np.sqrt(np.mean(np.log(np.maximum(predicted, 1e-6) / curve.loss) ** 2)))
    return CurveError(
        curve.name, float(np.abs(off).mean()), float(np.sqrt(np.mean(off**2))), r2, float(off[-1]), log_rms, len(off)
    )


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """covariance (7, 7) of the parameters' logs; own: the law's error on a schedule left out, in log loss, NaN where unknown;
    quantile of Student's t with as many degrees of freedom as schedules left out but one; noise: of a log residual; time: its
    correlation along a curve, in points.
    """

    covariance: Array
    own: float
    quantile: float
    noise: float
    time: float

    def stderr(self, slopes: Array, own: float = 1.0) -> Array:
        """Of log losses with gradients slopes (n, 7); own: how often the law's own error counts (square root of 2 for a
        difference).
        """
        return np.asarray(np.sqrt(np.einsum("np,pq,nq->n", slopes, self.covariance, slopes) + (own * self.own) ** 2))


@dataclass(frozen=True, eq=False)
class CurvePrediction:
    """Loss under a schedule: final, with its interval, and along the way: steps (n,), loss, low, high."""

    schedule: LrSchedule
    final: Estimate
    steps: NDArray[np.intp]
    loss: Array
    low: Array
    high: Array
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        head = {"schedule": self.schedule.name, "steps": self.schedule.steps, "peak_lr": self.schedule.peak_lr}
        last = {"final_lr": float(self.schedule.lr[-1]), "loss": self.final.to_dict()}
        return {**head, **last, "trusted": not self.flags, "flags": list(self.flags)}

    def __str__(self) -> str:
        peak = f"peak LR {self.schedule.peak_lr:.4g}, final LR {self.schedule.lr[-1]:.4g}"
        place = f"{self.schedule.name} ({self.schedule.steps} steps, {peak})"
        line = f"predicted under {place}: {self.final.value:.5g} nats {self.final.cells()[2]}"
        return "\n".join([line, *(f"  ! {flag}" for flag in self.flags)])


@dataclass(frozen=True)
class ScheduleComparison:
    """Final loss of the first schedule minus that of the second, nats."""

    first: CurvePrediction
    second: CurvePrediction
    difference: Estimate

    @property
    def better(self) -> str | None:
        """The schedule that ends lower, None where the interval does not say."""
        low, high = self.difference.interval
        return self.first.schedule.name if high < 0 else self.second.schedule.name if low > 0 else None

    def __str__(self) -> str:
        names = f"{self.first.schedule.name} minus {self.second.schedule.name}"
        said = f"{self.better} ends lower" if self.better else "which ends lower is not known"
        return f"{names}: {self.difference.value:+.4f} nats {self.difference.cells()[2]}; {said}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "first": self.first.to_dict(),
            "second": self.second.to_dict(),
            "difference": self.difference.to_dict(),
            "better": self.better,
        }


@dataclass(frozen=True, eq=False)
class MultiPowerFit(LawFit):
    """theta: logs of the parameters; curves: all of the table; train: names of the fitted ones; fitted, tested, left_out:
    errors on fitted curves, on the others, and on fitted ones under the law of the rest.
    """

    theta: Array
    curves: tuple[Curve, ...] = field(repr=False)
    train: tuple[str, ...]
    fitted: tuple[CurveError, ...]
    tested: tuple[CurveError, ...]
    left_out: tuple[CurveError, ...]
    uncertainty: Uncertainty
    shape_sd: float

    @property
    def test_mae(self) -> float:
        """Mean over the curves that were not fitted, nats; NaN where all were."""
        return float(np.mean([error.mae for error in self.tested])) if self.tested else float("nan")

    def losses(self, schedule: LrSchedule | str | ArrayLike, steps: ArrayLike) -> Array:
        """Losses at steps of a schedule, without intervals."""
        chosen = schedule_of(schedule, self.curves)
        return multi_power(self.theta, Terms.of(chosen), self._steps(chosen, steps))[0]

    def predict(self, schedule: LrSchedule | str | ArrayLike, steps: ArrayLike | None = None) -> CurvePrediction:
        """The loss under a schedule: an LrSchedule, the name of one of the table's, or the LR of every update; by default at
        200 steps of it.

        The interval is that of a schedule that was not fitted, also for one that was.
        """
        chosen = schedule_of(schedule, self.curves)
        at = self._steps(
            chosen,
            np.unique(np.linspace(max(1, chosen.steps // 20), chosen.steps, POINTS).astype(np.intp)) if steps is None else steps,
        )
        whole = np.append(at, chosen.steps)
        loss, slopes = multi_power(self.theta, Terms.of(chosen), whole)
        stderr = self.uncertainty.stderr(slopes / loss[:, None])
        reach = self.uncertainty.quantile * stderr
        low, high = loss * np.exp(-reach), loss * np.exp(reach)
        final = Estimate(float(loss[-1]), float(loss[-1] * stderr[-1]), (float(low[-1]), float(high[-1])))
        return CurvePrediction(chosen, final, at, loss[:-1], low[:-1], high[:-1], tuple(self._far(chosen)))

    def compare(self, first: LrSchedule | str | ArrayLike, second: LrSchedule | str | ArrayLike) -> ScheduleComparison:
        """Final losses of two schedules; the law's own error is taken as independent between them, so that the interval is
        rather too wide.
        """
        one, other = self.predict(first), self.predict(second)
        slopes = []
        for prediction in (one, other):
            value, slope = multi_power(self.theta, Terms.of(prediction.schedule), np.array([prediction.schedule.steps]))
            slopes.append(slope / value[:, None])
        stderr = float(self.uncertainty.stderr(slopes[0] - slopes[1], np.sqrt(2))[0]) * one.final.value
        difference, reach = one.final.value - other.final.value, self.uncertainty.quantile * stderr
        interval: Interval = (difference - reach, difference + reach)
        return ScheduleComparison(one, other, Estimate(difference, stderr, interval))

    def _steps(self, schedule: LrSchedule, steps: ArrayLike) -> NDArray[np.intp]:
        at = np.atleast_1d(np.asarray(steps))
        if not len(at) or (at != np.rint(at)).any() or at.min() < 1 or at.max() > schedule.steps:
            raise DataError(
                Fault(
                    f"steps of schedule {schedule.name}",
                    f"are not whole numbers from 1 to {schedule.steps}",
                    "give steps within it",
                )
            )
        return at.astype(np.intp)

    def _far(self, schedule: LrSchedule) -> list[str]:
        flags = []
        fitted = [curve for curve in self.curves if curve.name in self.train]
        peaks = [curve.schedule.peak_lr for curve in fitted]
        if min(abs(schedule.peak_lr / peak - 1) for peak in peaks) > PEAK:
            shown = ", ".join(f"{peak:.4g}" for peak in sorted(set(peaks)))
            flags.append(f"its peak LR {schedule.peak_lr:.4g} is not one that was fitted ({shown}): the law is one of a peak LR")
        longest = max(int(curve.steps[-1]) for curve in fitted)
        if schedule.steps > FAR * longest:
            flags.append(f"{schedule.steps} steps lie x{schedule.steps / longest:.3g} beyond what was fitted, beyond x{FAR:g}")
        return flags

    def tables(self) -> list[Table]:
        head = ["schedule", "", "mean |error|", "rms", "R2", "at the end", "points"]
        kinds: Sequence[tuple[str, tuple[CurveError, ...]]] = (
            ("fitted", self.fitted),
            ("left out", self.left_out),
            ("predicted", self.tested),
        )
        rows = [
            [e.name, kind, f"{e.mae:.5f}", f"{e.rmse:.5f}", f"{e.r2:.4f}", f"{e.last:+.4f}", str(e.points)]
            for kind, errors in kinds
            for e in errors
        ]
        return [self.parameter_table(), (head, rows)]

    def sentences(self) -> list[str]:
        lines = []
        if self.tested:
            lines.append(f"mean |error| over the {len(self.tested)} predicted curves: {self.test_mae:.5f} nats")
        known = self.uncertainty
        lines.append(f"residuals scatter by {100 * known.noise:.2g} % and stay correlated over {known.time:.0f} points")
        if np.isfinite(known.own):
            lines.append(f"on a schedule left out the law is off by {100 * known.own:.2g} % (rms)")
        if np.isfinite(self.shape_sd):
            lines.append(f"C, beta and gamma are pulled to published values (standard deviation of their logs {self.shape_sd:g})")
        return lines

    def details(self) -> dict[str, Any]:
        known = self.uncertainty
        errors: Mapping[str, Any] = {"fitted": self.fitted, "left_out": self.left_out, "tested": self.tested}
        return {
            "train": list(self.train),
            **{name: [error.to_dict() for error in found] for name, found in errors.items()},
            "test_mae": self.test_mae,
            "noise": known.noise,
            "correlation_points": known.time,
            "law_error": known.own,
            "shape_sd": self.shape_sd,
        }
