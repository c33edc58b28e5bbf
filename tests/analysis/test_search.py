"""The adaptive search on surfaces with a known optimum: it finds it, stops when it may, extends, and repeats itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from analysis.search import Ask, CellRuns, Done, SearchSettings, next_points, optimum_of
from tests.bench.search import NOISES, by_grid, by_search, rms, surfaces

SETTINGS = SearchSettings(low=-12, high=-4, max_runs=20)
Loss = Callable[[float, int], float]


def bowl(optimum: float, noise: float = 0.003) -> Loss:
    def loss(log2_lr: float, seed: int) -> float:
        random = np.random.default_rng([round(1000 * (log2_lr + 50)), seed])
        u = log2_lr - optimum
        return 2 + 0.04 * u**2 + 0.01 * u**3 / 3 + noise * random.standard_normal() if u < 3 else math.inf

    return loss


def run(
    loss: Loss, settings: SearchSettings, others: tuple[CellRuns, ...] = (), size: float = 6, count: int = 2
) -> tuple[CellRuns, Done]:
    cell = CellRuns(size)
    while not isinstance(step := next_points(cell, others, settings, count), Done):
        assert step
        for ask in step:
            assert (ask.log2_lr, ask.seed) not in zip(cell.log2_lr, cell.seed, strict=True), "nothing is run twice"
            cell = replace(
                cell,
                log2_lr=(*cell.log2_lr, ask.log2_lr),
                loss=(*cell.loss, loss(ask.log2_lr, ask.seed)),
                seed=(*cell.seed, ask.seed),
            )
    return cell, step


@pytest.mark.parametrize("optimum", [-8.1, -11.8, -4.2, -15.0, -1.5])
def test_it_finds_the_optimum_also_where_it_lies_outside_the_first_range(optimum: float) -> None:
    cell, done = run(bowl(optimum), SETTINGS)
    found = optimum_of(cell, ())
    assert found is not None
    assert done.stop == "precise"
    assert done.half_width <= SETTINGS.precision
    assert found.log2_lr == pytest.approx(optimum, abs=0.3)
    assert len(cell) <= 14


def test_a_larger_cell_starts_where_smaller_ones_have_their_optimum() -> None:
    first, _ = run(bowl(-8.0), SETTINGS, size=6)
    second, _ = run(bowl(-9.0), SETTINGS, (first,), size=7)
    starts = next_points(CellRuns(8), (first, second), SETTINGS, 3)
    assert isinstance(starts, list)
    assert {ask.reason for ask in starts} == {"start"}
    centre = starts[0].log2_lr
    # Two sizes do not prove a drift of an octave a doubling: the start lies between "as before" and "as far again".
    assert -10.25 <= centre <= -8.75
    assert min(ask.log2_lr for ask in starts) < -9.8
    third, done = run(bowl(-10.0), SETTINGS, (first, second), size=8)
    assert done.stop == "precise"
    assert len(third) < len(first)


def test_it_says_when_the_budget_is_used_and_when_all_runs_diverge() -> None:
    _, done = run(bowl(-8.0, noise=0.05), replace(SETTINGS, max_runs=6))
    assert done.stop == "budget"
    assert not done.half_width <= SETTINGS.precision
    cell, done = run(lambda _log2_lr, _seed: math.inf, SETTINGS)
    assert done.stop in ("diverged", "budget")
    assert len(cell) <= SETTINGS.max_runs


def test_runs_under_way_are_not_asked_for_again() -> None:
    cell, _ = run(bowl(-8.0, noise=0.02), replace(SETTINGS, max_runs=6))
    asked: list[Ask] = []
    for _ in range(4):
        step = next_points(replace(cell, pending=tuple((ask.log2_lr, ask.seed) for ask in asked)), (), SETTINGS, 1)
        assert isinstance(step, list)
        asked += step
    assert len({(ask.log2_lr, ask.seed) for ask in asked}) == 4
    together = next_points(cell, (), SETTINGS, 4)
    assert isinstance(together, list)
    assert {(ask.log2_lr, ask.seed) for ask in together} == {(ask.log2_lr, ask.seed) for ask in asked}


def test_without_seeds_no_learning_rate_is_run_twice() -> None:
    cell, _ = run(bowl(-8.0, noise=0.02), replace(SETTINGS, max_seeds=1, max_runs=30))
    assert len(set(cell.log2_lr)) == len(cell.log2_lr)
    assert set(cell.seed) == {0}


def test_the_same_runs_give_the_same_points() -> None:
    assert run(bowl(-8.0, 0.02), SETTINGS)[0] == run(bowl(-8.0, 0.02), SETTINGS)[0]


def test_the_grids_precision_for_less_than_a_fifth_of_its_compute() -> None:
    """On every third simulated study of `make bench`, so that the table in the docs is not the only place that says so."""
    ratios, held, compute = [], [], []
    for noise in NOISES:
        ours, grids = [], []
        for surface in list(surfaces(noise, 1))[::3]:
            ours += by_search(surface)[0]
            grids += by_grid(surface)
        ratios.append(rms(ours) / rms(grids))
        held += [item.held for item in ours]
        compute.append(sum(item.compute for item in ours) / sum(item.compute for item in grids))
    assert max(compute) < 0.2
    assert np.exp(np.mean(np.log(ratios))) < 1.0
    assert 0.85 < np.mean(held) < 0.99
