"""The coordinate check's verdict: pass, warn, fail or inconclusive, and the tensor that is wrong.

Owns `judge`. Each statistic's slope d log2(statistic) / d log2(width) is compared with what maximal update demands (Tensor Programs V,
2203.03466, Appendix J; Tensor Programs IVb: every tensor's update has an effect of order one on the output, none blows up). With g the
number of a tensor's dimensions that grow:

    g   init   update   sensitivity of the output
    2   -1/2   -1       0 (-1/2 for query and key where head_dim grows)
    1    0      0      -1/2
    0    0      0      (not judged)

up to a factor that moves between a forward multiplier, the init and the LR (Lemma J.1): a tensor whose init and update are both off by
the same power and whose sensitivity is off by the opposite one is right, in another form. Init and update are exact to a few
hundredths at any width and name the tensor; the sensitivity is taken in a random model, where nothing is aligned, so that finite width
does not bend it either. A readout's wrong multiplier shows in every tensor below it: what the readout explains is taken off first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from analysis.results import Interval, fixed, interval_text, json_safe, text_table
from scaling.coordinate_rows import Measurement, TensorFacts

Verdict = Literal["pass", "warn", "fail", "inconclusive"]
TIGHT = 0.25
"""Halfway to the smallest step that theory allows, 1/2, for matrices."""
LOOSE = 0.45
"""The same for vectors, of whose few entries some hardly move."""
PRIOR_SEEDS = 4
SPREAD = 0.02
"""Standard deviation of a slope that paired seeds may hide."""
EPS_SHARE = 0.1
"""Adam's eps above this share of the gradient's RMS slows the update."""
LINEAR = 1e-3
"""Curvature below which the output counts as linear in a tensor."""
MIN_SPAN = 4.0


@dataclass(frozen=True)
class Slope:
    """A slope against log2(width), 90 % interval over seeds."""

    value: float
    interval: Interval

    def off(self, expected: float) -> float:
        return self.value - expected

    @property
    def half_width(self) -> float:
        return 0.5 * (self.interval[1] - self.interval[0])


NO_SLOPE = Slope(math.nan, (math.nan, math.nan))


@dataclass(frozen=True)
class Culprit:
    """A tensor (or the module that computes attention) that is wrong, and the number that shows it."""

    tensor: str
    statistic: str
    slope: Slope
    expected: float
    message: str
    level: Literal["fail", "warn"] = "fail"


@dataclass(frozen=True)
class TensorReport:
    """One tensor's slopes beside what they should be."""

    name: str
    shape: tuple[int, ...]
    """At the largest width."""
    growing: int
    init: Slope
    update: Slope
    sensitivity: Slope
    effect: Slope
    expected: Mapping[str, float]
    """Of init, update and sensitivity; the sensitivity with what the readout explains."""


@dataclass(frozen=True)
class CoordinateVerdict:
    """The outcome of a coordinate check. It is necessary for transfer, not sufficient."""

    verdict: Verdict
    culprits: tuple[Culprit, ...]
    tensors: tuple[TensorReport, ...]
    output: Slope
    """RMS of the model's output before the first step."""
    modules: Mapping[str, tuple[Slope, Slope]]
    """Module -> slopes of mean |activation| at the start and of its change; for reading, not judged."""
    widths: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, with the keys of the contract: verdict, culprits, rows."""
        culprits = [
            {
                "tensor": item.tensor,
                "statistic": item.statistic,
                "slope": item.slope.value,
                "interval": item.slope.interval,
                "expected": item.expected,
                "level": item.level,
                "message": item.message,
            }
            for item in self.culprits
        ]
        rows = [
            {"tensor": item.name, "statistic": name, "slope": slope.value, "interval": slope.interval}
            | {"expected": item.expected.get(name), "growing": item.growing, "shape": item.shape}
            for item in self.tensors
            for name, slope in _slopes(item).items()
        ]
        document = {
            "verdict": self.verdict,
            "culprits": culprits,
            "rows": rows,
            "output": {"slope": self.output.value, "interval": self.output.interval},
            "widths": self.widths,
            "notes": self.notes,
        }
        return dict(json_safe(document))

    def __str__(self) -> str:
        wrong = len({item.tensor for item in self.culprits if item.level == "fail"})
        head = {
            "pass": "pass: every tensor's init, update and effect scale with width as maximal update demands",
            "warn": "warn: it can train as it is, and does not do what transfer needs in all details",
            "fail": f"fail: {wrong} tensor{'s are' if wrong != 1 else ' is'} wrong",
            "inconclusive": "inconclusive",
        }[self.verdict]
        lines = [f"{head} (widths {', '.join(map(str, self.widths))})"]
        lines += [f"  {item.tensor}: {item.message}" for item in self.culprits]
        with_effects = any(math.isfinite(item.effect.value) for item in self.tensors)
        header = [
            "tensor",
            "shape",
            "grow",
            "init",
            "right",
            "update",
            "right",
            "sensitivity",
            "right",
            *(["effect"] if with_effects else []),
        ]
        rows = []
        for item in self.tensors:
            pairs = [(item.init, "init"), (item.update, "update"), (item.sensitivity, "sensitivity")]
            cells = [text for slope, name in pairs for text in (_cell(slope.value), _cell(item.expected.get(name, math.nan)))]
            effect = [_cell(item.effect.value)] if with_effects else []
            rows.append([item.name, "x".join(map(str, item.shape)), str(item.growing), *cells, *effect])
        lines += ["", "slopes against log2(width)", text_table(header, rows), f"output at the start: {_cell(self.output.value)}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _cell(value: float) -> str:
    return fixed(value, 2) if math.isfinite(value) else "-"


def _slopes(item: TensorReport) -> dict[str, Slope]:
    return {"init": item.init, "update": item.update, "sensitivity": item.sensitivity, "effect": item.effect}


class _Table:
    """The rows by (kind, name, statistic): {seed: {width: value}}."""

    def __init__(self, measurement: Measurement) -> None:
        self._values: dict[tuple[str, str, str], dict[int, dict[int, float]]] = {}
        self._typical: dict[tuple[str, str], float] = {}
        for row in measurement.rows:
            self._values.setdefault((row.kind, row.name, row.statistic), {}).setdefault(row.seed, {})[row.width] = row.value

    def slope(self, kind: str, name: str, statistic: str) -> Slope:
        """NO_SLOPE where a value is absent or 0 at some width.

        Two or three seeds say little of their own spread: it is drawn towards that of the same statistic in all tensors, which
        counts as `PRIOR_SEEDS` more (a moderated variance, Smyth 2004).
        """
        slopes = self._slopes(kind, name, statistic)
        if not slopes or any(math.isnan(value) for value in slopes):
            return NO_SLOPE
        from scipy.special import stdtrit

        own = (len(slopes) - 1) * float(np.var(slopes, ddof=1)) if len(slopes) > 1 else 0.0
        degrees = len(slopes) - 1 + PRIOR_SEEDS
        variance = (own + PRIOR_SEEDS * self._typical_variance(kind, statistic)) / degrees
        half = float(stdtrit(degrees, 0.95)) * math.hypot(math.sqrt(variance / len(slopes)), SPREAD)
        mean = float(np.mean(slopes))
        return Slope(mean, (mean - half, mean + half))

    def _slopes(self, kind: str, name: str, statistic: str) -> list[float]:
        return [_ols(values) for values in self._values.get((kind, name, statistic), {}).values()]

    def _typical_variance(self, kind: str, statistic: str) -> float:
        """Median over the tensors of the variance over seeds."""
        known = self._typical.get((kind, statistic))
        if known is None:
            every = [self._slopes(kind, name, statistic) for name in self.names(kind, statistic)]
            variances = [float(np.var(slopes, ddof=1)) for slopes in every if len(slopes) > 1 and not np.isnan(slopes).any()]
            known = self._typical[kind, statistic] = float(np.median(variances)) if variances else 0.05**2
        return known

    def at(self, kind: str, name: str, statistic: str, width: int) -> float:
        values = [by_width.get(width, math.nan) for by_width in self._values.get((kind, name, statistic), {}).values()]
        return float(np.mean(values)) if values else math.nan

    def once(self, kind: str, name: str, statistic: str) -> float:
        """What was measured at one width and seed only."""
        return next((value for row in self._values.get((kind, name, statistic), {}).values() for value in row.values()), math.nan)

    def names(self, kind: str, statistic: str) -> list[str]:
        return [name for known, name, known_statistic in self._values if (known, known_statistic) == (kind, statistic)]


def _ols(values: Mapping[int, float]) -> float:
    if len(values) < 2 or any(not value > 0 or not math.isfinite(value) for value in values.values()):
        return math.nan
    # Of a handful of points; numpy would take ten times as long for each of hundreds of slopes.
    x, y = [math.log2(width) for width in values], [math.log2(value) for value in values.values()]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def judge(measurement: Measurement) -> CoordinateVerdict:
    """Judge a measurement over at least three widths that span at least a factor of four."""
    table = _Table(measurement)
    widths = tuple(sorted({row.width for row in measurement.rows}))
    facts = measurement.tensors
    order = {name: place for place, name in enumerate(table.names("module", "activation"))}
    readout = _readout(table, facts, order)
    shift = _readout_shift(table, readout)
    heads = _head_growth(measurement, widths)
    reports = [_report(table, item, 0.0 if item.name == readout else shift, widths[-1]) for item in facts]
    culprits: list[Culprit] = []
    undecided: list[str] = []
    for item, report in zip(facts, reports, strict=True):
        found, doubtful = _judge_tensor(table, item, report, item.name == readout, widths[-1], heads)
        culprits += found
        undecided += doubtful
    culprits += _attention_culprits(table, heads)
    notes = _notes(table, facts, widths, undecided)
    if any(item.statistic in ("init", "attention_logits") for item in culprits):
        # A wrong init changes how much of the output everything else makes up: that is an effect.
        culprits = [item for item in culprits if item.statistic != "multiplier"]
        notes.insert(0, "forward multipliers are judged once the inits are right")
    failed, warned = any(item.level == "fail" for item in culprits), bool(culprits)
    unsure = bool(undecided) or len(widths) < 3 or widths[-1] < MIN_SPAN * widths[0]
    verdict: Verdict = "fail" if failed else "inconclusive" if unsure else "warn" if warned else "pass"
    modules = {name: (table.slope("module", name, "activation"), table.slope("module", name, "change")) for name in order if name}
    return CoordinateVerdict(
        verdict, tuple(culprits), tuple(reports), table.slope("module", "", "output"), modules, widths, tuple(notes)
    )


def _readout(table: _Table, facts: Sequence[TensorFacts], order: Mapping[str, int]) -> str | None:
    """The matrix with one growing dimension in which the output is linear, else the one whose module comes last.

    What it does wrong shows in all others.
    """
    matrices = [item for item in facts if item.growing == 1 and len(next(iter(item.shapes.values()))) > 1]
    curvature = {item.name: table.once("tensor", item.name, "curvature") for item in matrices}
    linear = [name for name, value in curvature.items() if value < LINEAR]
    place = {item.name: order.get(item.name.rpartition(".")[0], -1) for item in matrices}
    candidates = linear or [name for name, at in place.items() if at >= 0]
    return max(candidates, key=lambda name: place[name]) if candidates else None


def _readout_shift(table: _Table, name: str | None) -> float:
    """By how much the readout moves the sensitivity of every tensor below it: its own gain is -1/2 when it is right."""
    if name is None:
        return 0.0
    init = table.slope("tensor", name, "init").value
    # A readout that starts at zero is drawn with 1/sqrt(fan_in) for the sensitivities.
    shift = table.slope("tensor", name, "sensitivity").value + (-0.5 if math.isnan(init) else init) + 0.5
    return shift if math.isfinite(shift) else 0.0


def _report(table: _Table, item: TensorFacts, shift: float, width: int) -> TensorReport:
    growing = item.growing
    expected = {
        "init": -0.5 if growing == 2 else 0.0,
        "update": -1.0 if growing == 2 else 0.0,
        "sensitivity": {0: math.nan, 1: -0.5, 2: 0.0}.get(growing, math.nan) + shift,
    }
    slopes = {name: table.slope("tensor", item.name, name) for name in ("init", "update", "sensitivity", "effect")}
    return TensorReport(item.name, item.shapes[width], growing, expected=expected, **slopes)


def _judge_tensor(
    table: _Table, item: TensorFacts, report: TensorReport, is_readout: bool, width: int, heads: Mapping[str, float]
) -> tuple[list[Culprit], list[str]]:
    """The tensor's culprits, and what could not be decided."""
    vector = len(report.shape) < 2 or report.growing == 0
    tolerance = LOOSE if vector else TIGHT
    init, update = report.init.off(report.expected["init"]), report.update.off(report.expected["update"])
    gain = report.sensitivity.off(report.expected["sensitivity"])
    growth = max((value for name, value in heads.items() if item.name.startswith(f"{name}.")), default=0.0)
    if growth and report.growing == 2 and gain < 0:
        # Query and key act through logits that a random model lets fall as head_dim^-1/2.
        gain = min(0.0, gain + 0.5 * growth)
    found: list[Culprit] = []
    # In another form the sensitivity is off by what the update is off the other way (Lemma J.1); the init is then judged in that form.
    shift = gain if abs(update) > tolerance and abs(update + gain) < TIGHT and not vector else 0.0
    init, update, gain = init + shift, update + shift, gain - shift
    explained = _explained_by_gradient(table, item, report)
    # Readouts and vectors may start smaller than order one, as zeros do.
    wrong_init = abs(init) > tolerance and not (init < 0 and (vector or is_readout))
    wrong_update = abs(update) > tolerance and not explained
    if report.growing and abs(gain) > tolerance and not wrong_init and not wrong_update:
        found.append(_culprit(report, "multiplier", report.sensitivity, report.expected["sensitivity"], gain))
    if wrong_init:
        found.append(_culprit(report, "init", report.init, report.expected["init"] - shift, init))
    if wrong_update:
        eps = _eps_share(table, item, width)
        statistic = "eps" if update < 0 and eps > EPS_SHARE else "update"
        found.append(_culprit(report, statistic, report.update, report.expected["update"] - shift, update, eps))
    decay = _decay(table, item, report)
    doubtful = [
        f"{item.name}: {name} {interval_text(slope.interval)}"
        for name, slope in (("init", report.init), ("update", report.update))
        if slope.half_width > tolerance
    ]
    return found + decay, doubtful


def _culprit(report: TensorReport, statistic: str, slope: Slope, expected: float, off: float, eps: float = 0.0) -> Culprit:
    extra = f"width^{off:+.2f}"
    words = {
        "init": (
            f"its initial entries go as width^{slope.value:.2f} instead of width^{expected:.2f}: "
            f"divide its init std by {extra} (fan-in init for a matrix both of whose dimensions grow)"
        ),
        "update": (
            f"its update goes as width^{slope.value:.2f} an entry instead of width^{expected:.2f}: divide its learning rate by {extra}"
        ),
        "eps": (
            f"its update goes as width^{slope.value:.2f} instead of width^{expected:.2f} because eps is {eps:,.1f} times its "
            "gradient at the largest width: scale eps with the gradient, or make it smaller"
        ),
        "multiplier": (
            f"the output answers to it as width^{slope.value:.2f} instead of width^{expected:.2f}, while its init and update are right: "
            f"divide its forward multiplier by {extra}"
        ),
    }
    return Culprit(report.name, statistic, slope, expected, words[statistic])


def _explained_by_gradient(table: _Table, item: TensorFacts, report: TensorReport) -> bool:
    """SGD's update follows the gradient, which a fault elsewhere changes; the LR itself then scales as it should."""
    lr = table.slope("tensor", item.name, "lr").value
    return item.optimizer == "SGD" and abs(lr - (1.0 if report.growing == 1 else 0.0)) < TIGHT


def _eps_share(table: _Table, item: TensorFacts, width: int) -> float:
    if item.optimizer not in ("Adam", "AdamW", "NAdam", "RAdam"):
        return 0.0
    gradient = table.at("tensor", item.name, "gradient", width)
    return table.at("tensor", item.name, "eps", width) / gradient if gradient > 0 else 0.0


def _decay(table: _Table, item: TensorFacts, report: TensorReport) -> list[Culprit]:
    """Decoupled decay shrinks a weight by lr * weight_decay a step, which must not depend on width (CompleteP 2505.01618 Table 1)."""
    if item.optimizer not in ("AdamW", "Muon"):
        return []
    lr, decay = (table.slope("tensor", item.name, name) for name in ("lr", "weight_decay"))
    total = lr.value + decay.value
    if math.isnan(total) or abs(total) <= TIGHT:
        return []
    message = f"lr * weight_decay goes as width^{total:.2f}: multiply its weight decay by width^{-total:+.2f} to keep it constant"
    low, high = total + decay.interval[0] - decay.value, total + decay.interval[1] - decay.value
    return [Culprit(report.name, "weight_decay", Slope(total, (low, high)), 0.0, message, "warn")]


def _head_growth(measurement: Measurement, widths: Sequence[int]) -> dict[str, float]:
    """Module that computes attention -> power of the width with which its head_dim grows."""
    span = math.log2(widths[-1] / widths[0]) if widths[-1] > widths[0] else 1.0
    return {name: math.log2(dims[widths[-1]] / dims[widths[0]]) / span for name, dims in measurement.head_dims.items()}


def _attention_culprits(table: _Table, heads: Mapping[str, float]) -> list[Culprit]:
    """query . key needs 1/head_dim where head_dim grows: in a random model the logits then go as head_dim^-1/2."""
    culprits = []
    for name, growth in heads.items():
        slope, expected = table.slope("module", name, "attention_logits"), -0.5 * growth
        if growth and math.isfinite(slope.value) and abs(slope.off(expected)) > TIGHT:
            message = (
                f"attention logits of the random model go as width^{slope.value:.2f} instead of width^{expected:.2f}: "
                "scale query . key by 1/head_dim where head_dim grows (Tensor Programs V, Definition 4.1)"
            )
            culprits.append(Culprit(name, "attention_logits", slope, expected, message))
    return culprits


def _notes(table: _Table, facts: Sequence[TensorFacts], widths: Sequence[int], undecided: Sequence[str]) -> list[str]:
    notes = []
    if len(widths) < 3 or widths[-1] < MIN_SPAN * widths[0]:
        notes.append("give at least three widths that span a factor of four (four over a factor of eight are better)")
    if undecided:
        notes.append(f"more seeds would decide: {'; '.join(undecided[:5])}")
    notes += [f"{item.name}: {item.growing} dimensions grow, no rule is known" for item in facts if item.growing > 2]
    frozen = [item.name for item in facts if math.isnan(table.slope("tensor", item.name, "update").value)]
    if frozen:
        notes.append(f"never moved at some width, not judged: {', '.join(frozen[:5])}")
    notes.append("a pass is necessary for transfer, not sufficient: depth, batch, horizon and stability are not seen here")
    return notes
