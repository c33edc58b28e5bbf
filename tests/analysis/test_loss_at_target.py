"""A loss is predicted for a target only along axes that something has read: the study's cells, or the rows of a law."""

from __future__ import annotations

import math
from functools import cache

import pandas as pd

from analysis.fit import fit
from analysis.fit_result import ScalingLawFit
from analysis.loss_at_target import PARAMS_NOT_STATED, TargetLoss, loss_at_target
from analysis.measured import Measured, extrapolation, far_warnings, measured_of
from analysis.recommendation import Quantity
from analysis.table import load_table
from analysis.transfer import transfer
from scaling.accounting import parameter_counts
from scaling.config import RunConfig, TrainingConfig
from scaling.model_config import ModelFamily
from tests.conftest import tiny_run

FAMILY = ModelFamily(depth=2, head_dim=16, context=128, vocab_size=256)
OWN_TOKENS, OWN_BATCH = 409_600, 2048


def template() -> RunConfig:
    return tiny_run(128, family=FAMILY, base_width=64, training=TrainingConfig(steps=200, batch_size=16))


@cache
def law(name: str, tokens: tuple[int, ...] = (OWN_TOKENS,), params_include: str | None = "embedding") -> ScalingLawFit:
    """Of four widths at these numbers of tokens."""
    sizes = [(parameter_counts(FAMILY.at(width)).total, count) for width in (32, 64, 128, 256) for count in tokens]
    rows = [{"params": n, "tokens": d, "loss": 1 + 40 * n**-0.4 + 90 * d**-0.5} for n, d in sizes]
    return fit(pd.DataFrame(rows), name, params_include=params_include, starts=40)


def measured(*, tokens: tuple[float, ...] = (OWN_TOKENS,), depth: tuple[float, ...] = (2.0,)) -> Measured:
    return Measured({"tokens": tokens, "batch": (float(OWN_BATCH),), "depth": depth}, (64, 128), ())


def predicted(
    by: ScalingLawFit | None,
    *,
    tokens: float = OWN_TOKENS,
    batch: float = OWN_BATCH,
    depth: int = 2,
    known: Measured | None = None,
) -> TargetLoss:
    losses = {64: Quantity(2.2), 128: Quantity(2.0)}
    return loss_at_target(template(), FAMILY.at(256, depth), tokens, batch, losses, known or measured(), by)


def refused(found: TargetLoss, words: str) -> bool:
    return math.isnan(found.loss.value) and not found.steps and words in " ".join(found.warnings)


def test_a_law_of_one_number_of_tokens_predicts_no_other() -> None:
    assert refused(predicted(law("power-constant-flops"), tokens=8 * OWN_TOKENS), "has not read tokens")
    assert refused(predicted(law("power-constant"), tokens=8 * OWN_TOKENS), "does not read tokens")


def test_a_law_that_read_tokens_predicts_them() -> None:
    found = predicted(law("chinchilla-shared", (OWN_TOKENS, 4 * OWN_TOKENS, 16 * OWN_TOKENS)), tokens=8 * OWN_TOKENS)
    low, high = found.loss.interval
    assert low <= found.loss.value <= high
    assert [step.title for step in found.steps] == ["Predicted loss"]


def test_a_law_of_one_depth_predicts_no_other() -> None:
    by = law("power-constant")
    assert refused(predicted(by, depth=16), "has not read depth")
    assert math.isfinite(predicted(by, depth=16, known=measured(depth=(2.0, 4.0, 8.0))).loss.value)


def test_no_law_reads_the_batch_and_its_loss_at_the_studys_is_said() -> None:
    assert refused(predicted(law("power-constant"), batch=4 * OWN_BATCH), "at the study's, 2,048 tokens")


def test_at_another_width_alone_the_studys_bracket_is_taken_and_the_law_stands_beside_it() -> None:
    plain, both = predicted(None), predicted(law("power-constant"))
    assert both.loss == plain.loss
    assert [step.title for step in both.steps] == ["Predicted loss", "Loss by the law, beside it"]


def test_parameters_of_unknown_counting_are_said() -> None:
    assert PARAMS_NOT_STATED in predicted(law("power-constant", params_include=None)).warnings
    assert PARAMS_NOT_STATED not in predicted(law("power-constant")).warnings


def test_a_cell_that_was_measured_is_its_own_prediction() -> None:
    rows = [
        {"parametrization": "mup", "width": 256, "depth": 2, "batch_tokens": OWN_BATCH, "tokens": tokens, "log2_lr": lr}
        | {"loss": 2 + 0.04 * (lr + 7.5) ** 2 - 0.1 * math.log2(tokens / OWN_TOKENS), "seed": 0}
        for tokens in (OWN_TOKENS, 8 * OWN_TOKENS)
        for lr in range(-10, -4)
    ]
    fits = transfer(load_table(pd.DataFrame([row for row in rows if row["tokens"] != OWN_TOKENS])))
    known = measured_of(template(), fits["mup"], ())
    found = predicted(None, tokens=8 * OWN_TOKENS, known=known)
    assert abs(found.loss.value - 1.7) < 0.02
    assert "measured at this size" in found.steps[0].source


def test_extrapolation_counts_from_the_ends_of_what_was_measured() -> None:
    known = Measured({"tokens": (2e5, 3e6), "batch": (256.0, 8192.0), "depth": (2.0, 8.0)}, (64, 128), ())
    assert extrapolation(known, 2048, 4, 3e8, 65536) == {"width": 16, "depth": 1, "tokens": 100, "batch": 8}
    assert extrapolation(known, 32, 1, 1e4, 512) == {"width": 0.5, "depth": 0.5, "tokens": 0.05, "batch": 1}
    assert [text.split()[0] for text in far_warnings({"width": 16, "batch": 8, "tokens": 0.05})] == ["width", "tokens"]
