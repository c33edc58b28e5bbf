"""From a study to the large run: the numbers are the rules' own, and what the study cannot say is not said."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from analysis.loss_by_width import predict_loss
from analysis.recommend import Quantity, Recommendation, check_target, recommend
from analysis.table import load_table
from analysis.target import TargetConfig
from analysis.transfer import TransferFit, transfer
from scaling.config import OptimizerConfig, RunConfig, TrainingConfig
from scaling.errors import ConfigError
from scaling.model_config import ModelFamily
from scaling.parametrization import tensor_rules
from tests.conftest import tiny_run

WIDTHS = (64, 128, 256)


def template() -> RunConfig:
    return tiny_run(
        256,
        family=ModelFamily(depth=2, head_dim=16, context=128, vocab_size=256),
        base_width=64,
        optimizer=OptimizerConfig(lr=2**-9, weight_decay=0.1),
        training=TrainingConfig(steps=400, batch_size=16),
    )


def fit_of(slope: float) -> TransferFit:
    rows = [
        {"parametrization": "mup", "width": width, "log2_lr": lr, "seed": seed}
        | {"loss": 4 * width**-0.15 + 0.04 * (lr + 7.5 - slope * math.log2(width / 64)) ** 2 + 0.001 * (-1) ** (seed + lr)}
        for width in WIDTHS
        for lr in range(-11, -4)
        for seed in range(2)
    ]
    return transfer(load_table(pd.DataFrame(rows)))["mup"]


def recommendation(slope: float = 0.0, **target: Any) -> Recommendation:
    fit = fit_of(slope)
    losses = {optimum.width: Quantity(optimum.best_loss, optimum.best_loss_interval) for optimum in fit.optima}
    settings = {"width": 1024, "tokens": 400 * 16 * 128} | target
    return recommend(template(), fit, TargetConfig(**settings), losses)


def test_same_tokens_and_batch_carry_the_measured_optimum_and_the_rules_of_width() -> None:
    result = recommendation()
    lr = result.hyperparameters["lr"]
    assert math.log2(lr.value) == pytest.approx(-7.5, abs=0.1)
    assert lr.interval[0] < lr.value < lr.interval[1]
    by_role = {rule.role: rule for rule in result.tensors}
    assert by_role["hidden"].lr == pytest.approx(lr.value / 16)
    assert by_role["readout"].multiplier == pytest.approx(1 / 16)
    assert by_role["hidden"].lr * by_role["hidden"].weight_decay == pytest.approx(lr.value * 0.1)
    assert list(result.tensors) == tensor_rules(result.run)


def test_longer_runs_and_larger_batches_move_lr_decay_and_eps_by_the_horizon_rule() -> None:
    plain, moved = recommendation(), recommendation(tokens=64 * 400 * 16 * 128, batch_tokens=4 * 16 * 128)
    assert moved.run.training.steps == 400 * 16
    ratio = moved.hyperparameters["lr"].value / plain.hyperparameters["lr"].value
    assert ratio == pytest.approx(16**-0.5)
    assert moved.run.optimizer.weight_decay == pytest.approx(0.1 / 4)
    assert moved.run.optimizer.eps == pytest.approx(4 * plain.run.optimizer.eps)
    low, high = (moved.hyperparameters["lr"].interval[end] / plain.hyperparameters["lr"].interval[end] for end in (0, 1))
    assert (low, high) == pytest.approx((16**-0.7, 16**-0.3))
    assert any("tokens" in warning for warning in moved.warnings)


def test_the_timescale_of_weight_decay_is_said_as_a_share_of_the_run_and_a_moved_one_is_warned_about() -> None:
    def share(run: RunConfig) -> float:
        rule = next(rule for rule in tensor_rules(run) if rule.role == "hidden")
        return 1 / (rule.lr * rule.weight_decay) / run.training.steps

    ruled = recommendation(tokens=64 * 400 * 16 * 128, batch_tokens=4 * 16 * 128)
    (step,) = [step for step in ruled.steps if step.title == "Timescale of weight decay"]
    assert f"{share(ruled.run):.3g} of the run" in step.value
    # The rule keeps lr * weight decay * steps (Complete(d)P Table 1): nothing to warn about.
    assert not any("weights average over" in warning for warning in ruled.warnings)
    moved = recommendation(tokens=64 * 400 * 16 * 128, horizon_exponent=0.0, horizon_exponent_range=(0.0, 0.0))
    (warning,) = [warning for warning in moved.warnings if "weights average over" in warning]
    kept = float(warning.split("optimizer.weight_decay ")[1].split()[0])
    optimizer = moved.run.optimizer.model_copy(update={"weight_decay": kept})
    assert share(moved.run.model_copy(update={"optimizer": optimizer})) == pytest.approx(share(recommendation().run), rel=0.01)


def test_a_drifting_optimum_widens_the_interval_and_is_warned_about() -> None:
    still, drifting = recommendation(), recommendation(slope=-1.0)
    assert any("drifts" in warning for warning in drifting.warnings)
    assert not any("drifts" in warning for warning in still.warnings)

    def octaves(result: Recommendation) -> float:
        low, high = result.hyperparameters["lr"].interval
        return math.log2(high / low)

    assert octaves(drifting) > octaves(still) + 1.5


def test_loss_is_predicted_only_where_the_study_can() -> None:
    here = recommendation()
    low, high = here.predicted_loss.interval
    truth = 4 * 1024**-0.15
    assert low <= truth * 1.01
    assert high >= truth
    elsewhere = recommendation(tokens=10**9)
    assert math.isnan(elsewhere.predicted_loss.value)
    assert any("no loss is predicted" in warning for warning in elsewhere.warnings)


def test_prediction_brackets_every_law_with_a_floor() -> None:
    for floor, exponent in ((0.0, 0.3), (1.0, 0.5), (1.7, 0.2)):
        losses = {width: floor + 8 * width**-exponent for width in WIDTHS}
        prediction = predict_loss(losses, 4096)
        truth = floor + 8 * 4096**-exponent
        assert prediction.interval[0] <= truth + 1e-12
        assert truth <= prediction.interval[1]
    assert math.isnan(predict_loss({64: 2.0}, 1024).value)
    assert math.isnan(predict_loss({64: 2.0, 128: 2.1}, 1024).value)


def test_depth_that_was_not_studied_is_said() -> None:
    assert any("depth" in warning for warning in recommendation(depth=24).warnings)


def test_cost_of_a_wrong_lr_is_read_from_the_curve() -> None:
    costs = recommendation().wrong_lr_costs
    assert costs == pytest.approx({"x0.5": 0.04, "x2": 0.04}, abs=0.015)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"width": 32, "tokens": 10**6}, "smaller than the base width 64"),
        ({"width": 1000, "tokens": 10**6}, "not divisible by head_dim 16"),
        ({"width": 1024, "tokens": 10**6, "batch_tokens": 1000}, "is not a multiple of the context 128"),
        ({"width": 1024, "tokens": 100}, "less than one batch"),
        ({"width": 1024, "tokens": 10**6, "gpus": {"count": 7}}, "does not divide over 7 GPUs"),
    ],
)
def test_impossible_targets_are_refused(target: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_target(TargetConfig(**target), template())


def test_document_follows_the_contract() -> None:
    document = recommendation().to_dict()
    assert {"hyperparameters", "tensors", "predicted_loss", "extrapolation", "warnings", "steps"} <= set(document)
    assert set(document["hyperparameters"]["lr"]) == {"value", "interval"}
    assert {"name", "role", "shape", "fan_in", "fan_out", "multiplier", "init_std", "lr", "weight_decay", "eps", "source"} <= set(
        document["tensors"][0]
    )
    assert document["extrapolation"]["width"] == 4


def test_tokens_that_whole_steps_leave_over_are_said() -> None:
    assert not any("left over" in warning for warning in recommendation().warnings)
    assert any("left over" in warning for warning in recommendation(tokens=131_000, batch_tokens=65_536).warnings)


def test_an_exponent_of_the_target_file_is_its_source_and_not_the_papers() -> None:
    result = recommendation(tokens=64 * 400 * 16 * 128, horizon_exponent=0.35)
    (step,) = [step for step in result.steps if step.title.startswith("LR at the target")]
    assert step.source == "the target file: horizon_exponent 0.35, between 0.3 and 0.7"


def test_an_independent_decay_goes_with_the_steps_by_the_power_that_is_printed() -> None:
    own = template()
    studied = own.model_copy(update={"optimizer": own.optimizer.model_copy(update={"weight_decay_rule": "independent"})})
    result = recommend(studied, fit_of(0.0), TargetConfig(width=256, tokens=4 * studied.tokens), {})
    (step,) = [step for step in result.steps if step.title == "adamw at the base shape"]
    assert "weight decay * S^-1," in step.formula
    assert result.run.optimizer.weight_decay == pytest.approx(0.1 / 4)


def test_an_optimizer_without_a_rule_is_credited_to_none() -> None:
    own = template()
    studied = own.model_copy(update={"optimizer": own.optimizer.model_copy(update={"kind": "lion"})})
    result = recommend(studied, fit_of(0.0), TargetConfig(width=256, tokens=4 * studied.tokens), {})
    assert not any("2512.22382) Table 1, exponent" in step.source for step in result.steps)
    assert any("LR, decay and eps are left as they are" in warning for warning in result.warnings)


def test_a_run_with_a_rule_of_its_own_says_its_lr_at_its_steps_too() -> None:
    own = template()
    studied = own.model_copy(update={"base": own.base.model_copy(update={"steps": 400})})
    result = recommend(studied, fit_of(0.0), TargetConfig(width=256, tokens=4 * studied.tokens, betas="scale"), {})
    values = result.hyperparameters
    assert values["lr_at_steps"].value == pytest.approx(values["lr"].value / 2)
    assert values["beta1_at_steps"].value == pytest.approx(1 - 0.1 / 4)
    assert any(step.title == "LR at the run's number of steps" for step in result.steps)
