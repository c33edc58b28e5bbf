"""The LR's way from a study's tokens and batch to a target's: measured exponents where there are some, the rule's elsewhere."""

from __future__ import annotations

import math
from functools import cache

import pandas as pd
import pytest

from analysis.axes import AxisFit, fit_axes
from analysis.batch_choice import BatchChoice, shared_unit
from analysis.lr_exponents import doubts, lr_at_target, lr_exponents
from analysis.table import load_table

OWN = {"depth": 2.0, "batch_tokens": 2048.0, "tokens": 409600.0}
RATIOS = {"tokens": 64.0, "batch_tokens": 4.0, "depth": 1.0}
RANGE = (0.3, 0.7)


def row(tokens: float, batch: float, lr: float, seed: int, away: float) -> dict[str, object]:
    sizes = {"parametrization": "mup", "width": 128, "depth": 2, "tokens": tokens, "batch_tokens": batch}
    return sizes | {"log2_lr": lr, "seed": seed, "loss": 2 + 0.04 * away**2 + 0.0005 * (-1) ** (seed + lr)}


@cache
def levels(tokens_slope: float, batch_slope: float | None = None) -> tuple[AxisFit, ...]:
    """Axes of a study in which the best LR is 2^-7.5 at OWN, and moves by these exponents."""
    cells = [(409600.0 * 2**k, 2048.0, tokens_slope * k) for k in (-2, 0, 2)]
    if batch_slope is not None:
        cells += [(409600.0, 2048.0 * 2**k, batch_slope * k) for k in (-2, 2)]
    rows = [
        row(tokens, batch, lr, seed, lr + 7.5 - moved)
        for tokens, batch, moved in cells
        for lr in range(-11, -3)
        for seed in range(2)
    ]
    return tuple(found["mup"] for found in fit_axes(load_table(pd.DataFrame(rows)), OWN).values())


def test_a_measured_axis_moves_the_lr_by_its_own_exponent_and_the_other_by_the_rule() -> None:
    found, warnings = lr_exponents(RATIOS, 0.5, levels(-0.25))
    assert warnings == []
    assert found["tokens"].measured
    assert found["tokens"].value == pytest.approx(-0.25, abs=0.05)
    assert not found["batch_tokens"].measured
    octaves, (low, high) = lr_at_target(found, 0.5, RANGE)
    assert octaves == pytest.approx(-0.25 * 6 + 0.5 * 2, abs=0.3)
    assert low < octaves < high


def test_two_measured_axes_leave_nothing_to_the_rule() -> None:
    found, _ = lr_exponents(RATIOS, 0.5, levels(-0.25, 0.4))
    assert [found[axis].measured for axis in ("tokens", "batch_tokens")] == [True, True]
    octaves, interval = lr_at_target(found, 0.5, RANGE)
    assert octaves == pytest.approx(-0.25 * 6 + 0.4 * 2, abs=0.3)
    assert interval == lr_at_target(found, 0.5, (0.0, 1.0))[1]


def test_without_measured_axes_tokens_and_batch_share_one_unknown_exponent() -> None:
    found, _ = lr_exponents(RATIOS, 0.5, ())
    octaves, interval = lr_at_target(found, 0.5, RANGE)
    assert octaves == -0.5 * math.log2(16)
    assert interval == pytest.approx((-0.7 * 4, -0.3 * 4))


def test_a_target_may_ask_for_the_rule() -> None:
    found, warnings = lr_exponents(RATIOS, 0.5, levels(-0.25), use_measured=False)
    assert not any(item.measured for item in found.values())
    assert warnings == []


def test_an_exponent_of_two_levels_is_doubted() -> None:
    kept = [fit for fit in levels(-0.25) if fit.name == "tokens"]
    found, _ = lr_exponents(RATIOS, 0.5, kept)
    assert doubts(found, RANGE) == []
    assert any("is measured to" in text for text in doubts(found, (0.499, 0.5)))


@pytest.mark.parametrize(
    ("sequences", "devices", "micro", "unit"), [(1000, 64, 2, 128), (1000, 4096, 1, 64), (3, 8, 1, 1), (64, 64, 1, 64)]
)
def test_batches_come_in_what_devices_can_share(sequences: float, devices: int, micro: int, unit: int) -> None:
    assert shared_unit(sequences, devices, micro) == unit


def test_a_ceiling_is_rounded_down_and_warned_about_beyond_its_interval() -> None:
    ceiling = BatchChoice(1000.0 * 128, (900.0 * 128, 1100.0 * 128), "the noise scale", "a run", "", ceiling=True)
    assert ceiling.rounded(128, 64, 2) == 896 * 128
    assert ceiling.warnings(1000 * 128) == []
    assert "2 times the noise scale" in ceiling.warnings(2000 * 128)[0]
    best = BatchChoice(1000.0 * 128, (900.0 * 128, 1100.0 * 128), "the best batch", "a law", "", ceiling=False)
    assert best.rounded(128, 64, 2) == 1024 * 128
