"""What small sizes say of large ones: order of choices, sensitivity, where runs diverge."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from analysis.across_sizes import AcrossSizes
from analysis.frontier import fit_frontier
from analysis.table import load_table
from analysis.transfer import transfer

LOG2_LRS = np.arange(-10.0, -1.0)
WIDTHS = (64, 128, 256, 512)


def rows(moves: float = 0.0, diverges_at: float = 99.0, falls: float = 0.0, seeds: int = 1, noise: float = 0.003) -> pd.DataFrame:
    """Parabolas about 2^-6.25 that move by `moves` octaves a doubling; runs diverge from 2^diverges_at on, by `falls` lower a doubling."""
    random = np.random.default_rng(0)
    table = []
    for doublings, width in enumerate(WIDTHS):
        for log2_lr in LOG2_LRS:
            for seed in range(seeds):
                u = log2_lr + 6.25 - moves * doublings
                lost = log2_lr >= diverges_at + falls * doublings
                loss = math.nan if lost else 3 - 0.1 * doublings + 0.02 * u**2 + noise * random.standard_normal()
                table.append(("mup", width, 2.0**log2_lr, loss, seed, "diverged" if lost else "complete"))
    return pd.DataFrame(table, columns=["parametrization", "width", "lr", "loss", "seed", "status"])


def across(**made: float) -> AcrossSizes:
    found = transfer(load_table(rows(**made)))["mup"].across  # type: ignore[arg-type]
    assert found is not None
    return found


def test_sizes_that_agree_order_all_pairs_alike() -> None:
    found = across(seeds=2)
    assert [item.size for item in found.rankings] == [64, 128, 256]
    assert all(item.target == 512 and item.choices == len(LOG2_LRS) for item in found.rankings)
    assert all(item.accuracy > 0.95 and item.correlation > 0.8 for item in found.rankings)


def test_a_moving_optimum_orders_fewer_pairs_the_further_away_the_size_is() -> None:
    accuracies = [item.accuracy for item in across(moves=-1.0).rankings]
    assert accuracies == sorted(accuracies)
    assert accuracies[0] < 0.7


def test_pairs_within_the_noise_of_the_target_do_not_count() -> None:
    item = across(noise=0.03).rankings[0]
    assert item.pairs < math.comb(len(LOG2_LRS), 2)
    assert item.interval[0] <= item.accuracy <= item.interval[1]


def test_diverged_runs_are_the_worst_choice_and_equal_to_each_other() -> None:
    item = across(diverges_at=-3.0).rankings[0]
    assert item.choices == len(LOG2_LRS)
    assert item.pairs <= math.comb(len(LOG2_LRS), 2) - 1
    assert item.accuracy > 0.95


def test_sensitivity_is_the_mean_rise_over_the_shared_learning_rates() -> None:
    found = across().sensitivity
    assert found.log2_lrs == (-10, -2)
    u = np.linspace(-3.75, 4.25, 9)
    exact = float(np.trapezoid(0.02 * u**2, u) / 8)
    assert found.rises == pytest.approx([exact] * 4, abs=0.01)


def test_learning_rates_that_diverge_cost_what_the_ceiling_says() -> None:
    plain, lost = across().sensitivity, across(diverges_at=-3.0).sensitivity
    assert lost.ceiling == pytest.approx(3.28, abs=0.02)
    assert min(np.subtract(lost.rises, plain.rises)[1:]) > 0


def test_the_frontier_moves_as_the_runs_do() -> None:
    found = across(diverges_at=-2.0, falls=-1.0)
    assert found.frontier.brackets == ((-3, -2), (-4, -3), (-5, -4), (-6, -5))
    assert found.frontier.interval[0] < -1 < found.frontier.interval[1]
    assert found.margins[0] == pytest.approx(3, abs=0.3)
    assert any("runs begin to diverge between: 2^-3 to 2^-2 at 64" in line for line in found.lines())


def test_without_divergence_nothing_is_said_of_the_frontier() -> None:
    found = across()
    assert math.isnan(found.frontier.slope)
    assert found.frontier.brackets == ((-2, math.inf),) * 4
    assert not any("diverge" in line for line in found.lines())
    assert transfer(load_table(rows()))["mup"].to_dict()["across_sizes"]["divergence"]["slope"]["value"] is None


@pytest.mark.parametrize("scatter", [0.1, 0.3])
def test_the_interval_of_the_frontiers_slope_holds_the_truth_about_as_often_as_it_says(scatter: float) -> None:
    random, held, x = np.random.default_rng(1), 0, np.arange(5.0)
    for _ in range(100):
        slope = random.uniform(-1, 1)
        low = np.floor(-4 + slope * x + scatter * random.standard_normal(5) + random.uniform(0, 1))
        interval = fit_frontier(x, [(value, value + 1) for value in low]).interval
        held += interval[0] <= slope <= interval[1]
    assert held >= 85
