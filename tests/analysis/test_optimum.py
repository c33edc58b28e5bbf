"""The optimum of a cell: recovery, censoring, divergences, seeds, and the coverage of its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.noise import NoiseEstimate
from analysis.optimum import CellOptimum, cell_optima, fit_cell
from analysis.shapes import library
from analysis.simulation import TRUTHS, Design, coverage, simulate
from analysis.table import load_table

RATES = np.arange(-10.0, -4.0)
KNOWN = NoiseEstimate(0.003, 30.0, "given")


def fit(optimum: float, rates: np.ndarray = RATES, truth: str = "smooth .4", **options: object) -> CellOptimum:
    random = np.random.default_rng(0)
    loss = 2.0 + TRUTHS[truth](rates - optimum) + 0.003 * random.standard_normal(len(rates))
    return fit_cell(rates, loss, **{"noise": KNOWN, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("truth", TRUTHS)
def test_an_interior_optimum_is_found(truth: str) -> None:
    found = fit(-7.3, truth=truth)
    assert found.usable
    assert found.log2_lr == pytest.approx(-7.3, abs=0.25)
    assert found.interval[0] < found.log2_lr < found.interval[1]
    assert found.interval[1] - found.interval[0] < 1.2
    assert found.best_loss == pytest.approx(2.0, abs=0.02)
    assert found.best_loss_interval[0] < found.best_loss < found.best_loss_interval[1]
    low, high = found.plateaus[0.0025]
    assert low < found.plateaus[0.001][0] < found.log2_lr < found.plateaus[0.001][1] < high


def test_curvature_and_plateau_of_a_quadratic() -> None:
    found = fit_cell(RATES, 2.0 + 0.04 * (RATES + 7.5) ** 2, noise=NoiseEstimate(0.001, 100.0, "given"))
    assert found.curvature == pytest.approx(0.08, rel=0.15)
    reach = math.sqrt(0.0025 * 2.0 / 0.04)
    assert found.plateaus[0.0025] == pytest.approx((-7.5 - reach, -7.5 + reach), abs=0.06)


@pytest.mark.parametrize(("optimum", "side", "edge"), [(-11.0, "low", -10.0), (-4.0, "high", -5.0)])
def test_an_optimum_beyond_the_edge_is_censored_and_not_extrapolated(optimum: float, side: str, edge: float) -> None:
    found = fit(optimum, truth="quadratic")
    assert found.censored == side
    assert found.log2_lr == edge
    assert math.isinf(found.interval[0 if side == "low" else 1])
    assert math.isnan(found.curvature)
    assert any("sample" in flag for flag in found.flags)
    assert found.to_dict()["interval"][0 if side == "low" else 1] is None


def test_a_divergence_above_the_best_makes_it_interior() -> None:
    falling = 2.0 + 0.04 * (RATES + 4.8) ** 2
    assert fit_cell(RATES, falling).censored == "high"
    found = fit_cell(np.append(RATES, -4.0), np.append(falling, np.nan))
    assert found.usable
    assert -6.0 < found.log2_lr < -4.0
    assert found.interval[1] <= -4.0
    assert found.n_diverged == 1
    assert found.rise_at(-4.0)[0] == math.inf


def test_a_finite_loss_far_up_counts_as_a_wall() -> None:
    loss = 2.0 + TRUTHS["smooth .4"](RATES + 7.3)
    loss[-1] = 9.0
    found = fit_cell(RATES, loss, noise=KNOWN)
    assert found.n_points == 5
    assert found.log2_lr == pytest.approx(-7.3, abs=0.25)


def test_noise_without_a_minimum_is_unresolved() -> None:
    loss = 2.0 + np.array([0.01, -0.008, 0.004, -0.006, 0.003, -0.002])
    found = fit_cell(RATES, loss, noise=NoiseEstimate(0.05, 50.0, "given"))
    assert not found.usable or not all(map(math.isfinite, found.interval))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_points_never_give_a_curve(count: int) -> None:
    loss = np.full(6, np.nan)
    loss[:count] = [2.0, 1.9][:count]
    found = fit_cell(RATES, loss)
    assert found.curve is None
    assert math.isnan(found.curvature)
    assert all(math.isnan(end) for end in found.best_loss_interval)
    assert found.flags


def test_a_bracket_without_a_curve() -> None:
    found = fit_cell([-13.3, -11.0, -10.0, -7.6], [3.647, 3.351, 4.228, 7.76])
    assert found.log2_lr == -11.0
    assert found.interval == (-13.3, -10.0)
    assert "bracketed" in " ".join(found.flags)


def test_a_level_of_a_seed_does_not_move_the_optimum() -> None:
    random = np.random.default_rng(1)
    rates, seeds = np.tile(RATES, 3), np.repeat([0, 1, 2], 6)
    loss = 2.0 + TRUTHS["smooth .4"](rates + 7.4) + 0.004 * random.standard_normal(18)
    plain = fit_cell(rates, loss, seeds, noise=KNOWN)
    shifted = fit_cell(rates, loss + np.array([0.0, 0.4, -0.3])[seeds], seeds, noise=KNOWN)
    assert plain.log2_lr == pytest.approx(shifted.log2_lr, abs=0.02)
    assert shifted.interval[1] - shifted.interval[0] < 0.8
    assert shifted.best_loss_interval[1] - shifted.best_loss_interval[0] > 0.3


def test_seeds_of_their_own_for_every_run_still_give_a_fit() -> None:
    loss = 2.0 + TRUTHS["smooth .4"](RATES + 7.4)
    assert fit_cell(RATES, loss, np.arange(6), noise=KNOWN).log2_lr == pytest.approx(-7.4, abs=0.25)


def test_seeds_only_near_the_bottom() -> None:
    random = np.random.default_rng(2)
    rates = np.concatenate([RATES, [-8.0, -7.0, -6.0]])
    loss = 2.0 + TRUTHS["smooth .4"](rates + 7.4) + 0.003 * random.standard_normal(9) + np.repeat([0.0, 0.3], [6, 3])
    found = fit_cell(rates, loss, np.repeat([0, 1], [6, 3]))
    assert found.n_seeds == 2
    assert found.log2_lr == pytest.approx(-7.4, abs=0.3)


def test_more_seeds_and_less_noise_narrow_the_interval() -> None:
    def width(noise: float, seeds: int) -> float:
        table = simulate(TRUTHS["smooth .4"], [2.4, 2.5, 2.6], Design(noise=noise, seeds=seeds), np.random.default_rng(3))
        return float(np.mean([2 * item.half_width for item in cell_optima(table)]))

    assert width(0.02, 5) < 0.8 * width(0.02, 1)
    assert width(0.002, 3) < 0.8 * width(0.02, 3)


def test_noise_is_found_from_replicates() -> None:
    table = simulate(TRUTHS["smooth .4"], [2.4, 2.5, 2.6], Design(noise=0.01, seeds=4), np.random.default_rng(4))
    for item in cell_optima(table):
        assert item.noise is not None
        assert item.noise.sd == pytest.approx(0.01, rel=0.5)
        assert item.noise.df > 5
        assert "replicate" in item.noise.source


def test_fits_are_deterministic_and_do_not_depend_on_the_order_of_runs() -> None:
    table = simulate(TRUTHS["wall"], [2.4, 2.5, 2.6], Design(seeds=2), np.random.default_rng(5))
    first, again = cell_optima(table), cell_optima(load_table(table.frame.sample(frac=1.0, random_state=0)))
    assert first == cell_optima(table)
    assert [item.log2_lr for item in first] == pytest.approx([item.log2_lr for item in again])
    assert [item.interval for item in first] == [pytest.approx(item.interval) for item in again]


def test_every_shape_has_its_minimum_at_zero() -> None:
    u = np.linspace(-3.0, 3.0, 601)
    for shape in library()[0]:
        values = shape(u)
        assert abs(u[values.argmin()]) < 0.011
        assert values.min() == pytest.approx(0.0, abs=1e-6)
        assert np.all(np.diff(values[u >= 0.02]) > 0)
        assert np.all(np.diff(values[u <= -0.02]) < 0)
    assert np.exp(library()[1]).sum() == pytest.approx(1.0)


@pytest.mark.slow
def test_ninety_percent_intervals_hold_the_truth() -> None:
    designs = [Design(noise=0.005), Design(noise=0.015), Design(points=7, spacing=0.5, noise=0.01), Design(seeds=3, noise=0.01)]
    results = [coverage(design, 2, seed=11) for design in designs]
    for design, result in zip(designs, results, strict=True):
        assert result.share >= 0.84, f"{design}: {result}"
        assert np.median(result.widths) < 0.8, f"{design}: {result}"
    assert 0.87 <= np.mean([result.share for result in results]) <= 0.98
