"""The noise scale's estimate on gradients of known noise scale: unbiased parts, calibrated intervals, "at least" where no more is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.noise_scale import Norms, noise_scale, noise_scale_curve, norms_of, ratio_interval, read_norms
from analysis.shapes import Array
from scaling.errors import DataError

BATCH, PART, DIMENSIONS = 32, 8, 40
SCALES = 1 / np.sqrt(1 + np.arange(DIMENSIONS))
TRACE = float((SCALES**2).sum())
Draw = Callable[[np.random.Generator, int], Array]


def normal(random: np.random.Generator, count: int) -> Array:
    return random.standard_normal((count, DIMENSIONS)) * SCALES


def heavy(random: np.random.Generator, count: int) -> Array:
    """Student's t with 5 degrees of freedom, and some examples with larger gradients than others; the same covariance."""
    size = np.exp(0.5 * random.standard_normal((count, 1)) - 0.25)
    return random.standard_t(5, (count, DIMENSIONS)) * math.sqrt(3 / 5) * size * SCALES


def simulated(true: float, steps: int, draw: Draw, random: np.random.Generator) -> Norms:
    """Measured steps of gradients with tr(Sigma) / |G|^2 = true."""
    gradient = np.zeros(DIMENSIONS)
    gradient[3:7] = math.sqrt(TRACE / true) / 2
    examples = draw(random, steps * BATCH).reshape(steps, BATCH // PART, PART, DIMENSIONS) + gradient
    means = examples.mean(axis=2)
    parts, batch = (means**2).sum(-1).mean(1), (means.mean(1) ** 2).sum(-1)
    return Norms(np.arange(float(steps)), np.full(steps, float(BATCH)), batch, np.full(steps, float(PART)), parts)


def test_both_estimates_are_unbiased() -> None:
    norms = simulated(64.0, 4000, normal, np.random.default_rng(1))
    for estimate, truth in ((norms.trace, TRACE), (norms.gradient_sq, TRACE / 64)):
        assert abs(estimate.mean() - truth) < 4 * estimate.std() / math.sqrt(len(estimate))
    assert norms.trace.mean() == pytest.approx(TRACE, rel=0.02)


@pytest.mark.parametrize(("draw", "true", "steps"), [(normal, 4, 12), (normal, 32, 64), (normal, 256, 64), (heavy, 32, 64)])
def test_the_90_percent_interval_covers_between_85_and_95_percent(draw: Draw, true: float, steps: int) -> None:
    random = np.random.default_rng(5)
    intervals = [noise_scale(simulated(true, steps, draw, random)).interval for _ in range(300)]
    assert 0.85 <= np.mean([low <= true <= high for low, high in intervals]) <= 0.95


def test_an_interval_is_open_where_the_gradient_is_not_told_from_noise() -> None:
    found = noise_scale(simulated(1e6, 16, normal, np.random.default_rng(2)))
    assert found.interval[1] == math.inf
    assert 0 < found.interval[0] < 1e6
    assert found.to_dict()["interval"][1] is None
    assert "unbounded" in str(found)


def test_the_ratio_is_of_averages_not_an_average_of_ratios() -> None:
    norms = simulated(64.0, 400, normal, np.random.default_rng(3))
    ratios = norms.trace / norms.gradient_sq
    assert noise_scale(norms).sequences == pytest.approx(64, rel=0.25)
    assert abs(ratios.mean() / 64 - 1) > 0.25


def test_the_exponential_average_follows_a_noise_scale_that_changes() -> None:
    random = np.random.default_rng(4)
    first, second = (simulated(true, 200, normal, random) for true in (8.0, 64.0))
    both = Norms(np.arange(400.0), *(np.concatenate([getattr(first, name), getattr(second, name)]) for name in
                 ("batch_sequences", "batch", "part_sequences", "parts")))  # fmt: skip
    curve = noise_scale_curve(both, half_life_steps=20)
    assert curve.sequences[199] == pytest.approx(8, rel=0.25)
    assert curve.sequences[-1] == pytest.approx(64, rel=0.5)
    assert curve.trace[0] == both.trace[0]


def test_few_steps_give_a_value_without_an_interval() -> None:
    found = noise_scale(simulated(8.0, 7, normal, np.random.default_rng(0)))
    assert math.isnan(found.interval[0])
    assert not found.bounded


def test_fiellers_interval_agrees_with_the_delta_method_where_the_denominator_is_sure() -> None:
    random = np.random.default_rng(6)
    top, bottom = 10 + random.standard_normal(1000), 5 + 0.1 * random.standard_normal(1000)
    low, high = ratio_interval(top, bottom, level=0.9)
    error = (top - 2 * bottom).std() / 5 / math.sqrt(1000)
    assert (high - low) / 2 == pytest.approx(1.645 * error, rel=0.02)


def test_norms_that_are_not_finite_are_counted_and_a_run_without_any_is_refused(tmp_path: Path) -> None:
    row = {"batch_sequences": 4, "batch": 1.0, "part_sequences": 2, "parts": 2.0}
    norms = norms_of([{"step": 0, "gradient_sq": row}, {"step": 1, "gradient_sq": row | {"parts": None}}, {"step": 2}])
    assert (len(norms.step), norms.dropped) == (1, 1)
    assert (norms.gradient_sq[0], norms.trace[0]) == (0.0, 4.0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    with pytest.raises(DataError, match="noise_scale_every_steps"):
        read_norms(tmp_path)
