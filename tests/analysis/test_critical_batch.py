"""Critical batch from steps to a target: public runs, definitions, censoring, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.batch_plots import draw_steps, steps_info
from analysis.batch_simulation import SCALE_EXPONENT, noise_scale, simulate_steps
from analysis.critical_batch import CriticalBatchFit, fit_critical_batch
from analysis.fit import fit
from scaling.errors import DataError

COLUMNS = {"params": "N_nominal"}


@pytest.fixture(scope="module")
def zhang() -> Path:
    path = Path(__file__).parents[3] / "shared" / "data" / "cbs_zhang" / "data.csv"
    if not path.exists():
        pytest.skip("no public data beside the repository")
    return path


def frame(batches: np.ndarray, params: tuple[float, ...] = (1e8, 3e8, 1e9, 3e9), **more: object) -> pd.DataFrame:
    rows = [(n, b, 0.02 * n**0.55 * (1 + 0.03 * n**0.6 / b)) for n in params for b in batches]
    return pd.DataFrame(rows, columns=["params", "batch_seqs", "steps_to_target"]).assign(**more)


def test_the_authors_definition_gives_the_published_law(zhang: Path) -> None:
    """93.20 N^0.47, N in millions."""
    found = fit(zhang, law="critical-batch", columns=COLUMNS, definition=256)
    assert found.best_values["params_exponent"] == pytest.approx(0.468, abs=0.02)
    assert found.best_values["k"] * 1e6 ** found.best_values["params_exponent"] == pytest.approx(93.20, rel=0.01)
    assert found.trusted


def test_three_definitions_give_three_exponents_on_the_same_runs(zhang: Path) -> None:
    found = fit_critical_batch(zhang, "least-squares-log", columns=COLUMNS, definition=256)
    exponents = [laws[("params",)].exponents["params"].value for laws in found.laws.values()]
    assert exponents == pytest.approx([0.463, 0.564, 0.610], abs=0.002)
    scales = [curve.noise_scale.value for curve in found.curves]
    assert scales == pytest.approx([2235, 3303, 5433, 7907, 11140], rel=0.001)


def test_the_definition_stands_beside_every_number() -> None:
    found = fit_critical_batch(simulate_steps(np.random.default_rng(0)), definition=256)
    words = "20 % over linear scaling from B = 256 sequences"
    assert words in str(found)
    assert words in str(found.predict(params=1e9))
    document = found.to_dict()
    assert document["definition"] == words
    assert all(law["definition"] == name for name, laws in document["laws"].items() for law in laws.values())
    assert found.predict(params=1e9).to_dict()["definition"] == words


def test_a_known_law_is_recovered_and_its_intervals_hold_it() -> None:
    """Of eight tables 90 % intervals hold the truth in all but a few: fewer than five is a chance in 2,000."""
    held = 0
    for seed in range(8):
        found = fit_critical_batch(
            simulate_steps(np.random.default_rng(seed), noise=0.02), "least-squares-log", definition="noise-scale"
        )
        assert found.best_values["params_exponent"] == pytest.approx(SCALE_EXPONENT, abs=0.05)
        low, high = found.intervals["params_exponent"]
        held += low < SCALE_EXPONENT < high
    assert held >= 5
    assert found.predict(params=5e8).batch.value == pytest.approx(float(noise_scale(np.array(5e8))), rel=0.05)


def test_a_critical_batch_above_the_largest_is_a_bound_and_not_in_the_law() -> None:
    table = frame(2.0 ** np.arange(6, 14))
    table = table[(table["params"] < 3e9) | (table["batch_seqs"] <= 1024)]
    found = fit_critical_batch(table, "least-squares-log", definition="noise-scale")
    largest = found.curves[-1]
    assert largest.critical["noise scale B_n"].value == 1024
    assert largest.critical["noise scale B_n"].interval[1] == np.inf
    assert any("not extrapolated" in flag for flag in found.flags)
    assert found.laws["noise scale B_n"][("params",)].points == 3
    assert not found.trusted


def test_collinear_sizes_each_stand_alone() -> None:
    table = frame(2.0 ** np.arange(6, 15))
    found = fit_critical_batch(table.assign(tokens=20 * table["params"]))
    assert set(found.laws[found.definition]) == {("params",), ("tokens",)}
    assert any("collinear" in flag and "refused" in flag for flag in found.flags)


def test_one_size_has_no_exponent() -> None:
    found = fit_critical_batch(frame(2.0 ** np.arange(6, 15), (1e8,)))
    assert found.params == {}
    assert any("one level of params: its exponent is refused" in flag for flag in found.flags)
    with pytest.raises(DataError, match="no law of sizes was fitted"):
        found.predict()


def test_runs_that_never_reached_the_target_are_counted() -> None:
    table = frame(2.0 ** np.arange(6, 15))
    table.loc[3, "steps_to_target"] = np.nan
    found = fit_critical_batch(table)
    assert any("1 rows without steps: they never reached the target" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"target_loss": [3.0, 3.1] * 18}, {}, "several target losses"),
        ({}, {"definition": "largest"}, "choose from: smallest, noise-scale"),
        ({}, {"overhead": -1}, "is not a positive number"),
        ({}, {"defintion": 256}, "nearest: definition"),
        ({"batch_tokens": 1.0}, {}, "both name the batch"),
    ],
)
def test_wrong_use_names_the_cure(change: dict[str, object], options: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit_critical_batch(frame(2.0 ** np.arange(6, 15), **change), **options)


def test_two_batches_are_too_few() -> None:
    with pytest.raises(DataError, match="3 are needed"):
        fit_critical_batch(frame(np.array([64.0, 128.0])))


def test_the_plot_marks_every_critical_batch() -> None:
    from matplotlib.figure import Figure

    found: CriticalBatchFit = fit_critical_batch(simulate_steps(np.random.default_rng(0)))
    ax = draw_steps(Figure().subplots(), steps_info(found), found.definition, found.unit)
    assert ax.get_xlabel() == "batch (sequences)"
    assert sum(line.get_marker() == "D" for line in ax.lines) == len(found.curves) + 1
    assert found.definition in ax.get_title(loc="left")
