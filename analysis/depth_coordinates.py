"""The coordinate check against depth: whether the L blocks together move the output by order one, whatever L.

Owns `judge_depth`. With branches multiplied by L^-alpha and a learning rate of L^(alpha-1) inside the blocks, alpha in [1/2, 1]
(CompleteP 2505.01618, Table 1; Bordelon et al. 2309.16620; Yang et al. 2310.02244; Complete(d)P 2512.22382):

    tensor      init   update    sensitivity of the output   update + sensitivity
    of a block   0     alpha-1   -alpha                      -1
    outside      0     0          0                           0

Any alpha is right: update + sensitivity of a block's tensor is -1, and its init + sensitivity lies in [-1, -1/2] (a branch may also be made
small by an init that falls with depth; a forward multiplier and the init stand in for one another, Lemma J.1 of Tensor Programs V).
A block's statistic is the root mean square over the layers. Sensitivities are taken where the branches are small beside the
stream (`scaling.coordinates.measure_depths`), where they are exact to a few hundredths at two layers already; nothing is judged that
finite depth bends, and activations at the start, which fall slightly at alpha 1, are not judged at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from analysis.coordinate_exact import exact_culprits, is_broken
from analysis.coordinate_verdict import CoordinateVerdict, Culprit, Slope, Table, TensorReport, Verdict
from analysis.coordinates import EPS_SHARE, LOOSE, TIGHT, eps_share, is_narrow, undecided_slopes
from scaling.coordinate_rows import Measurement, Row, TensorFacts

SUM = -1.0
"""Update + sensitivity of a block's tensor."""
BRANCH = (-1.0, -0.5)
"""Init + sensitivity of a block's tensor: -alpha."""

ALIKE = 1e-3
"""Smallest over largest sensitivity of one tensor's layers, below which there is no stream that they all write to."""


def judge_depth(measurement: Measurement, free: Callable[[str], str]) -> CoordinateVerdict:
    """Judge a measurement whose widths are depths. free: a tensor's name with `*` for its layer number."""
    merged = over_layers(measurement, free)
    table, facts = Table(merged), merged.tensors
    depths = tuple(sorted({row.width for row in merged.rows}))
    readout = _last_outside(table, facts)
    shift = _or_zero(table.slope("tensor", readout, "sensitivity").value) if readout else 0.0
    reports = [_report(table, item, 0.0 if item.name == readout else shift) for item in facts]
    culprits: list[Culprit] = []
    undecided: list[str] = []
    for item, report in zip(facts, reports, strict=True):
        found = _block(table, item, report, shift, depths[-1]) if report.growing else _outside(report)
        culprits += found
        undecided += [] if found else undecided_slopes(report, ("init", "update", "sensitivity"), TIGHT)
    if any(item.statistic == "init" for item in culprits):
        # What an init does wrong shows in the sensitivity of the rest of its branch.
        culprits = [item for item in culprits if item.statistic != "multiplier"]
    if any(item.statistic in ("init", "multiplier") for item in culprits):
        # A stream that grows with depth turns the gradients of vectors around from step to step.
        vectors = {item.name for item in facts if len(next(iter(item.shapes.values()))) < 2}
        culprits = [
            item for item in culprits
            if item.statistic != "update" or item.tensor not in vectors or abs(item.slope.off(item.expected)) > LOOSE
        ]  # fmt: skip
    blind = [item.name for item in reports if math.isnan(item.sensitivity.value)] + _unequal_layers(measurement, free, depths[-1])
    notes = _notes(table, reports, depths, undecided, blind)
    narrow = is_narrow(depths)
    unsure = bool(undecided) or narrow or bool(blind) or not any(item.growing for item in reports)
    exact = exact_culprits(measurement, "depth", free)
    culprits = exact + ([] if narrow or is_broken(exact) else culprits)
    verdict: Verdict = "fail" if culprits else "inconclusive" if unsure else "pass"
    names = [name for name in table.names("module", "activation") if name]
    modules = {name: (table.slope("module", name, "activation"), table.slope("module", name, "change")) for name in names}
    output = table.slope("module", "", "output")
    return CoordinateVerdict(verdict, tuple(culprits), tuple(reports), output, modules, depths, tuple(notes), axis="depth")


def over_layers(measurement: Measurement, free: Callable[[str], str]) -> Measurement:
    """The measurement with one row for all layers of a tensor or module: the root mean square of theirs."""
    squares: dict[tuple[int, int, str, str, str], list[float]] = {}
    for row in measurement.rows:
        squares.setdefault((row.width, row.seed, row.kind, free(row.name), row.statistic), []).append(row.value * row.value)
    rows = tuple(Row(*key, math.sqrt(math.fsum(values) / len(values))) for key, values in squares.items())
    facts: dict[str, TensorFacts] = {}
    for item in measurement.tensors:
        known = facts.setdefault(free(item.name), TensorFacts(free(item.name), {}, item.owner, item.optimizer))
        known.shapes.update(item.shapes)
        known.not_optimized.update(item.not_optimized)
    return Measurement(rows, tuple(facts.values()), measurement.steps)


def _unequal_layers(measurement: Measurement, free: Callable[[str], str], depth: int) -> list[str]:
    """Block tensors whose layers differ by orders of magnitude, as they do where each layer's output replaces the one before."""
    layers: dict[str, list[float]] = {}
    for row in measurement.rows:
        if row.width == depth and row.statistic == "sensitivity" and "*" in free(row.name):
            layers.setdefault(free(row.name), []).append(row.value)
    return [name for name, values in layers.items() if min(values) < ALIKE * max(values)]


def _last_outside(table: Table, facts: Sequence[TensorFacts]) -> str | None:
    """The matrix outside the blocks whose module comes last: what it does wrong shows in all others."""
    order = {name: place for place, name in enumerate(table.names("module", "activation"))}
    matrices = [item.name for item in facts if "*" not in item.name and len(next(iter(item.shapes.values()))) > 1]
    known = [name for name in matrices if name.rpartition(".")[0] in order]
    return max(known, key=lambda name: order[name.rpartition(".")[0]]) if known else None


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _report(table: Table, item: TensorFacts, shift: float) -> TensorReport:
    slopes = {name: table.slope("tensor", item.name, name) for name in ("init", "update", "sensitivity", "effect")}
    block = "*" in item.name
    if block and item.optimizer == "SGD":
        # Its update is its learning rate times the gradient, which goes with depth as the sensitivity does.
        lr = table.slope("tensor", item.name, "lr")
        slopes["update"] = Slope(
            lr.value + slopes["sensitivity"].value - shift,
            (
                lr.interval[0] + slopes["sensitivity"].interval[0] - shift,
                lr.interval[1] + slopes["sensitivity"].interval[1] - shift,
            ),
        )
    expected = {"init": 0.0, "update": 0.0, "sensitivity": shift}
    if block:
        own = slopes["sensitivity"].value - shift
        branch = own + _or_zero(slopes["init"].value)
        nearest = min(max(branch, BRANCH[0]), BRANCH[1])
        if branch > BRANCH[1] + TIGHT:
            # No multiplier, or too weak a one: the learning rate says which alpha was meant.
            nearest = min(max(SUM - _or_zero(slopes["update"].value), BRANCH[0]), BRANCH[1])
        expected = {"init": 0.0, "update": SUM - own, "sensitivity": nearest - _or_zero(slopes["init"].value) + shift}
        if not BRANCH[0] - TIGHT <= branch <= BRANCH[1] + TIGHT:
            expected["update"] = SUM - (expected["sensitivity"] - shift)
    shape = item.shapes[max(item.shapes)]
    return TensorReport(item.name, shape, int(block), expected=expected, **slopes)


def _block(table: Table, item: TensorFacts, report: TensorReport, shift: float, depth: int) -> list[Culprit]:
    """A block's tensor: its branch first, then its update."""
    gain, update = (getattr(report, name).off(report.expected[name]) for name in ("sensitivity", "update"))
    init = _or_zero(report.init.value)
    if abs(gain) > TIGHT:
        if abs(init) > TIGHT:
            return [_culprit(report, "init", report.init, 0.0, _INIT)]
        return [_culprit(report, "multiplier", report.sensitivity, report.expected["sensitivity"], _branch_words(report, shift))]
    if not abs(update) > TIGHT:
        return []
    if update < 0 and eps_share(table, item, depth) > EPS_SHARE:
        return [_culprit(report, "eps", report.update, report.expected["update"], _EPS)]
    own = report.sensitivity.value - shift
    words = (
        f"its update goes as depth^{report.update.value:.2f} and the output answers to it as depth^{own:.2f}: together they must go as "
        f"depth^-1, so that all blocks move it by order one; divide its learning rate by (depth / base depth)^{update:.2f}"
    )
    return [_culprit(report, "update", report.update, report.expected["update"], words)]


_INIT = "its init goes with depth, which its branch's multiplier already does: keep it the same at every depth"
_EPS = "eps is above a tenth of its gradient, which falls with depth: multiply eps by the branch's multiplier, or make it smaller"


def _branch_words(report: TensorReport, shift: float) -> str:
    own = report.sensitivity.value - shift
    if own > BRANCH[1]:
        cure = "multiply each residual branch by (depth / base depth)^-1 (completep)"
    else:
        cure = "multiply each residual branch by (depth / base depth)^-1 (completep) and by nothing else that falls with depth"
    return f"the output answers to it as depth^{own:.2f} instead of depth^-1 (at least depth^-0.5): {cure}"


def _outside(report: TensorReport) -> list[Culprit]:
    """A tensor outside the blocks: nothing goes with depth."""
    found = []
    init, update, gain = (getattr(report, name).off(report.expected[name]) for name in ("init", "update", "sensitivity"))
    # In another form init and update are off alike and the sensitivity the other way (Lemma J.1).
    form = -gain if abs(gain) > TIGHT and abs(update + gain) <= TIGHT else 0.0
    if abs(init - form) > TIGHT:
        words = f"its init goes as depth^{report.init.value:.2f}: keep it the same at every depth"
        found.append(_culprit(report, "init", report.init, form, words))
    if abs(update - form) > TIGHT:
        words = f"its update goes as depth^{report.update.value:.2f}: outside the blocks no learning rate changes with depth"
        found.append(_culprit(report, "update", report.update, form, words))
    if not found and abs(gain + form) > TIGHT:
        expected = report.expected["sensitivity"]
        words = f"the output answers to it as depth^{report.sensitivity.value:.2f}: outside the blocks no multiplier changes with depth"
        found.append(_culprit(report, "multiplier", report.sensitivity, expected, words))
    return found


def _culprit(report: TensorReport, statistic: str, slope: Slope, expected: float, words: str) -> Culprit:
    return Culprit(report.name, statistic, slope, expected, words)


def _notes(
    table: Table, reports: Sequence[TensorReport], depths: Sequence[int], undecided: Sequence[str], blind: Sequence[str]
) -> list[str]:
    notes = []
    if is_narrow(depths):
        notes.append("give at least three depths that span a factor of four (four over a factor of eight are better)")
    if not any(item.growing for item in reports):
        notes.append("no tensor's name has a number that counts layers: blocks are found by it (nn.ModuleList, nn.Sequential)")
    if blind:
        notes.append(
            f"the output answers to some layers only, or not at all, of {', '.join(blind[:5])}: is there a residual stream?"
        )
    if undecided:
        notes.append(f"more seeds would decide: {'; '.join(undecided[:5])}")
    alphas = {round(2 * -value) / 2 for item in reports if item.growing and math.isfinite(value := item.sensitivity.value)}
    if alphas == {0.5}:
        notes.append(
            "branches fall as depth^-1/2: the learning rate carries over, but only depth^-1 keeps every block's non-linear part"
        )
    totals = _decay(table, reports)
    if totals:
        notes.append(
            f"lr * weight_decay goes with depth ({', '.join(f'{name}: {value:+.2f}' for name, value in totals.items())}); not judged"
        )
    notes.append(
        "a pass is necessary for transfer over depth, not sufficient: width, batch, horizon and stability are not seen here"
    )
    return notes


def _decay(table: Table, reports: Sequence[TensorReport]) -> Mapping[str, float]:
    """Tensors whose decay a step goes with depth, up to five."""
    totals = {item.name: sum(table.slope("tensor", item.name, name).value for name in ("lr", "weight_decay")) for item in reports}
    return dict([(name, value) for name, value in totals.items() if abs(value) > TIGHT][:5])
