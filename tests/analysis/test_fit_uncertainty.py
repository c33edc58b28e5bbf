"""Intervals, bootstraps, and the choice between laws by what they predict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm as normal
from scipy.stats import t as student

from analysis.fit import fit, load_fit_table
from analysis.fit_left_out import hull_distances
from analysis.fit_rollout import compare_laws, roll_out
from analysis.fit_simulation import Design, coverage, simulate
from analysis.fit_table import FitTable
from analysis.fit_uncertainty import WEBB
from scaling.errors import DataError


@pytest.mark.parametrize(("runs", "loss"), [(9, "least-squares-log"), (9, "huber-log"), (16, "least-squares-log")])
def test_intervals_hold_the_truth_as_often_as_they_say(runs: int, loss: str) -> None:
    """A short form of `python -m analysis.fit_simulation`; 7 x 20 intervals of 90 %, which go together within a table."""
    measured = coverage(Design(runs, loss), 20, seed=5)
    assert 80 <= np.mean(measured.held) <= 98
    assert min(measured.held) >= 70


def test_a_profile_of_a_linear_law_is_the_t_interval() -> None:
    """A power law is a line in logs: least squares has an exact answer."""
    random = np.random.default_rng(0)
    n = np.geomspace(1e7, 1e10, 12)
    loss = 30 * n**-0.1 * np.exp(0.01 * random.standard_normal(12))
    found = fit(FitTable({"params": n}, loss), "power", loss="least-squares-log").params["alpha"]
    x, y = np.log(n) - np.log(n).mean(), np.log(loss)
    slope = x @ y / (x @ x)
    spread = np.sqrt(np.sum((y - y.mean() - slope * x) ** 2) / 10 / (x @ x))
    reach = 1.8124611228107335  # Student's t, 10 degrees of freedom, 95 %
    assert found.value == pytest.approx(-slope, rel=1e-7)
    assert found.stderr == pytest.approx(spread, rel=1e-6)
    assert found.interval == pytest.approx((-slope - reach * spread, -slope + reach * spread), rel=1e-4)


def test_the_quantile_counts_how_well_a_losss_unit_is_known() -> None:
    """n - p degrees of freedom for squares; for L1, whose unit grows with the noise and not its square, four times as many."""
    table = simulate(Design(9, "l1-log"), np.random.default_rng(0))
    assert fit(table, loss="least-squares-log", starts=4).fitted.quantile(0.9) == pytest.approx(student.ppf(0.95, 4), rel=1e-6)
    assert fit(table, loss="l1-log", starts=4).fitted.quantile(0.9) == pytest.approx(student.ppf(0.95, 16), rel=1e-3)
    between = fit(table, loss="huber-log", delta=0.004, starts=4).fitted.quantile(0.9)
    assert student.ppf(0.95, 16) < between < student.ppf(0.95, 4)


def test_heavy_tails_are_no_part_of_the_noise_near_the_law() -> None:
    """With normal noise both estimates agree; outliers that a robust fit ignores raise only the one that single runs scatter by."""
    random = np.random.default_rng(3)
    exact = simulate(Design(50, "huber-log", noise=0.0), random)
    scatter = 0.005 * random.permutation(normal.ppf((np.arange(50) + 0.5) / 50))
    plain = fit(FitTable(exact.columns, exact.loss * np.exp(scatter)), starts=8).fitted
    hit = np.arange(50) % 10 == 3
    spoiled = fit(FitTable(exact.columns, exact.loss * np.exp(scatter + 0.05 * hit)), starts=8).fitted
    assert plain.near_noise() == pytest.approx(plain.noise(), rel=0.05)
    assert spoiled.near_noise() < 1.4 * plain.near_noise()
    assert spoiled.noise() > 1.8 * plain.noise()


def test_uneven_noise_widens_the_intervals() -> None:
    """Ten times the noise at the largest token counts: the curvature alone would not see it."""
    random = np.random.default_rng(1)
    table = simulate(Design(50, "least-squares-log"), random)
    even = fit(table, loss="least-squares-log")
    loud = table.columns["tokens"] > 1e11
    uneven = FitTable(table.columns, table.loss * np.exp(np.where(loud, 0.05, 0.0) * random.standard_normal(50)))
    found = fit(uneven, loss="least-squares-log")
    assert any("the scatter is uneven" in note for note in found.notes)
    assert not any("the scatter is uneven" in note for note in even.notes)


@pytest.mark.parametrize("kind", ["pairs", "residuals", "wild"])
def test_bootstraps_agree_with_the_curvature_on_even_noise(kind: str) -> None:
    found = fit(simulate(Design(50, "least-squares-log"), np.random.default_rng(4)), loss="least-squares-log")
    draws = found.bootstrap(kind, 300)  # type: ignore[arg-type]
    assert draws.failed <= 3
    assert draws.stderr["beta"] == pytest.approx(found.stderr["beta"], rel=0.3)


def test_a_group_bootstrap_sees_what_its_groups_share() -> None:
    """Sizes that are off as a whole: resampling rows misses it, resampling sizes does not."""
    random = np.random.default_rng(0)
    table = simulate(Design(50, "least-squares-log", noise=0.001), random)
    levels, member = np.unique(table.columns["params"], return_inverse=True)
    shared = FitTable(table.columns, table.loss * np.exp(0.01 * random.standard_normal(len(levels)))[member])
    found = fit(shared, loss="least-squares-log")
    rows, groups = found.bootstrap("pairs", 300), found.bootstrap("groups", 300, by="params")
    assert groups.stderr["alpha"] > 1.3 * rows.stderr["alpha"]
    wild = found.bootstrap("wild", 300, by="params")
    assert wild.stderr["alpha"] > 1.3 * found.bootstrap("wild", 300).stderr["alpha"]
    assert wild.kind == "wild of 5 levels of params"
    jitter = {**shared.columns, "params": shared.columns["params"] * np.exp(0.001 * random.standard_normal(50))}
    assert fit(FitTable(jitter, shared.loss)).bootstrap("groups", 10, by="params").kind == "groups of 5 levels of params"


def test_a_wild_bootstrap_keeps_each_rows_own_noise() -> None:
    """Ten times the noise at the largest token counts: residuals that change places spread it over all rows."""
    random = np.random.default_rng(1)
    table = simulate(Design(50, "least-squares-log", noise=0.002), random)
    loud = table.columns["tokens"] > 7e10
    uneven = FitTable(table.columns, table.loss * np.exp(np.where(loud, 0.02, 0.0) * random.standard_normal(50)))
    found = fit(uneven, loss="least-squares-log")
    pairs, wild, residuals = (found.bootstrap(kind, 400).stderr["E"] for kind in ("pairs", "wild", "residuals"))
    assert wild == pytest.approx(pairs, rel=0.15)
    assert wild > 1.25 * residuals


def test_webbs_weights_have_the_moments_of_a_sign() -> None:
    assert WEBB.mean() == pytest.approx(0)
    assert WEBB.var() == pytest.approx(1)


def test_groups_must_be_named() -> None:
    found = fit(simulate(Design(16, "huber-log"), np.random.default_rng(0)))
    with pytest.raises(DataError, match="has no column group"):
        found.bootstrap("groups", 10)


def test_the_law_that_made_the_runs_wins_the_roll_out() -> None:
    table = simulate(Design(50, "huber-log", noise=0.002), np.random.default_rng(0))
    names = ["chinchilla", "power-constant", "power-flops", "kaplan"]
    comparison = compare_laws(table, names)
    assert comparison.best == "chinchilla"
    assert [score.error for score in comparison.scores] == sorted(score.error for score in comparison.scores)


def test_a_roll_out_predicts_what_it_did_not_fit() -> None:
    table = simulate(Design(50, "huber-log"), np.random.default_rng(0))
    score = roll_out(table, "chinchilla")
    assert len(score.cuts) == 4
    for cut in score.cuts:
        assert cut.fitted + cut.predicted == 50
        assert cut.fitted == int((table.columns["flops"] <= cut.size).sum())
    spoiled = FitTable(table.columns, np.where(table.columns["flops"] > score.cuts[-1].size, 2 * table.loss, table.loss))
    assert roll_out(spoiled, "chinchilla").cuts[-1].mean_error > 0.5


def test_the_better_of_two_laws_is_told_from_chance_by_a_paired_bootstrap() -> None:
    """Both laws miss the same large runs; what counts is the gap, which is surer than either score."""
    table = simulate(Design(50, "huber-log", noise=0.002), np.random.default_rng(0))
    best, close, worse = compare_laws(table, ["chinchilla", "coupled", "power-flops"]).scores
    assert best.interval[0] < best.error < best.interval[1]
    assert worse.law == "power-flops"
    assert worse.behind[0] > 0
    assert worse.better == 0
    assert np.ptp(close.behind) < np.ptp(close.interval)
    assert "behind the best by" in str(compare_laws(table, ["chinchilla", "power-flops"]))


def test_few_large_sizes_give_a_score_no_interval() -> None:
    table = simulate(Design(16, "huber-log", noise=0.002), np.random.default_rng(0))
    assert all(np.isnan(score.interval[0]) for score in compare_laws(table, ["chinchilla", "power-flops"]).scores)


def test_a_size_left_out_is_predicted_from_the_others() -> None:
    """What is said of a level must not have seen it: its losses doubled, its error is log 2 more, and the law stays."""
    table = simulate(Design(50, "huber-log"), np.random.default_rng(0))
    largest = table.columns["params"] == table.columns["params"].max()
    plain = fit(table).leave_out("params")
    spoiled = fit(FitTable(table.columns, np.where(largest, 2 * table.loss, table.loss))).leave_out("params")
    assert [level.rows for level in plain.levels] == [10] * 5
    assert plain.levels[-1].mean_error < 0.02
    assert spoiled.levels[-1].mean_error == pytest.approx(np.log(2), abs=0.02)
    assert spoiled.levels[-1].mean_error > spoiled.levels[-1].fitted_error


def test_left_out_errors_are_told_by_distance_from_the_other_runs() -> None:
    found = fit(simulate(Design(50, "huber-log"), np.random.default_rng(0))).leave_out("params")
    middle, edges = found.levels[1:-1], (found.levels[0], found.levels[-1])
    assert all(level.distance == 0 for level in middle)
    assert all(level.distance == pytest.approx(0.5, abs=1e-6) for level in edges)
    assert [(above, rows) for above, _, rows, _ in found.by_distance()] == [(0.0, 30), (0.3, 20)]
    assert found.error > found.fitted_error


def test_distances_are_from_the_convex_hull() -> None:
    square = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    points = np.array([[0.5, 0.5], [2.0, 0.5], [2.0, 2.0], [0.0, 1.0]])
    assert hull_distances(points, square) == pytest.approx([0, 1, np.sqrt(2), 0], abs=1e-6)
    assert hull_distances(points[:1], np.array([[0.0, 0.0], [1.0, 0.0]])) == pytest.approx([0.5], abs=1e-6)


def test_a_size_that_cannot_be_left_out_is_refused() -> None:
    found = fit(simulate(Design(16, "huber-log"), np.random.default_rng(0)))
    with pytest.raises(DataError, match="choose from: params, tokens, flops"):
        found.leave_out("width")


def test_auto_chooses_by_the_roll_out() -> None:
    table = simulate(Design(16, "huber-log", noise=0.002), np.random.default_rng(0))
    found = fit(table, "auto")
    assert found.comparison is not None
    assert found.law.name == found.comparison.best == found.comparison.scores[0].law
    assert "error on larger runs" in str(found)


def test_epochs_large_runs_are_predicted_from_small_ones(shared_data: Path) -> None:
    """Below 1e20 FLOP to the 36 runs above 9e20: 1.37 % on average, 4.1 % at most."""
    columns = {"params": "N", "tokens": "D", "flops": "C"}
    table = load_fit_table(shared_data / "chinchilla_epoch" / "data.csv", columns, where=["epoch_excluded=0"])
    small, large = table.rows(table.columns["flops"] < 1e20), table.rows(table.columns["flops"] > 9e20)
    found = fit(small)
    errors = np.abs(found.losses(params=large.columns["params"], tokens=large.columns["tokens"]) / large.loss - 1)
    assert len(large) == 36
    assert 100 * errors.mean() == pytest.approx(1.37, abs=0.02)
    assert 100 * errors.max() == pytest.approx(4.1, abs=0.06)
