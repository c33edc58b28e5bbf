"""What a law of the best learning rate and batch says: `LrBatchFit` with exponents, optima of every size, scores, predictions;
text, HTML, JSON.

Owns the result objects; analysis.lr_batch_law makes them. Learning rates are peak values, batches tokens, losses nats per
token, excess losses shares of the loss (printed in percent). Censored optima are shown as "<=" or ">=" the edge of their grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.batch_table import LrBatchTable
from analysis.fit_guards import FAR
from analysis.fit_result import Estimate
from analysis.law import Array
from analysis.law_fit import LawFit, Table, checked_sizes
from analysis.lr_batch_cells import CellOptimum
from analysis.lr_batch_frontier import Frontier
from analysis.lr_batch_score import Score
from analysis.lr_batch_surface import Surface
from analysis.results import Interval
from scaling.errors import DataError, Fault

SHORT = {"lr": "lr", "batch_tokens": "batch"}
UNITS = {"lr": "", "batch_tokens": "tokens"}
RATIO = 1.5
"""Tokens a parameter may differ by that factor from a table with one ratio before a prediction says so."""


@dataclass(frozen=True)
class Plateau:
    """Factors of the best value, below and above, within which the loss rises by less than `share`; infinite where the grids
    end before.
    """

    knob: str
    share: float
    below: float
    above: float

    def __str__(self) -> str:
        ends = " to ".join("beyond the grids" if not 0 < end < np.inf else f"x{end:.2f}" for end in (self.below, self.above))
        width = f"a factor of {self.above / max(self.below, 1e-300):.3g}"
        return f"{SHORT[self.knob]} within {100 * self.share:g} % of the best loss: {ends} ({width})"

    def to_dict(self) -> dict[str, Any]:
        return {"knob": self.knob, "share": self.share, "below": self.below, "above": self.above}


@dataclass(frozen=True, eq=False)
class LrBatchLine:
    """log knob = centre + slopes (log size - middle). free (k, r): exponents that are fitted; centres (B, k), all_slopes (B, k,
    r): of resampled sizes.
    """

    knobs: tuple[str, ...]
    regressors: tuple[str, ...]
    free: NDArray[np.bool_]
    middle: Array
    centre: Array
    slopes: Array
    centres: Array
    all_slopes: Array
    cells: int
    level: float
    spans: Mapping[str, tuple[float, float]]

    def logs(self, log_sizes: Array) -> Array:
        """Log knobs (c, k) at log sizes (c, r)."""
        return np.asarray(self.centre + (log_sizes - self.middle) @ self.slopes.T)

    def _estimate(self, value: float, draws: Array, knob: int) -> tuple[float, float, Interval]:
        """Value, standard error and interval: spread and percentiles over resampled sizes (whose coverage docs/batch-size.md has)."""
        if self.cells - 1 - int(self.free[knob].sum()) < 1 or len(draws) < 2:
            return value, float("nan"), (float("nan"), float("nan"))
        low, high = np.quantile(draws, [(1 - self.level) / 2, (1 + self.level) / 2])
        return value, float(draws.std(ddof=1)), (float(min(low, value)), float(max(high, value)))

    def params(self) -> dict[str, Estimate]:
        """{"lr_k": factor, "lr_params_exponent": exponent, ...}; a refused exponent is not there."""
        found = {}
        for index, knob in enumerate(self.knobs):
            log_k = self.centres[:, index] - self.all_slopes[:, index] @ self.middle
            found[f"{SHORT[knob]}_k"] = _plain(
                *self._estimate(float(self.centre[index] - self.slopes[index] @ self.middle), log_k, index)
            )
            for at, name in enumerate(self.regressors):
                if self.free[index, at]:
                    found[f"{SHORT[knob]}_{name}_exponent"] = Estimate(
                        *self._estimate(float(self.slopes[index, at]), self.all_slopes[:, index, at], index)
                    )
        return found

    def predict(self, log_sizes: Array) -> dict[str, Estimate]:
        """Knobs at log sizes (r,), with intervals of the law."""
        away = log_sizes - self.middle
        found = {}
        for index, knob in enumerate(self.knobs):
            draws = self.centres[:, index] + self.all_slopes[:, index] @ away
            found[knob] = _plain(*self._estimate(float(self.centre[index] + self.slopes[index] @ away), draws, index))
        return found

    def formula(self) -> str:
        parts = []
        for index, knob in enumerate(self.knobs):
            k = np.exp(self.centre[index] - self.slopes[index] @ self.middle)
            powers = " ".join(
                f"{name}^{self.slopes[index, at]:.3f}" for at, name in enumerate(self.regressors) if self.free[index, at]
            )
            parts.append(f"{SHORT[knob]} {k:.4g} {powers}{' ' + UNITS[knob] if UNITS[knob] else ''}")
        return ", ".join(parts)


def _plain(value: float, stderr: float, interval: Interval) -> Estimate:
    """From logs."""
    with np.errstate(over="ignore"):
        return Estimate(
            float(np.exp(value)), float(np.exp(value)) * stderr, (float(np.exp(interval[0])), float(np.exp(interval[1])))
        )


@dataclass(frozen=True)
class LrBatchPrediction:
    """Best knobs at a size; given: a batch that was asked for instead of the best, which lr then goes with."""

    at: Mapping[str, float]
    knobs: Mapping[str, Estimate]
    given: float | None
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        knobs = {knob: item.to_dict() for knob, item in self.knobs.items()}
        return {**self.at, **knobs, "given_batch_tokens": self.given, "trusted": not self.flags, "flags": list(self.flags)}

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value:.6g}" for name, value in self.at.items())
        knobs = ", ".join(
            f"{SHORT[knob]} {item.value:.4g}{' ' + UNITS[knob] if UNITS[knob] else ''} {item.cells()[2]}"
            for knob, item in self.knobs.items()
        )
        given = f" at a batch of {self.given:.4g} tokens" if self.given else ""
        return "\n".join([f"best at {place}{given}: {knobs}", *(f"  ! {flag}" for flag in self.flags)])


@dataclass(frozen=True, eq=False)
class LrBatchFit(LawFit):
    """A law of the best learning rate and batch.

    optima: of every size from its own runs; scores: excess losses of this law, of itself with each size left out, and of
    published laws; ridge: d log best lr / d log batch; windows: exponents with other windows; divergence: where runs are lost;
    None where it does not apply.
    """

    method: str
    line: LrBatchLine
    optima: tuple[CellOptimum, ...]
    scores: tuple[Score, ...]
    plateaus: tuple[Plateau, ...]
    ridge: Estimate | None
    surface: Surface | None = field(repr=False)
    windows: tuple[tuple[float, Mapping[str, float]], ...]
    divergence: Frontier | None
    runs: LrBatchTable = field(repr=False)

    def predict(self, batch_tokens: float | None = None, **sizes: float) -> LrBatchPrediction:
        """Best learning rate and batch at a size. batch_tokens: the batch is given, and the learning rate follows the ridge of
        the joint surface.

        Raises DataError where a size that the law reads is missing or not positive.
        """
        checked_sizes(self.law, sizes, self.line.regressors)
        logs = np.array([np.log(float(sizes[name])) for name in self.line.regressors])
        knobs = self.line.predict(logs)
        flags = []
        for name in self.line.regressors:
            low, high = self.line.spans[name]
            beyond = max(sizes[name] / high, low / sizes[name])
            if beyond > FAR:
                flags.append(f"{name} {sizes[name]:.4g} lies x{beyond:.3g} from what was measured, beyond x{FAR:g}")
        if batch_tokens is None:
            return LrBatchPrediction(dict(sizes), knobs, None, tuple(flags))
        return LrBatchPrediction(dict(sizes), {"lr": self._along(batch_tokens, knobs, flags)}, batch_tokens, tuple(flags))

    def _along(self, batch_tokens: float, knobs: Mapping[str, Estimate], flags: list[str]) -> Estimate:
        """The best lr where the batch is given; the interval is that of the law's lr, moved."""
        if self.surface is None or len(self.line.knobs) < 2:
            raise DataError(
                Fault("prediction: batch_tokens", "needs lr and batch searched together, and method joint", "leave it out")
            )
        checked_sizes(self.law, {"batch_tokens": batch_tokens}, ("batch_tokens",))
        away = float(np.log(batch_tokens / knobs["batch_tokens"].value))
        reach = float(np.log(FAR)) / 2
        if abs(away) > reach:
            flags.append(f"the batch lies x{np.exp(abs(away)):.3g} from the best one: beyond what the surface was fitted to")
        shift = float(np.exp(self.surface.best_given(float(np.clip(away, -reach, reach)), reach)))
        lr = knobs["lr"]
        return Estimate(lr.value * shift, lr.stderr * shift, (lr.interval[0] * shift, lr.interval[1] * shift))

    def tables(self) -> list[Table]:
        interval = f"{100 * self.level:g} % interval"
        head = [
            "size, from its own runs",
            *(word for knob in self.line.knobs for word in (f"best {SHORT[knob]}", interval)),
            "near",
            "runs",
        ]
        rows = [[item.name, *item.cells(), str(item.near), str(item.runs)] for item in self.optima]
        scored = ["law", "mean excess", "largest", "sizes", "read below the best run"]
        shown = [
            [
                score.name,
                *(f"{100 * value:.3f} %" for value in (score.mean, score.largest)),
                f"{score.cells} of {score.cells + score.outside}",
                str(score.below),
            ]
            for score in self.scores
        ]
        return [self.parameter_table(), (head, rows), (scored, shown)]

    def sentences(self) -> list[str]:
        lines = [f"law ({self.method}): {self.line.formula()}", *map(str, self.plateaus)]
        if self.ridge is not None:
            slope = f"{self.ridge.value:.2f} {self.ridge.cells()[2]}"
            lines.append(f"at another batch than the best one, the best lr goes as batch^{slope} (the square-root rule: 0.5)")
        for share, exponents in self.windows:
            lines.append(
                f"with a window of {100 * share:g} %: " + ", ".join(f"{name} {value:.3f}" for name, value in exponents.items())
            )
        if self.divergence is not None:
            lines.append(str(self.divergence))
        return lines

    def details(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "regressors": list(self.line.regressors),
            "optima": [item.to_dict() for item in self.optima],
            "scores": [score.to_dict() for score in self.scores],
            "plateaus": [plateau.to_dict() for plateau in self.plateaus],
            "ridge": self.ridge.to_dict() if self.ridge is not None else None,
            "windows": [{"window": share, "exponents": dict(exponents)} for share, exponents in self.windows],
            "divergence": self.divergence.to_dict() if self.divergence is not None else None,
            "noise": self.surface.noise if self.surface is not None else float("nan"),
        }
