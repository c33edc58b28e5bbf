"""The plain PyTorch recipe against `explain`'s rows and against the trainer, tensor by tensor."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from scaling.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from scaling.data import prepare, train_batch
from scaling.exports.plan import make_plan, schedule_dict
from scaling.exports.pytorch import export_files
from scaling.exports.recipes import param_groups as recipe
from scaling.model import Transformer, build_model
from scaling.model_config import ModelFamily
from scaling.parametrization import tensor_rules
from scaling.schedule import lr_factor
from scaling.train import Trainer
from tests.conftest import tiny_run

WITH_GAINS = ModelFamily(depth=3, head_dim=8, context=16, vocab_size=32, activation="swiglu", norm_gain=True, qk_norm=True)
SCHEDULES = [ScheduleConfig(kind=kind, final_factor=0.1) for kind in ("constant", "linear", "cosine", "wsd")]


def exported(run: RunConfig, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The recipe as it lies in an export, imported from there, and its plan."""
    for name, text in export_files(make_plan(run, "multipliers")).items():
        (folder / name).write_text(text)
    spec = importlib.util.spec_from_file_location("exported_param_groups", folder / "param_groups.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.read_plan(folder / "plan.json")


@pytest.mark.parametrize("kind", ["sp", "mup", "completep", "umup", "spectral", "sp-per-layer", "mup-simple"])
def test_every_tensor_of_the_optimizer_has_what_the_rules_say(kind: str, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(lr=2.0**-7, weight_decay=0.1)
    run = tiny_run(128, kind=kind, family=WITH_GAINS, optimizer=optimizer)
    module, plan = exported(run, tmp_path)
    model = build_model(run)
    held = {name: group for group in module.build_optimizer(model, plan).param_groups for name in group["names"]}
    rules = tensor_rules(run)
    assert set(held) == {rule.name for rule in rules}
    rows = {name: row for name, _, row in module.match(model, plan)}
    for rule in rules:
        group, row = held[rule.name], rows[rule.name]
        assert (group["lr"], group["weight_decay"], group["eps"]) == (rule.lr, rule.weight_decay, rule.eps), rule.name
        std = row["init_std"]
        assert row["init_constant"] == 1.0 if math.isnan(rule.init_std) else std == rule.init_std, rule.name
        assert row["multiplier"] == rule.multiplier, rule.name


def test_training_by_the_recipe_is_the_trainers_to_the_last_bit(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(lr=2.0**-6, weight_decay=0.1, clip_norm=0.5)
    run = tiny_run(64, optimizer=optimizer, training=TrainingConfig(steps=8, batch_size=4, validation_sequences=8, seed=3))
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    trainer = Trainer(run, corpus)
    expected = [trainer.step(step) for step in range(8)]

    module, plan = exported(run, tmp_path)
    model: Transformer = build_model(run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    module.initialize(model, plan, seed=run.training.seed)
    adamw = module.build_optimizer(model, plan)
    scheduler, found = module.build_scheduler(adamw, plan), []
    for step in range(8):
        tokens = torch.from_numpy(train_batch(corpus, step=step, data_seed=0, batch_size=4, context=16))
        adamw.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        norm = module.clip_gradients(model, plan)
        adamw.step()
        scheduler.step()
        found.append((float(loss.detach()), float(norm)))
    assert found == expected
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_the_recipes_schedule_is_ours_at_every_step(schedule: ScheduleConfig) -> None:
    for steps in (1, 7, 40):
        run = tiny_run(training=TrainingConfig(steps=steps, batch_size=4)).model_copy(update={"schedule": schedule})
        plan = {"schedule": schedule_dict(run)}
        ours = [lr_factor(schedule, step, steps) for step in range(steps)]
        assert [recipe.lr_factor(plan, step) for step in range(steps)] == ours


def test_what_does_not_fit_the_model_is_said_at_once(tmp_path: Path) -> None:
    module, plan = exported(tiny_run(64), tmp_path)
    plan["tensors"][0]["pattern"] = "absent"
    plan["tensors"][1]["shape"] = [1, 1]
    with pytest.raises(ValueError, match=r"embedding.weight matches 0 rows.*has shape \[64, 64\].*absent matches no parameter"):
        module.param_groups(build_model(tiny_run(64)), plan)


def test_a_plan_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    module, plan = exported(tiny_run(64), tmp_path)
    plan["tensors"][0]["lr_scale"] = 2.0
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match="unknown or missing key 'lr_scale'"):
        module.read_plan(tmp_path / "plan.json")
