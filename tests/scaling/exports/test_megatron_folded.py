"""Megatron without its own muP: what is refused here; and by the recipe inside megatron-core, every tensor and update (make engines)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from scaling.config import InitConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from scaling.exports import megatron_folded
from scaling.exports.batch import make_batch
from scaling.exports.folded import folded_rules
from scaling.exports.recipes.param_groups import read_plan
from scaling.model_config import ModelFamily
from scaling.schedule import lr_factor
from tests.conftest import tiny_run
from tests.scaling.exports.test_megatron import SCHEDULES, STEPS, in_megatron, installed, megatron_name


def folded_run(kind: str = "mup", qk_norm: bool = False, **parametrization: Any) -> RunConfig:
    """What --use-mup has no rule for: the default init and decay, multipliers of its own; width 128 from 32."""
    family = ModelFamily(depth=3, head_dim=16, context=16, vocab_size=512, activation="swiglu", norm_gain=True, qk_norm=qk_norm)
    optimizer = OptimizerConfig(lr=2.0**-6, weight_decay=0.1, clip_norm=0.5)
    training = TrainingConfig(steps=STEPS, batch_size=8)
    return tiny_run(128, kind=kind, family=family, optimizer=optimizer, training=training, **parametrization)


RUNS = {
    "mup": folded_run(residual_multiplier=0.5, embedding_multiplier=4.0),
    "completep": folded_run("completep", alpha=1.0),
    "umup": folded_run("umup", qk_norm=True),
    "sp": folded_run("sp"),
    "mup of other groups": folded_run(
        qk_norm=True, attention_multiplier=0.5, init=InitConfig(block_output="zero", hidden_std=0.03)
    ).model_copy(update={"optimizer": OptimizerConfig(lr=2.0**-6, weight_decay=0.1, weight_decay_rule="independent")}),
}


def exported(run: RunConfig, folder: Path) -> Path:
    for name, text in megatron_folded.export_files(run, make_batch(run, 1, None)).items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", RUNS)
def test_every_tensor_stands_in_the_plan_with_its_folded_rule(kind: str, tmp_path: Path) -> None:
    run = RUNS[kind]
    assert megatron_folded.faults(run) == []
    rows = read_plan(exported(run, tmp_path) / "plan.json")["tensors"]
    for rule, factor in folded_rules(run):
        (row,) = [row for row in rows if row["pattern"] == megatron_folded.PATTERNS[kind_of(rule.name)]]
        assert (row["lr"], row["weight_decay"], row["eps"]) == (rule.lr, rule.weight_decay, rule.eps), rule.name
        assert row["init_constant"] == factor if math.isnan(rule.init_std) else row["init_std"] == rule.init_std, rule.name


def kind_of(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def test_an_attention_scale_without_qk_norm_is_refused() -> None:
    faults = megatron_folded.faults(folded_run(attention_multiplier=0.5))
    assert [fault.where for fault in faults] == ["parametrization.attention_multiplier"]
    assert "multiplied by 0.125, in Megatron by 0.25" in faults[0].what


def test_rules_that_differ_within_one_tensor_of_megatron_are_refused() -> None:
    family = ModelFamily(depth=2, head_dim=16, context=16, vocab_size=64, activation="swiglu", norm_gain=True, queries_per_kv=2)
    faults = megatron_folded.faults(tiny_run(64, kind="spectral", family=family))
    assert {fault.where for fault in faults} == {"attention.key.weight", "attention.value.weight"}
    assert "init_std than attention.query.weight, and Megatron keeps the two in one tensor" in faults[0].what


@installed
@pytest.mark.parametrize("kind", RUNS)
def test_every_tensor_in_megatron_core_has_the_folded_rule(kind: str, tmp_path: Path) -> None:
    run = RUNS[kind]
    found = in_megatron(megatron_folded.arguments(run, make_batch(run, 1, None)), exported(run, tmp_path))
    seen = set()
    for rule, factor in folded_rules(run):
        name = megatron_name(rule.name)
        seen.add(name)
        values = found["tensors"][name]
        assert (values["lr"], values["weight_decay"], values["eps"]) == (rule.lr, rule.weight_decay, rule.eps), rule.name
        if math.isnan(rule.init_std):
            assert values["mean"] == pytest.approx(factor, rel=1e-6), rule.name
            continue
        # Exactly: the std that Megatron's init code has for it, times what the recipe made of the same draw.
        assert found["scaled"][name] * given_std(name, found, run) == pytest.approx(rule.init_std, rel=1e-6), rule.name
        assert values["std"] == pytest.approx(rule.init_std, rel=5 / math.sqrt(2 * values["entries"])), rule.name
    assert seen == set(found["tensors"])
    assert len({tuple(group) for group in found["identifiers"]}) == len(found["identifiers"]), "a checkpoint would mix them up"


def given_std(name: str, found: dict[str, Any], run: RunConfig) -> float:
    if "word_embeddings" in name:
        return float(found["embedding_init_method_std"])
    writes = "linear_proj" in name or "linear_fc2" in name
    return float(found["init_method_std"]) / (math.sqrt(2 * run.model.depth) if writes else 1.0)


@installed
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_the_recipes_schedule_in_megatron_is_the_runs_at_every_update(schedule: ScheduleConfig, tmp_path: Path) -> None:
    run = RUNS["mup"].model_copy(update={"schedule": schedule})
    found = in_megatron(megatron_folded.arguments(run, make_batch(run, 1, None)), exported(run, tmp_path))
    for step, factors in enumerate(found["schedule"]):
        assert len(factors) > 3
        assert factors == pytest.approx([lr_factor(schedule, step, STEPS)] * len(factors), rel=1e-12), step
