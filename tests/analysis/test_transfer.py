"""Verdicts: measured tables, a public table, errors by simulation, censored cells, and the words and JSON around them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.optimum import cell_optima
from analysis.simulation import TRUTHS, Design, simulate, verdict_rates
from analysis.table import RunTable, load_table
from analysis.transfer import TransferFit, transfer
from scaling.errors import DataError
from tests.analysis.proxy_tables import proxy_frame

GEMSTONES = Path(__file__).parents[3] / "shared/data/gemstones_mup_lr_preflight/data.csv"


@pytest.fixture(scope="module")
def measured() -> dict[str, TransferFit]:
    return transfer(load_table(proxy_frame()))


def simulated(slope: float, seed: int = 0, **design: object) -> RunTable:
    chosen = Design(**{"noise": 0.003, **design})  # type: ignore[arg-type]
    optima = 2.5 + slope * (np.log2(chosen.widths) - np.log2(chosen.widths).mean())
    return simulate(TRUTHS["smooth .4"], list(optima), chosen, np.random.default_rng(seed))


def test_measured_sp_drifts(measured: dict[str, TransferFit]) -> None:
    fit = measured["sp"]
    assert fit.verdict == "drifts"
    assert -1.3 < fit.slope.interval[0] < fit.slope.value < fit.slope.interval[1] < -0.6
    assert fit.regret.value == pytest.approx(0.5, abs=0.1)
    assert fit.sentence().startswith("sp: the best learning rate drifts with width across widths 32 to 256: by -0.8")


def test_measured_mup_hardly_drifts(measured: dict[str, TransferFit]) -> None:
    """Its optimum moves by about -0.15 an octave, so near the tolerance that one seed cannot quite exclude it."""
    fit = measured["mup"]
    assert fit.verdict in ("transfers", "inconclusive")
    assert -0.35 < fit.slope.interval[0] < -0.15 < fit.slope.interval[1] < 0.1
    assert fit.regret.relative < 0.01
    assert transfer(load_table(proxy_frame()), slope_tolerance=0.4, regret_tolerance=0.03)["mup"].verdict == "transfers"


def test_public_table_does_not_transfer() -> None:
    if not GEMSTONES.exists():
        pytest.skip("no public data beside the repository")
    fit = transfer(load_table(GEMSTONES, {"lr": "base_lr"}))["unknown"]
    assert fit.verdict == "drifts"
    assert "the best learning rate does not transfer across widths 256 to 3072" in fit.sentence()
    assert fit.slope.value < -0.5
    assert fit.regret.interval[0] > 0.5
    assert any("depth changes" in note for note in fit.notes)


def test_a_flat_optimum_transfers_and_a_moving_one_drifts() -> None:
    flat = transfer(simulated(0.0))["mup"]
    assert flat.verdict == "transfers"
    assert "it stays at 2^-7.5" in flat.sentence()
    assert flat.regret.interval[0] >= 0.0
    assert transfer(simulated(-1.0))["mup"].verdict == "drifts"
    assert transfer(simulated(1.0))["mup"].verdict == "drifts"


def test_tolerances_decide() -> None:
    table = simulated(-0.5, widths=(32, 64, 128, 256))
    assert transfer(table)["mup"].verdict == "drifts"
    assert transfer(table, slope_tolerance=1.0, regret_tolerance=0.5)["mup"].verdict == "transfers"
    costly = transfer(table, slope_tolerance=1.0)["mup"]
    assert costly.verdict == "drifts"
    assert "and 1 % is tolerated" in costly.reasons[0]


def test_two_widths_are_never_enough() -> None:
    fit = transfer(simulated(0.0, widths=(32, 64)))["mup"]
    assert fit.verdict == "inconclusive"
    assert any("at least 3" in reason for reason in fit.reasons)
    assert any("1 more width" in reason for reason in fit.reasons)


def test_a_censored_width_is_an_inequality_and_forbids_transfers() -> None:
    table = simulated(0.0, widths=(32, 64, 128, 256))
    frame = table.frame[(table.frame["width"] < 256) | (table.frame["log2_lr"] > -7.5)]
    fit = transfer(load_table(frame))["mup"]
    assert fit.optima[-1].censored == "low"
    assert fit.verdict != "transfers"
    assert math.isnan(fit.regret.value)
    assert any("width 256" in reason and "not interior" in reason for reason in fit.reasons)
    assert any("between 2^-9 and 2^-7 at width 256" in reason for reason in fit.reasons)
    dropped = transfer(load_table(frame[frame["width"] < 256]))["mup"]
    assert fit.slope.interval[0] >= dropped.slope.interval[0] - 0.3
    assert fit.slope.interval[1] <= dropped.slope.interval[1] + 0.05


def test_divergence_at_the_transferred_rate_costs_infinitely_much() -> None:
    frame = simulated(-1.0).frame
    lost = (frame["width"] == 128) & (frame["log2_lr"] > -7.5)
    fit = transfer(load_table(frame.assign(loss=frame["loss"].mask(lost))))["mup"]
    assert fit.regret.value == math.inf
    assert "diverges" in fit.sentence()
    assert fit.to_dict()["regret"]["value"] is None


def test_reference_and_axis(measured: dict[str, TransferFit]) -> None:
    table = load_table(proxy_frame())
    fit = transfer(table, reference=128)["sp"]
    assert fit.regret.reference == 128
    assert fit.regret.value < measured["sp"].regret.value
    assert fit.regret.log2_lr == measured["sp"].optima[2].log2_lr
    with pytest.raises(DataError, match="one of 32, 64, 128, 256"):
        transfer(table, reference=48)
    with pytest.raises(DataError, match="width, depth, batch_tokens, tokens"):
        transfer(table, axis="height")
    deep = load_table(proxy_frame().rename(columns={"width": "depth"}).assign(width=64))
    assert transfer(deep, axis="depth")["sp"].verdict == "drifts"


def test_other_dimensions_are_held_fixed() -> None:
    shallow, deep = simulated(0.0).frame.assign(depth=2), simulated(-1.0, seed=1).frame.assign(depth=8)
    table = load_table(pd.concat([shallow, deep[deep["width"] < 100]], ignore_index=True))
    fit = transfer(table)["mup"]
    assert [item.cell.depth for item in fit.optima] == [2, 2, 2]
    assert fit.verdict == "transfers"
    assert any("judged at depth 2; 2 cells" in note for note in fit.notes)


def test_cost_of_a_wrong_rate(measured: dict[str, TransferFit]) -> None:
    fit = measured["mup"]
    assert 0.02 < fit.cost_at(64, -1.0) < fit.cost_at(64, 1.0) < 0.15
    assert math.isnan(fit.cost_at(64, 9.0))
    assert math.isnan(fit.cost_at(48, 1.0))


def test_json_text_and_html(measured: dict[str, TransferFit]) -> None:
    fit = measured["mup"]
    document = json.loads(json.dumps(fit.to_dict(), allow_nan=False))
    assert {"verdict", "slope", "regret", "optima"} <= set(document)
    assert document["optima"][0]["width"] == 32
    assert set(document["optima"][0]) >= {"width", "log2_lr", "interval", "censored", "best_loss", "plateaus"}
    assert document["slope"]["interval"][0] < document["slope"]["value"] < document["slope"]["interval"][1]
    lines = str(fit).splitlines()
    assert lines[0] == fit.sentence()
    assert any(line.split()[:2] == ["32", f"{fit.optima[0].log2_lr:.2f}"] for line in lines)
    assert "noise of a run" in str(fit)
    html = fit._repr_html_()
    assert html.count("<tr>") == 5
    assert "<b>mup:" in html


def test_verdicts_are_deterministic() -> None:
    table = simulated(0.1)
    assert transfer(table)["mup"].to_dict() == transfer(table)["mup"].to_dict()
    assert [item.log2_lr for item in cell_optima(table)] == [item.log2_lr for item in transfer(table)["mup"].optima]


@pytest.mark.slow
@pytest.mark.parametrize(("slope", "wrong"), [(0.0, "drifts"), (0.25, "transfers"), (-1.0, "transfers")])
def test_wrong_verdicts_are_rare(slope: float, wrong: str) -> None:
    rates = verdict_rates(Design(noise=0.01), slope, 13, seed=7)
    assert getattr(rates, wrong) <= 1 / 13
    assert rates.slope_covered >= 0.84
    if slope == -1.0:
        assert rates.drifts >= 0.9
