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


def test_mups_lead_in_loss_fades_with_width_and_the_comparison_says_who_is_ahead(fits: dict[str, TransferFit]) -> None:
    """Measured, and not what one would hope: at the base width muP leads by its initialization, at 512 SP at its own best LR leads."""
    best = {kind: {item.width: item.best_loss for item in fit.optima} for kind, fit in fits.items()}
    leads = [best["sp"][width] - best["mup"][width] for width in (64, 128, 256, 512)]
    assert leads == sorted(leads, reverse=True)
    assert leads[0] > 0.05
    comparison = compare_losses(fits)
    assert comparison is not None
    assert comparison.width == 512
    assert f"sp is better by {-leads[-1]:.4f}" in comparison.sentence()


def test_the_transferred_rate_costs_little_under_mup_and_much_under_sp(fits: dict[str, TransferFit]) -> None:
    assert fits["mup"].regret.relative_interval[1] < 0.01
    assert fits["sp"].regret.relative_interval[0] > 0.05
