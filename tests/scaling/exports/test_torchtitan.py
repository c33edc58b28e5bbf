"""The torchtitan recipe: what it refuses here; and inside torchtitan 0.3.0, where that is installed, every tensor (make engines)."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scaling.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from scaling.exports import torchtitan
from scaling.exports.batch import make_batch
from scaling.exports.folded import folded_rules
from scaling.exports.llama import torchtitan_name
from scaling.model_config import ModelFamily
from scaling.schedule import lr_factor
from tests.conftest import tiny_run

installed = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not here: make engines")
STEPS = 20


def titan_run() -> RunConfig:
    family = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=64, activation="swiglu", norm_gain=True, queries_per_kv=2)
    optimizer = OptimizerConfig(lr=2.0**-6, weight_decay=0.1, clip_norm=0.5)
    training = TrainingConfig(steps=STEPS, batch_size=8)
    run = tiny_run(64, family=family, optimizer=optimizer, training=training, residual_multiplier=0.5, attention_multiplier=0.5)
    return run.model_copy(update={"schedule": ScheduleConfig(kind="wsd", warmup_fraction=0.2, decay_fraction=0.3)})


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, text in torchtitan.export_files(titan_run(), make_batch(titan_run(), 1, 4)).items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torchtitan_recipe", "param_groups"):
        sys.modules.pop(name, None)
    return importlib.import_module("torchtitan_recipe")


@installed
@pytest.mark.filterwarnings("ignore")
def test_every_tensor_in_torchtitan_has_the_folded_rule(recipe: Any) -> None:
    from torchtitan.components.optimizer import OptimizersContainer

    config = recipe.run()
    model = config.model_spec.model.build()
    torch.manual_seed(0)
    model.init_states()
    groups, _ = OptimizersContainer._build_param_groups(model, config.optimizer.param_groups, {})
    held = {name: group for group in groups["AdamW"] for name in group["param_names"]}
    weights = dict(model.named_parameters())
    assert set(held) == set(weights) == {torchtitan_name(rule.name) for rule, _ in folded_rules(titan_run())}
    for rule, factor in folded_rules(titan_run()):
        name = torchtitan_name(rule.name)
        group, weight = held[name], weights[name]
        assert (group["lr"], group["weight_decay"], group["eps"]) == (rule.lr, rule.weight_decay, rule.eps), name
        assert tuple(weight.shape) == rule.shape, name
        if math.isnan(rule.init_std):
            assert bool((weight == factor).all()), name
        else:
            assert weight.std().item() == pytest.approx(rule.init_std, rel=5 / math.sqrt(2 * weight.numel())), name


@installed
@pytest.mark.filterwarnings("ignore")
def test_torchtitans_schedule_is_the_runs_at_every_step(recipe: Any) -> None:
    from torchtitan.components.optimizer import OptimizersContainer

    config = recipe.run()
    model = config.model_spec.model.build()
    optimizers = OptimizersContainer(config.optimizer, model_parts=[model])
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)
    peaks = [group["initial_lr"] for group in optimizers.optimizers[0].param_groups]
    for step in range(STEPS):
        expected = [peak * lr_factor(titan_run().schedule, step, STEPS) for peak in peaks]
        assert [group["lr"] for group in optimizers.optimizers[0].param_groups] == pytest.approx(expected, rel=1e-12)
        optimizers.optimizers[0].step()
        schedulers.step()


@installed
@pytest.mark.filterwarnings("ignore")
def test_pipeline_stages_are_refused(recipe: Any) -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(ValueError, match="pipeline_parallel_degree"):
        recipe.configure(config)


def test_what_torchtitan_cannot_express_is_refused_all_at_once() -> None:
    family = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32, qk_norm=True)
    found = {fault.where for fault in torchtitan.faults(tiny_run(64, family=family))}
    assert found == {"model.activation", "model.norm_gain", "model.qk_norm"}
    assert torchtitan.faults(titan_run()) == []
