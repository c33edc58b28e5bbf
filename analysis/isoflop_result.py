"""What an IsoFLOP analysis says: `IsoFlopFit` with a minimum for each budget and the laws through them, as text, HTML and JSON.

Owns the result objects; analysis.isoflop makes them. Losses are nats per token, budgets FLOP as the table counts them. A censored minimum
is shown as "<=" or ">=" the edge of its grid; an uncertainty that cannot be known is NaN, an end that the data do not set is open.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from analysis.fit_result import Estimate
from analysis.fit_table import FitTable
from analysis.isoflop_curve import Censored, Method, Window
from analysis.isoflop_law import PowerLaw
from analysis.results import Interval, html_table, text_table
from analysis.shapes import Array
from scaling.errors import DataError, Fault

Over = Literal["params", "tokens"]
FAR = 10.0
"""An optimum that many times beyond the sizes of the table is not to be trusted."""


@dataclass(frozen=True, eq=False)
class BudgetOptimum:
    """One budget.

    flops: mean of its rows. params, tokens: of the best size; the edge of the grid when censored, NaN when unresolved. loss: at the
    minimum, nats per token. censored "low": the optimum has at most that many parameters, "high": at least. sampled: smallest and largest
    size. noise: of one run, nats. log_stderr: of log params and log tokens. points, line: (params, loss) of runs and fitted curve.
    """

    flops: float
    params: Estimate
    tokens: Estimate
    loss: float
    censored: Censored | None
    reason: str
    sampled: Interval
    sizes: int
    runs: int
    noise: float
    log_stderr: tuple[float, float] = (np.nan, np.nan)
    points: tuple[Array, Array] = field(repr=False, default=(np.empty(0), np.empty(0)))
    line: tuple[Array, Array] = field(repr=False, default=(np.empty(0), np.empty(0)))

    @property
    def usable(self) -> bool:
        return self.censored is None

    @property
    def ratio(self) -> float:
        """Tokens a parameter."""
        return self.tokens.value / self.params.value

    def to_dict(self) -> dict[str, Any]:
        return {
            "flops": self.flops,
            "params": self.params.to_dict(),
            "tokens": self.tokens.to_dict(),
            "loss": self.loss,
            "censored": self.censored,
            "reason": self.reason,
            "sampled_params": list(self.sampled),
            "sizes": self.sizes,
            "runs": self.runs,
            "noise": self.noise,
        }

    def cells(self) -> list[str]:
        sign = {"low": ("<= ", ">= "), "high": (">= ", "<= ")}.get(self.censored or "", ("", ""))
        n, d = (
            "undecided" if self.censored == "unresolved" else f"{mark}{size.value:.4g}"
            for mark, size in zip(sign, (self.params, self.tokens), strict=True)
        )
        ratio = f"{self.ratio:.3g}" if self.usable else ""
        return [f"{self.flops:.4g}", n, between(self.params.interval), d, ratio, f"{self.loss:.5g}", f"{self.sizes}"]


def between(interval: Interval) -> str:
    words = {True: "unknown", False: ""}
    low, high = (words[end != end] or (f"{end:.4g}" if 0 < end < np.inf else "open") for end in interval)
    return f"[{low}, {high}]"


@dataclass(frozen=True)
class Bias:
    """What the method is off by without noise, on a Chinchilla surface fitted to the same runs at the same sizes.

    exponent: of N_opt, found minus true; factors: smallest and largest found N_opt over the true one.
    """

    exponent: float
    factors: Interval
    surface: Mapping[str, float]

    def __str__(self) -> str:
        low, high = self.factors
        return (
            f"without noise, on the Chinchilla surface fitted to these runs, the method misses the exponent by {self.exponent:+.4f} "
            f"and N_opt by x{low:.3g} to x{high:.3g}"
        )


@dataclass(frozen=True, eq=False)
class IsoFlopFit:
    """Budgets with their minima and the laws through the usable ones.

    params_law, tokens_law, ratio_law: N_opt, D_opt and D/N against FLOP; None with fewer than two usable budgets. flags: what casts
    doubt on the numbers; warnings: what leaves open what they mean; both in words.
    """

    table: FitTable
    window: Window
    over: Over
    level: float
    tolerance: float
    budgets: tuple[BudgetOptimum, ...]
    params_law: PowerLaw | None
    tokens_law: PowerLaw | None
    ratio_law: PowerLaw | None
    bias: Bias | None
    flags: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def method(self) -> Method:
        return self.window.method

    @property
    def success(self) -> bool:
        return self.params_law is not None

    @property
    def trusted(self) -> bool:
        return self.success and not self.flags

    @property
    def usable(self) -> list[BudgetOptimum]:
        return [budget for budget in self.budgets if budget.usable]

    def at(self, flops: float) -> tuple[Estimate, Estimate, Estimate, tuple[str, ...]]:
        """N_opt, D_opt, tokens a parameter at a budget, and flags. Raises DataError without a law or with a budget that is not positive."""
        if not (flops > 0 and np.isfinite(flops)):
            raise DataError(Fault(f"budget {flops:g} FLOP", "is not positive and finite", "give FLOP, such as 1e21"))
        if self.params_law is None or self.tokens_law is None or self.ratio_law is None:
            raise DataError(
                Fault("IsoFLOP law", f"{len(self.usable)} budgets have a minimum, and a law needs two", self.notes[-1])
            )
        params, tokens, ratio = (law.at(flops) for law in (self.params_law, self.tokens_law, self.ratio_law))
        flags = []
        for name, size in (("params", params), ("tokens", tokens)):
            column = self.table.columns[name]
            beyond = max(size.value / column.max(), column.min() / size.value)
            if beyond > FAR:
                flags.append(f"the optimal {name} {size.value:.4g} lies x{beyond:.3g} from what was measured, beyond x{FAR:g}")
        return params, tokens, ratio, tuple(flags)

    def to_dict(self) -> dict[str, Any]:
        """The document of `mutransfer fit --isoflop --json`, its part `isoflop`."""
        laws = {"params": self.params_law, "tokens": self.tokens_law, "tokens_per_param": self.ratio_law}
        bias = self.bias
        return {
            "method": self.method,
            "window": str(self.window),
            "over": self.over,
            "level": self.level,
            "tolerance": self.tolerance,
            "budgets": [budget.to_dict() for budget in self.budgets],
            "laws": {name: None if law is None else law.to_dict() for name, law in laws.items()},
            "bias": None
            if bias is None
            else {"exponent": bias.exponent, "factors": list(bias.factors), "surface": dict(bias.surface)},
            "success": self.success,
            "trusted": self.trusted,
            "flags": list(self.flags),
            "warnings": list(self.warnings),
            "conventions": dict(self.table.conventions),
            "rows": len(self.table),
            "sha256": self.table.sha256,
            "notes": list(self.notes),
        }

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        head = ["FLOP", "N_opt", f"{100 * self.level:g} % interval", "D_opt", "D/N", "loss", "sizes"]
        return head, [budget.cells() for budget in self.budgets]

    def _laws(self) -> list[str]:
        lines = []
        for name, law in (("N_opt", self.params_law), ("D_opt", self.tokens_law)):
            if law is not None:
                e, k = law.exponent, law.coefficient
                ends = "unknown" if e.interval[0] != e.interval[0] else f"{e.interval[0]:.4f}, {e.interval[1]:.4f}"
                scatter = "unknown" if law.scatter != law.scatter else f"{100 * law.scatter:.3g} %"
                line = f"{name} = {k.value:.4g} C^{e.value:.4f} [{ends}], scatter beyond the optima's own errors {scatter}"
                lines.append(f"{line}, {law.count} budgets")
        return lines or ["no law: fewer than two budgets have a minimum"]

    def _verdict(self) -> list[str]:
        word = "trusted" if self.trusted else "not to be trusted" if self.success else "no law"
        marked = [*(f"  ! {flag}" for flag in self.flags), *(f"  ? {warning}" for warning in self.warnings)]
        return [*self._laws(), *([str(self.bias)] if self.bias else []), word, *marked]

    def _head(self) -> str:
        return f"IsoFLOP, {self.window}, loss over log {self.over}; {len(self.table)} runs, {len(self.budgets)} budgets"

    def __str__(self) -> str:
        notes = (f"table: {note}" for note in self.notes)
        return "\n".join([self._head(), text_table(*self._rows()), *self._verdict(), *notes])

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in (*self._verdict(), *(f"table: {note}" for note in self.notes)))
        return f"<div><p>{html.escape(self._head())}</p>{html_table(*self._rows())}{lines}</div>"
