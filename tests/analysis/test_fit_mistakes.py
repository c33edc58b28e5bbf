"""Mistakes that published scaling-law fits and public fitters have made, one test each that this one does not.

docs/scaling-laws.md has the whole list with the tests that stand elsewhere.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize

from analysis.fit import ScalingLawFit, fit, load_fit_table
from analysis.fit_guards import search_flags
from analysis.fit_rollout import roll_out
from analysis.fit_simulation import LARGE, Design, simulate
from analysis.fit_table import FitTable
from scaling.errors import DataError

EPOCH_COLUMNS = {"params": "N", "tokens": "D", "flops": "C"}


@pytest.fixture(scope="module")
def found() -> ScalingLawFit:
    return fit(simulate(Design(50, "huber-log"), np.random.default_rng(3)))


def test_the_list_in_the_docs_names_tests_that_exist() -> None:
    here = Path(__file__).parent
    listed = (here.parents[1] / "docs" / "scaling-laws.md").read_text().split("## Known mistakes")[1].split("## Speed")[0]
    names = set(re.findall(r"`(test_\w+)`", listed))
    written = {
        name for path in here.glob("test_fit*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(names) > 20
    assert names <= written, names - written


def test_what_is_printed_is_precise_enough_to_predict_with(found: ScalingLawFit) -> None:
    """Published constants rounded to two digits have three times the objective of the full ones."""
    value = {name: float(f"{estimate.value:.6g}") for name, estimate in found.params.items()}
    rounded = value["E"] + sum(
        value[level] * LARGE[size] ** -value[exponent]
        for level, size, exponent in (("A", "params", "alpha"), ("B", "tokens", "beta"))
    )
    assert all(f"{number:.6g}" in str(found) for number in value.values())
    assert rounded == pytest.approx(float(found.losses(**LARGE)[0]), rel=2e-5)


def test_a_factor_on_every_parameter_count_moves_no_exponent(found: ScalingLawFit) -> None:
    """Counts that differ by a constant factor (15 % between readings of one paper) change A alone."""
    columns = {**found.table.columns, "params": 1.152 * found.table.columns["params"]}
    scaled = fit(FitTable(columns, found.table.loss)).best_values
    kept = {name: found.best_values[name] for name in ("E", "B", "alpha", "beta")}
    assert {name: scaled[name] for name in kept} == pytest.approx(kept, rel=1e-5)
    assert scaled["A"] == pytest.approx(found.best_values["A"] * 1.152 ** kept["alpha"], rel=1e-5)


def test_a_small_delta_still_ends_in_the_minimum(found: ScalingLawFit) -> None:
    """Fits at delta 1e-4 have been published unconverged, as successes: another method must find nothing lower."""
    small = fit(found.table, delta=1e-4)
    fitted, loss = small.fitted, small.loss

    def objective(theta: np.ndarray) -> float:
        predicted = fitted.law.value(theta[None], fitted.x)[0][0]
        return float(1e4 * np.sum(loss.rho(loss.residual(predicted, fitted.observed))))

    lowest = min(
        minimize(
            objective, fitted.theta + shift, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxfev": 6000}
        ).fun
        for shift in (0.0, 0.01)
    )
    assert small.success
    assert 1e4 * small.objective <= lowest * (1 + 1e-6)


def test_weights_from_standard_errors_do_not_stop_the_search_at_its_start(found: ScalingLawFit) -> None:
    """1 / stderr^2 of a precise table is 1e8: a public fit with such weights returned the point it started from."""
    frame = pd.DataFrame({**found.table.columns, "loss": found.table.loss, "stderr": 1e-4})
    weighted = fit(frame)
    assert weighted.best_values == pytest.approx(found.best_values, rel=1e-5)
    assert weighted.success
    assert any("returned its own start" in flag for flag in search_flags(32, 32, False, 10))
    assert not any("returned its own start" in flag for flag in weighted.flags)


def test_the_document_says_what_is_needed_to_repeat_the_fit(found: ScalingLawFit) -> None:
    """What most of fifty surveyed papers leave out: loss, knee, starts, convention of N and C, rows left out, the data's hash."""
    frame = pd.DataFrame({**found.table.columns, "loss": found.table.loss}).drop(columns="flops")
    document = fit(frame.assign(status=["diverged", *["complete"] * 49])).to_dict()
    assert (document["loss"], document["delta"], document["rows"]) == ("huber-log", 1e-3, 49)
    assert document["starts"]["total"] == 32
    assert document["conventions"] == {"params": "not stated", "flops": "6 x params x tokens"}
    assert any(note.startswith("1 diverged runs dropped") for note in document["notes"])
    assert len(document["sha256"]) == 64
    assert document["spans"]["params"] == [1e8, 1e10]


def test_mixed_schedules_are_counted_and_not_trusted(found: ScalingLawFit) -> None:
    frame = pd.DataFrame({**found.table.columns, "loss": found.table.loss, "schedule": ["cosine"] * 30 + ["constant"] * 20})
    mixed = fit(frame)
    assert any("several LR schedules are fitted together (30 cosine, 20 constant)" in flag for flag in mixed.flags)
    assert not mixed.trusted
    assert not any("schedules" in flag for flag in fit(frame, where=["schedule=cosine"]).flags)


def test_a_better_fit_to_all_rows_is_no_reason_to_choose_a_law(shared_data: Path) -> None:
    """Two parameters more lower the objective on the 240 points by a fifth and predict the largest runs worse."""
    table = load_fit_table(shared_data / "chinchilla_epoch" / "data.csv", EPOCH_COLUMNS, where=["epoch_excluded=0"])
    bent = fit(table, "farseer-like", starts=8)
    assert bent.objective < 0.8 * 0.0010182740
    assert roll_out(table, "farseer-like").error > 1.15 * roll_out(table, "chinchilla").error


def test_a_constant_of_nearly_nothing_is_not_reported_as_a_finding() -> None:
    """Fits of public tables print E of 1e-10 to 1e-41: here it is its bound, with the interval from 0 and no trust."""
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(1e8, 1e10, 5), np.geomspace(1e9, 1e11, 5)))
    loss = (20 * n**-0.1 + 30 * d**-0.12) * np.exp(0.003 * np.random.default_rng(0).standard_normal(25)) - 0.35
    zero = fit(FitTable({"params": n, "tokens": d}, loss))
    assert any("E lies on its lower bound (0)" in flag for flag in zero.flags)
    assert zero.params["E"].interval[0] == 0
    assert not zero.trusted


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    """Research data comes as pickles, and reading one runs what it says."""

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(tmp_path / "run"), "w")

    (tmp_path / "runs.pkl").write_bytes(pickle.dumps({"params": [1.0], "x": Payload()}))
    with pytest.raises(DataError):
        load_fit_table(tmp_path / "runs.pkl")
    assert not (tmp_path / "run").exists()
