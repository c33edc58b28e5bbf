"""What a fit says: `ScalingLawFit` with its parameters, predictions and compute-optimal splits, as text, HTML and JSON.

Owns the result objects; analysis.fit makes them. Losses are in nats per token, intervals at the fit's level.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import t as student

from analysis.fit_engine import Loss
from analysis.fit_guards import far_split_flags, prediction_flags
from analysis.fit_left_out import LeftOutSizes, leave_out, levels
from analysis.fit_search import Starts
from analysis.fit_table import FitTable
from analysis.fit_uncertainty import Fitted, Kind, Profile, bootstrap, percentiles, profile
from analysis.laws import Array, Inputs, Law
from analysis.results import Interval, html_table, json_safe, text_table
from scaling.errors import DataError, Fault

if TYPE_CHECKING:
    from analysis.fit_rollout import Comparison

FLOP_PER_PARAM_TOKEN = 6.0


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error and its interval; NaN where unknown, infinite where the data set no end."""

    value: float
    stderr: float
    interval: Interval

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "stderr": self.stderr, "interval": list(self.interval)}

    def cells(self) -> list[str]:
        return [f"{self.value:.6g}", f"{self.stderr:.3g}", _between(self.interval)]


def _between(interval: Interval) -> str:
    return f"[{', '.join('unknown' if end != end else f'{end:.5g}' for end in interval)}]"


class Estimated:
    """Views that every fitted law has of its parameters, and the verdict: `success` is a minimum, `trusted` one that no flag doubts."""

    params: Mapping[str, Estimate]
    success: bool
    flags: tuple[str, ...]

    @property
    def trusted(self) -> bool:
        return self.success and not self.flags

    @property
    def best_values(self) -> dict[str, float]:
        return {name: estimate.value for name, estimate in self.params.items()}

    @property
    def stderr(self) -> dict[str, float]:
        return {name: estimate.stderr for name, estimate in self.params.items()}

    @property
    def intervals(self) -> dict[str, Interval]:
        return {name: estimate.interval for name, estimate in self.params.items()}


@dataclass(frozen=True)
class Prediction:
    """Mean loss of runs of one size, nats per token; `run_interval` is for a single run, whose noise comes on top."""

    at: Mapping[str, float]
    loss: Estimate
    run_interval: Interval
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        loss = self.loss.to_dict()
        return {
            **self.at,
            "loss": loss,
            "run_interval": list(self.run_interval),
            "trusted": not self.flags,
            "flags": list(self.flags),
        }

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value:.6g}" for name, value in self.at.items())
        line = f"predicted at {place}: {self.loss.value:.5g} nats {_between(self.loss.interval)}, one run {_between(self.run_interval)}"
        return "\n".join([line, *(f"  ! {flag}" for flag in self.flags)])


@dataclass(frozen=True)
class Split:
    """Parameters and tokens that a budget of 6 N D = flops is best spent on."""

    flops: float
    params: Estimate
    tokens: Estimate
    loss: Estimate
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).to_dict() for name in ("params", "tokens", "loss")}
        return {"flops": self.flops, **parts, "trusted": not self.flags, "flags": list(self.flags)}

    def __str__(self) -> str:
        n, d = self.params, self.tokens
        line = (
            f"optimal at {self.flops:.4g} FLOP: {n.value:.4g} parameters {_between(n.interval)}, {d.value:.4g} tokens "
            f"{_between(d.interval)}, {d.value / n.value:.3g} tokens a parameter, loss {self.loss.value:.5g} {_between(self.loss.interval)}"
        )
        return "\n".join([line, *(f"  ! {flag}" for flag in self.flags)])


@dataclass(frozen=True, eq=False)
class Draws:
    """Refits of a bootstrap that converged: parameters (B, q); failed: those that did not."""

    kind: str
    values: Array
    names: tuple[str, ...]
    failed: int
    level: float

    @property
    def stderr(self) -> dict[str, float]:
        return dict(zip(self.names, self.values.std(axis=0, ddof=1).tolist(), strict=True))

    @property
    def intervals(self) -> dict[str, Interval]:
        """Percentiles; too narrow on few runs (docs/scaling-laws.md)."""
        return dict(zip(self.names, percentiles(self.values, self.level), strict=True))


@dataclass(frozen=True, eq=False)
class ScalingLawFit(Estimated):
    """A fitted law. params: by the names of `law.parameters`; objective: the weighted sum; noise: scatter of a run about the law, in
    log loss (loss in raw space); correlation (q, q) of the parameters as printed; flags: what casts doubt, in words.
    """

    law: Law
    table: FitTable
    loss: Loss
    level: float
    params: Mapping[str, Estimate]
    objective: float
    starts: Starts
    noise: float
    correlation: Array
    success: bool
    flags: tuple[str, ...]
    notes: tuple[str, ...]
    comparison: Comparison | None = None
    fitted: Fitted = field(repr=False, kw_only=True)

    def losses(self, **sizes: Any) -> Array:
        """Fitted losses at sizes (params=, tokens=, ...), arrays or numbers, without intervals."""
        x = Inputs.of(self._sizes(sizes), self.fitted.x.centres)
        return np.asarray(self.law.value(self.fitted.theta[None], x)[0][0])

    def predict(self, **sizes: Any) -> list[Prediction]:
        """Losses at sizes with intervals; raises DataError where a size that the law reads is missing or not positive."""
        columns = self._sizes(sizes)
        x = Inputs.of(columns, self.fitted.x.centres)

        def log_loss(theta: Array) -> Array:
            return np.asarray(np.log(self.law.value(theta, x)[0]))

        found = profile(self.fitted, log_loss, self.level)
        result = []
        for index, estimate in enumerate(estimates(found, [True] * len(x[self.law.columns[0]]))):
            at = {name: float(values[index]) for name, values in columns.items()}
            flags = prediction_flags(self.law, self.fitted.x, at)
            result.append(Prediction(at, estimate, self._run_interval(estimate), tuple(flags)))
        return result

    def optimal(self, flops: float) -> Split:
        """The compute-optimal parameters and tokens; raises DataError where the law does not trade one for the other."""
        product = float(np.log(flops / FLOP_PER_PARAM_TOKEN)) if flops > 0 else float("nan")
        law, centres = self.law, self.fitted.x.centres
        if product != product or law.optimum(self.fitted.theta[None], centres, product) is None:
            what = "is not positive" if product != product else f"cannot be split by the law {law.name}"
            raise DataError(
                Fault(
                    f"budget {flops:g} FLOP",
                    what,
                    "laws that split one: chinchilla, chinchilla-shared, kaplan, coupled, farseer-like",
                )
            )

        def quantities(theta: Array) -> Array:
            n = law.optimum(theta, centres, product)
            assert n is not None, "checked above"
            logs = {"params": n[:, None] - centres["params"], "tokens": (product - n)[:, None] - centres["tokens"]}
            loss = law.value(theta, Inputs(logs, centres))[0][:, 0]
            return np.stack([n, product - n, np.log(loss)], axis=1)

        params, tokens, loss = estimates(profile(self.fitted, quantities, self.level), [True] * 3)
        flags = far_split_flags(self.fitted.x, [("params", params.value), ("tokens", tokens.value)])
        return Split(flops, params, tokens, loss, tuple(flags))

    def bootstrap(self, kind: Kind = "pairs", draws: int = 1000, seed: int = 0, by: str | None = None) -> Draws:
        """Refits of resampled tables. by: what groups share: the table's column group, or the level of a size such as "params".

        groups takes the column group where `by` is None, wild each row for itself. Raises DataError where the table lacks it.
        """
        size = kind in ("groups", "wild") and by not in (None, "group")
        groups = self.table.columns.get(str(by)) if size else self.table.groups if kind == "groups" or by else None
        if groups is None and (kind == "groups" or by):
            sizes = ", ".join(self.table.columns)
            what = f"the table has no column {by or 'group'}"
            raise DataError(Fault(f"bootstrap of {kind}", what, f"map column group, or give a size to group by: {sizes}"))
        if size and groups is not None:
            groups = levels(groups)[0]
        minima = bootstrap(self.fitted, kind, draws, seed, groups)
        values = self.law.public(minima.theta[minima.converged], self.fitted.x.centres)
        shared = "" if groups is None else f" of {len(np.unique(groups))} levels of {by or 'group'}"
        return Draws(kind + shared, values, self.law.parameters, int((~minima.converged).sum()), self.level)

    def leave_out(self, by: str = "params") -> LeftOutSizes:
        """Errors of each level of a size when the law is fitted to the others; see analysis.fit_left_out."""
        return leave_out(self, by)

    def _sizes(self, sizes: Mapping[str, Any]) -> dict[str, Array]:
        faults = [
            Fault(f"prediction: {name}", f"the law {self.law.name} does not read it", "leave it out")
            for name in sizes
            if name not in self.law.columns
        ]
        faults += [
            Fault(f"prediction: {name}", "is missing", f"give {name}=NUMBER") for name in self.law.columns if name not in sizes
        ]
        columns = {name: np.atleast_1d(np.asarray(values, dtype=np.float64)) for name, values in sizes.items()}
        faults += [
            Fault(f"prediction: {name}", "is not positive and finite", "give sizes above 0")
            for name, values in columns.items()
            if not (np.isfinite(values) & (values > 0)).all()
        ]
        if faults:
            raise DataError(*faults)
        broadcast = np.broadcast_arrays(*(columns[name] for name in self.law.columns))
        return dict(zip(self.law.columns, broadcast, strict=True))

    def _run_interval(self, mean: Estimate) -> Interval:
        """The mean's interval and the noise of one run, added in quadrature."""
        low, high = mean.interval
        reach = float(student.ppf((1 + self.level) / 2, max(self.fitted.freedom, 1))) * self.noise
        if self.loss.in_logs:
            middle = np.log(mean.value)
            down, up = np.hypot(middle - np.log(low), reach) if low > 0 else np.inf, np.hypot(np.log(high) - middle, reach)
            return float(np.exp(middle - down)), float(np.exp(middle + up))
        return float(mean.value - np.hypot(mean.value - low, reach)), float(mean.value + np.hypot(high - mean.value, reach))

    def to_dict(self) -> dict[str, Any]:
        """The document of `mutransfer fit --json`, without predictions; intervals at `level`."""
        return {
            "law": self.law.name,
            "formula": self.law.formula,
            "source": self.law.source,
            "loss": self.loss.kind,
            "delta": self.loss.delta if self.loss.kind.startswith("huber") else None,
            "level": self.level,
            "params": {name: estimate.to_dict() for name, estimate in self.params.items()},
            "objective": self.objective,
            "starts": vars(self.starts),
            "success": self.success,
            "trusted": self.trusted,
            "flags": list(self.flags),
            "noise": self.noise,
            "correlation": self.correlation.tolist(),
            "rows": len(self.table),
            "spans": {
                name: [float(self.table.columns[name].min()), float(self.table.columns[name].max())] for name in self.law.columns
            },
            "conventions": dict(self.table.conventions),
            "sha256": self.table.sha256,
            "comparison": self.comparison.to_dict() if self.comparison else None,
            "notes": list(self.notes),
        }

    def _head(self) -> str:
        knee = f", delta {self.loss.delta:g}" if self.loss.kind.startswith("huber") else ""
        return f"{self.law.name}: L = {self.law.formula}   ({self.law.source}; {self.loss.kind}{knee}, {len(self.table)} runs)".replace(
            "L = log10 L", "log10 L"
        )

    def _verdict(self) -> list[str]:
        word = "trusted" if self.trusted else "not to be trusted" if self.success else "no minimum was reached"
        noise = f"{100 * self.noise:.3g} %" if self.loss.in_logs else f"{self.noise:.3g} nats"
        search = f"{self.starts.at_optimum} of {self.starts.total} starts reached the optimum"
        return [
            f"objective {self.objective:.8g}, runs scatter by {noise} about the law; {search}; {word}",
            *(f"  ! {flag}" for flag in self.flags),
        ]

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        head = ["parameter", "value", "stderr", f"{100 * self.level:g} % interval"]
        return head, [[name, *estimate.cells()] for name, estimate in self.params.items()]

    def __str__(self) -> str:
        compared = [str(self.comparison)] if self.comparison else []
        return "\n".join(
            [*compared, self._head(), text_table(*self._rows()), *self._verdict(), *(f"table: {note}" for note in self.notes)]
        )

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in (*self._verdict(), *(f"table: {note}" for note in self.notes)))
        return f"<div><p>{html.escape(self._head())}</p>{html_table(*self._rows())}{lines}</div>"

    def save(self, path: Path | str) -> None:
        """Everything needed to predict again, rows included, as JSON."""
        from scaling.records import write_atomic

        table = {
            "columns": {name: values.tolist() for name, values in self.table.columns.items()},
            "loss": self.table.loss.tolist(),
            "weights": None if self.table.weights is None else self.table.weights.tolist(),
            "groups": None if self.table.groups is None else [str(name) for name in self.table.groups],
            "notes": list(self.table.notes),
            "warnings": list(self.table.warnings),
            "conventions": dict(self.table.conventions),
        }
        state = {"theta": self.fitted.theta.tolist(), "starts": vars(self.starts), "success": self.success, "level": self.level}
        document = {"mutransfer_fit": 1, **json_safe(self.to_dict()), "delta": self.loss.delta, "state": state, "table": table}
        write_atomic(Path(path), json.dumps(document, indent=1, allow_nan=False) + "\n")


def estimates(found: Profile, logs: Sequence[bool]) -> list[Estimate]:
    """Estimates in plain units; the standard error of exp(v) is exp(v) times that of v."""
    result = []
    for value, stderr, interval, log in zip(found.values, found.stderr, found.intervals, logs, strict=True):
        if log:
            plain = float(np.exp(value))
            with np.errstate(over="ignore"):
                result.append(Estimate(plain, plain * float(stderr), (float(np.exp(interval[0])), float(np.exp(interval[1])))))
        else:
            result.append(Estimate(float(value), float(stderr), interval))
    return result
