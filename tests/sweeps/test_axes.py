"""Axes of a study: levels with LR curves of their own, lines through the best LR, their verdicts, and what is recommended from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.axes import fit_axes, level_transfer, line_transfer
from analysis.recommend import Quantity, recommend
from analysis.table import RunTable, load_table
from analysis.target import TargetConfig
from analysis.transfer import transfer
from scaling.config_file import load_config
from scaling.errors import ConfigError
from scaling.hyperparameters import HYPERPARAMETERS, hyperparameters, with_values
from scaling.records import RunRecord, run_directory, write_record
from sweeps.plan import PlannedRun, make_plan
from sweeps.search import searched_runs
from sweeps.study import StudyConfig
from tests.sweeps.studies import write_study
from tests.sweeps.test_plan import record_of, study_of

AXES: dict[str, Any] = {
    "parametrizations": {"mup": {}},
    "widths": [16, 32, 64],
    "log2_lr": {"low": -10, "high": -4},
    "search": {"kind": "adaptive", "precision": 0.2, "max_runs": 6},
    "optimizer": {"weight_decay": 0.1},
    "axes": {
        "weight_decay": {"low": 0.005, "high": 2.0, "precision": 0.2},
        "beta2": {"low": 0.8, "high": 0.999, "precision": 0.2},
        "batch_size": {"values": [2, 8], "widths": [16]},
    },
}


def loss(planned: PlannedRun) -> float:
    """LR* is 2^-7 and goes with the root of the batch; weight decay's best doubles with the width, 1 - beta2's is 0.1 everywhere."""
    run = planned.run
    lr = planned.log2_lr + 7 - 0.5 * math.log2(run.training.batch_size / 4)
    decay = math.log2(run.optimizer.weight_decay / (0.1 * planned.width / 16))
    beta = math.log2((1 - run.optimizer.beta2) / 0.1)
    noise = 0.0005 * math.sin(1e4 * (lr + decay + beta) + 7 * planned.seed)
    return 3 - 0.1 * math.log2(planned.width) + 0.04 * lr**2 + 0.02 * decay**2 + 0.02 * beta**2 + noise


def carried_out(study: StudyConfig, share: float) -> list[PlannedRun]:
    """The plan when it has stopped growing; each time this share of the runs to do is made, the last ones first."""
    results: dict[str, RunRecord] = {}
    while todo := [run for run in make_plan(study, results) if run.run_id not in results]:
        made = todo[-math.ceil(share * len(todo)) :]
        results |= {run.run_id: record_of(run, loss(run)) for run in made}
    return make_plan(study, results)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyConfig, list[PlannedRun], RunTable]:
    folder = tmp_path_factory.mktemp("axes")
    study = study_of(folder, **AXES)
    plan = carried_out(study, 1.0)
    for planned in plan:
        write_record(run_directory(folder, planned.run_id), record_of(planned, loss(planned)))
    return study, plan, load_table(folder, belongs=study.owns, own=study.own_values())


def test_a_line_has_an_optimum_and_a_verdict_of_its_own(made: tuple[StudyConfig, list[PlannedRun], RunTable]) -> None:
    _, _, table = made
    decay, beta = line_transfer(table, "weight_decay")["mup"], line_transfer(table, "beta2")["mup"]
    assert decay.transfer.verdict == "drifts"
    assert decay.transfer.slope.value == pytest.approx(1.0, abs=0.1)
    assert beta.transfer.verdict == "transfers"
    for width in (16, 32, 64):
        value, (low, high) = decay.best(width) or (math.nan, (math.nan, math.nan))
        assert low < 0.1 * width / 16 < high
        assert value == pytest.approx(0.1 * width / 16, rel=0.1)
        value, (low, high) = beta.best(width) or (math.nan, (math.nan, math.nan))
        assert low < value < high
        assert value == pytest.approx(0.9, abs=0.01)
    assert "weight decay drifts with width" in str(decay)
    assert decay.to_dict()["optima"][0]["value"] == pytest.approx(0.1, rel=0.1)


def test_levels_have_lr_curves_of_their_own_at_the_same_number_of_tokens(
    made: tuple[StudyConfig, list[PlannedRun], RunTable],
) -> None:
    study, plan, table = made
    assert {run.run.tokens for run in plan} == {8 * 4 * 16}
    fit = level_transfer(table, "batch_tokens", at=study.own_sizes())["mup"].transfer
    assert [item.cell.size("batch_tokens") for item in fit.optima] == [32, 64, 128]
    assert fit.slope.value == pytest.approx(0.5, abs=0.1)
    assert fit.verdict == "drifts"
    assert {"weight_decay", "beta2", "batch_tokens"} == set(fit_axes(table, study.own_sizes()))


def test_lr_curves_are_those_at_the_studys_own_settings(made: tuple[StudyConfig, list[PlannedRun], RunTable]) -> None:
    study, plan, table = made
    fit = transfer(table, at=study.own_sizes())["mup"]
    assert [item.width for item in fit.optima] == [16, 32, 64]
    assert all(item.cell.batch_tokens == 64 for item in fit.optima)
    own = [run for run in plan if not run.at]
    assert sum(item.n_finite for item in fit.optima) == len(own)
    assert any("runs at other values belong to the axes" in note for note in table.notes)


def test_the_run_in_which_a_line_and_an_lr_curve_cross_is_made_once(
    made: tuple[StudyConfig, list[PlannedRun], RunTable],
) -> None:
    study, plan, _ = made
    assert len({run.run_id for run in plan}) == len(plan)
    assert all(run.run_id == run.run.run_id for run in plan)
    results = {run.run_id: record_of(run, loss(run)) for run in plan}
    own = next(cell for cell in searched_runs(study, "mup", results) if not cell.at)
    rates = {run.log2_lr for run in plan if run.line and run.width == 16}
    assert len(rates) == 1
    assert rates <= set(own.runs.log2_lr)


@pytest.mark.parametrize("kind", ["adaptive", "grid"])
def test_the_plan_is_the_same_whenever_it_is_made(tmp_path: Path, kind: str) -> None:
    axes = {"axes": AXES["axes"] | {"depth": {"values": [2], "widths": [32]}}, "widths": [16, 32]}
    study = study_of(tmp_path, **(AXES | axes | {"search": {"kind": kind, "precision": 0.2, "max_runs": 5}}))
    plan = carried_out(study, 1.0)
    assert [run.run_id for run in plan] == [run.run_id for run in carried_out(study, 0.3)]
    assert {run.line for run in plan} == {None, "weight_decay", "beta2"}
    assert {run.run.model.depth for run in plan} == {1, 2}
    assert {run.run.training.batch_size for run in plan} == {2, 4, 8}


def test_a_record_belongs_to_the_study_that_has_its_axis(
    made: tuple[StudyConfig, list[PlannedRun], RunTable], tmp_path: Path
) -> None:
    study, plan, _ = made
    records = [record_of(run, loss(run)) for run in plan]
    assert all(study.owns(record) for record in records)
    without = study_of(tmp_path, **{key: value for key, value in AXES.items() if key != "axes"})
    assert [without.owns(record) for record in records] == [not run.at for run in plan]
    assert without.identity() == study.identity(), "axes can be added to a study that is there"


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ({"weight_decay": {"values": [1, 2]}}, "give low and high"),
        ({"depth": {"low": 1, "high": 2}}, "give values"),
        ({"weight_decay": {"low": 0.5, "high": 1}}, "own value 0.1 lies outside"),
        ({"warmup_fraction": {"low": 0.01, "high": 0.9}}, "together exceed 1"),
        ({"beta2": {"low": 0.9, "high": 1.5}}, "is not below 1"),
        ({"weight_decay": {"low": 0.09, "high": 0.11}}, "fewer than three values"),
        ({"batch_size": {"values": [3]}}, "no multiple of batch_size 3"),
        ({"depth": {"values": [2], "widths": [17]}}, r"\[17\] are none of the study's"),
        ({"eps": {"low": 1e-9, "high": 1e-7}}, "sgd does not use it"),
        ({"weight_decai": {"low": 1, "high": 2}}, "axes.weight_decai: (.|\n)*did you mean 'weight_decay'"),
    ],
)
def test_axes_that_cannot_be_are_refused_with_the_reason(tmp_path: Path, axis: dict[str, Any], words: str) -> None:
    optimizer = {"kind": "sgd", "weight_decay": 0.1} if "eps" in axis else AXES["optimizer"]
    with pytest.raises(ConfigError, match=words):
        study_of(tmp_path, **(AXES | {"axes": axis, "optimizer": optimizer}))


def test_a_line_through_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"small.yaml:\d+: axes.weight_decay: .*optimizer.weight_decay, is 0 or off"):
        study_of(tmp_path, **(AXES | {"optimizer": {}, "axes": {"weight_decay": {"low": 0.01, "high": 1}}}))


def test_hyperparameters_can_be_set_by_name(tmp_path: Path) -> None:
    model = {"depth": 1, "head_dim": 8, "context": 16, "vocab_size": 32, "norm_gain": True}
    run = load_config(write_study(tmp_path, model=model, **AXES), StudyConfig).template("mup")
    for name, value in hyperparameters(run).items():
        changed = with_values(run, {name: value * 0.5 if value else 0.25})
        assert HYPERPARAMETERS[name].of(changed) != value
        assert with_values(changed, {name: value}).run_id == run.run_id, name


def test_a_measured_value_is_recommended_and_an_unbounded_one_is_not(
    made: tuple[StudyConfig, list[PlannedRun], RunTable],
) -> None:
    study, _, table = made
    fit = transfer(table, at=study.own_sizes())["mup"]
    losses = {item.width: Quantity(item.best_loss) for item in fit.optima}
    lines = [line_transfer(table, "beta2")["mup"]]
    template = study.template("mup")
    target = TargetConfig(name="t", width=64, tokens=template.tokens)
    found = recommend(template, fit, target, losses, lines)
    assert found.run.optimizer.beta2 == pytest.approx(0.9, abs=0.01)
    assert any(step.title.startswith("beta2") for step in found.steps)
    whole = table.whole
    assert whole is not None
    cut = load_table(whole[whole["beta2"].isna() | (whole["beta2"] >= 0.9375)], own=study.own_values())
    kept = recommend(template, fit, target, losses, [line_transfer(cut, "beta2")["mup"]])
    assert kept.run.optimizer.beta2 == template.optimizer.beta2
    assert any("beta2 was varied" in warning for warning in kept.warnings)


def test_a_column_that_follows_the_lr_is_no_axis() -> None:
    """Independent weight decay written as wd = c / lr differs in every row, and never at the same size and LR."""
    rows = [
        {"width": width, "log2_lr": rate, "weight_decay": 2.0**-rate / 100, "loss": 2 + 0.05 * (rate + 7) ** 2}
        for width in (16, 32, 64)
        for rate in range(-10, -4)
    ]
    table = load_table(pd.DataFrame(rows))
    assert table.own == {}
    assert len(table) == len(rows)


def test_a_line_whose_best_value_lies_at_its_end_is_left_without_more_seeds_there(tmp_path: Path) -> None:
    axes = {"weight_decay": {"low": 0.02, "high": 0.2, "max_runs": 8}}
    study = study_of(tmp_path, **(AXES | {"axes": axes, "widths": [64]}))
    plan = carried_out(study, 1.0)
    values = [run.run.optimizer.weight_decay for run in plan if run.line]
    assert max(values) == pytest.approx(0.1 * 2**1.0)
    assert len(values) <= 4
