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

from analysis.coordinate_exact import exact_culprits, is_broken
from analysis.coordinate_verdict import CoordinateVerdict, Culprit, Slope, Table, TensorReport, Verdict
from analysis.results import interval_text
from scaling.coordinate_rows import Measurement, TensorFacts

TIGHT = 0.25
"""Halfway to the smallest step that theory allows, 1/2, for matrices."""
LOOSE = 0.45
"""The same for vectors, of whose few entries some hardly move."""
EPS_SHARE = 0.1
"""Adam's eps above this share of the gradient's RMS slows the update."""
LINEAR = 1e-3
"""Curvature below which the output counts as linear in a tensor."""
MIN_SPAN = 4.0


def judge(measurement: Measurement) -> CoordinateVerdict:
    """Judge a measurement over at least three widths that span at least a factor of four.

    Over fewer, a slope of a few seeds says nothing: only what is wrong at any span is named.
    """
    table = Table(measurement)
    widths = tuple(sorted({row.width for row in measurement.rows}))
    facts = measurement.tensors
    order = {name: place for place, name in enumerate(table.names("module", "activation"))}
    readout = _readout(table, facts, order)
    vectors = {item.name for item in facts if len(next(iter(item.shapes.values()))) < 2}
    shift = _readout_shift(table, readout, drawn=0.0 if readout in vectors else -0.5)
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
    exact = exact_culprits(measurement, "width")
    narrow = is_narrow(widths)
    if narrow or is_broken(exact):
        culprits = [item for item in culprits if item.statistic == "weight_decay"]
    culprits = exact + culprits
    failed, warned = any(item.level == "fail" for item in culprits), bool(culprits)
    unsure = bool(undecided) or narrow
    verdict: Verdict = "fail" if failed else "inconclusive" if unsure else "warn" if warned else "pass"
    modules = {name: (table.slope("module", name, "activation"), table.slope("module", name, "change")) for name in order if name}
    return CoordinateVerdict(
        verdict, tuple(culprits), tuple(reports), table.slope("module", "", "output"), modules, widths, tuple(notes)
    )


def is_narrow(sizes: Sequence[int]) -> bool:
    """Whether the widths (or depths) are too few, or too near each other, for their slopes to be judged."""
    return len(sizes) < 3 or sizes[-1] < MIN_SPAN * sizes[0]


def _readout(table: Table, facts: Sequence[TensorFacts], order: Mapping[str, int]) -> str | None:
    """The matrix with one growing dimension in which the output is linear, else such a vector, else the matrix whose module comes last.

    What it does wrong shows in all others. A vector must be the user's own parameter, and the only one of its kind: the output is
    linear in a last layer's gain as well.
    """
    matrices = [item for item in facts if item.growing == 1 and len(next(iter(item.shapes.values()))) > 1]
    curvature = {item.name: table.once("tensor", item.name, "curvature") for item in matrices}
    linear = [name for name, value in curvature.items() if value < LINEAR]
    vectors = [item.name for item in facts if item.growing == 1 and item.raw and len(item.shapes[min(item.shapes)]) == 1]
    straight = [name for name in vectors if table.once("tensor", name, "curvature") < LINEAR]
    if not linear and len(straight) == 1:
        return straight[0]
    place = {item.name: order.get(item.name.rpartition(".")[0], -1) for item in matrices}
    candidates = linear or [name for name, at in place.items() if at >= 0]
    return max(candidates, key=lambda name: place[name]) if candidates else None


def _readout_shift(table: Table, name: str | None, drawn: float) -> float:
    """By how much the readout moves the sensitivity of every tensor below it: its own gain is -1/2 when it is right.

    drawn: how the entries go with width that a readout which starts at zero is given for the sensitivities.
    """
    if name is None:
        return 0.0
    init = table.slope("tensor", name, "init").value
    shift = table.slope("tensor", name, "sensitivity").value + (drawn if math.isnan(init) else init) + 0.5
    return shift if math.isfinite(shift) else 0.0


def _report(table: Table, item: TensorFacts, shift: float, width: int) -> TensorReport:
    growing = item.growing
    expected = {
        "init": -0.5 if growing == 2 else 0.0,
        "update": -1.0 if growing == 2 else 0.0,
        "sensitivity": {0: math.nan, 1: -0.5, 2: 0.0}.get(growing, math.nan) + shift,
    }
    slopes = {name: table.slope("tensor", item.name, name) for name in ("init", "update", "sensitivity", "effect")}
    return TensorReport(item.name, item.shapes[width], growing, expected=expected, **slopes)


def _judge_tensor(
    table: Table, item: TensorFacts, report: TensorReport, is_readout: bool, width: int, heads: Mapping[str, float]
) -> tuple[list[Culprit], list[str]]:
    """The tensor's culprits, and what could not be decided."""
    vector = (len(report.shape) < 2 and not is_readout) or report.growing == 0
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
    # What no gradient reaches is moved by its decay alone.
    explained = _explained_by_gradient(table, item, report) or table.least("tensor", item.name, "reached") == 0
    # Readouts and vectors may start smaller than order one, as zeros do.
    wrong_init = abs(init) > tolerance and not (init < 0 and (vector or is_readout))
    wrong_update = abs(update) > tolerance and not explained
    if report.growing and abs(gain) > tolerance and not wrong_init and not wrong_update:
        found.append(_culprit(report, "multiplier", report.sensitivity, report.expected["sensitivity"], gain))
    if wrong_init:
        found.append(_culprit(report, "init", report.init, report.expected["init"] - shift, init))
    if wrong_update:
        eps = eps_share(table, item, width)
        statistic = "eps" if update < 0 and eps > EPS_SHARE else "update"
        found.append(_culprit(report, statistic, report.update, report.expected["update"] - shift, update, eps))
    decay = _decay(table, item, report)
    return found + decay, undecided_slopes(report, ("init", "update"), tolerance)


def undecided_slopes(report: TensorReport, statistics: Sequence[str], tolerance: float) -> list[str]:
    """Those of the tensor's statistics whose interval is too wide to judge, in words."""
    slopes = {name: getattr(report, name) for name in statistics}
    return [
        f"{report.name}: {name} {interval_text(slope.interval)}" for name, slope in slopes.items() if slope.half_width > tolerance
    ]


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


def _explained_by_gradient(table: Table, item: TensorFacts, report: TensorReport) -> bool:
    """SGD's update follows the gradient, which a fault elsewhere changes; the LR itself then scales as it should."""
    lr = table.slope("tensor", item.name, "lr").value
    return item.optimizer == "SGD" and abs(lr - (1.0 if report.growing == 1 else 0.0)) < TIGHT


def eps_share(table: Table, item: TensorFacts, width: int) -> float:
    """Adam's eps over the RMS of the tensor's first gradient; 0 for other optimizers."""
    if item.optimizer not in ("Adam", "AdamW", "NAdam", "RAdam"):
        return 0.0
    gradient = table.at("tensor", item.name, "gradient", width)
    return table.at("tensor", item.name, "eps", width) / gradient if gradient > 0 else 0.0


def _decay(table: Table, item: TensorFacts, report: TensorReport) -> list[Culprit]:
    """Decoupled decay shrinks a weight by lr * weight_decay a step, which must not depend on width (CompleteP 2505.01618 Table 1)."""
    if item.optimizer not in ("AdamW", "Muon", "Lion"):
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


def _attention_culprits(table: Table, heads: Mapping[str, float]) -> list[Culprit]:
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


def _notes(table: Table, facts: Sequence[TensorFacts], widths: Sequence[int], undecided: Sequence[str]) -> list[str]:
    notes = []
    if is_narrow(widths):
        notes.append("give at least three widths that span a factor of four (four over a factor of eight are better)")
    if undecided:
        notes.append(f"more seeds would decide: {'; '.join(undecided[:5])}")
    notes += [f"{item.name}: {item.growing} dimensions grow, no rule is known" for item in facts if item.growing > 2]
    deaf = [
        item.name for item in facts
        if item.growing in (1, 2)
        and math.isnan(table.slope("tensor", item.name, "sensitivity").value)
        and math.isfinite(table.slope("tensor", item.name, "update").value)
    ]  # fmt: skip
    if deaf:
        notes.append(f"the output does not answer to them at some width, multipliers not judged: {', '.join(deaf[:5])}")
    frozen = [item.name for item in facts if math.isnan(table.slope("tensor", item.name, "update").value)]
    if frozen:
        notes.append(f"never moved at some width, not judged: {', '.join(frozen[:5])}")
    notes.append("a pass is necessary for transfer, not sufficient: depth, batch, horizon and stability are not seen here")
    return notes
