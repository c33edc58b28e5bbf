"""The stored runs of configs/studies/reference.yaml: real training, judged as a user would see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.report import compare_losses
from analysis.table import load_table
from analysis.transfer import TransferFit, transfer

REFERENCE = Path(__file__).parents[1] / "fixtures" / "reference.csv"


@pytest.fixture(scope="module")
def fits() -> dict[str, TransferFit]:
    return transfer(load_table(REFERENCE))


def test_the_optimum_stays_under_mup_and_drifts_under_sp(fits: dict[str, TransferFit]) -> None:
    assert fits["mup"].verdict == "transfers"
    assert fits["sp"].verdict == "drifts"
    assert fits["sp"].slope.interval[1] < fits["mup"].slope.interval[0]
    assert all(item.usable for fit in fits.values() for item in fit.optima)


def test_mup_is_at_least_as_good_at_the_largest_width(fits: dict[str, TransferFit]) -> None:
    comparison = compare_losses(fits)
    assert comparison is not None
    assert comparison.losses["mup"] <= comparison.losses["sp"]
    assert "mup is better by" in comparison.sentence()


def test_the_transferred_rate_costs_little_under_mup_and_much_under_sp(fits: dict[str, TransferFit]) -> None:
    assert fits["mup"].regret.relative_interval[1] < 0.01
    assert fits["sp"].regret.relative_interval[0] > 0.05
