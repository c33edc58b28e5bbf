"""Lion and Muon of the plain PyTorch recipe against the trainer's own: settings of every tensor, and training to the last bit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scaling.config import OptimizerConfig, OptimizerKind, RunConfig, TrainingConfig
from scaling.data import prepare, train_batch
from scaling.exports.folded import folded_rules
from scaling.exports.plan import Form, make_plan
from scaling.exports.pytorch import export_files
from scaling.model import build_model
from scaling.model_config import ModelFamily
from scaling.parametrization import tensor_rules
from scaling.train import Trainer
from tests.conftest import tiny_run

STEPS = 8
FAMILY = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32, activation="swiglu")
KINDS: tuple[OptimizerKind, ...] = ("lion", "muon")


def the_run(kind: OptimizerKind) -> RunConfig:
    optimizer = OptimizerConfig(kind=kind, lr=2.0**-9 if kind == "lion" else 2.0**-6, weight_decay=0.1, clip_norm=0.5)
    training = TrainingConfig(steps=STEPS, batch_size=4, validation_sequences=8, seed=3)
    return tiny_run(64, family=FAMILY, optimizer=optimizer, training=training, residual_multiplier=0.5)


def exported(run: RunConfig, form: Form, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """The recipe as it lies in an export, imported from there, and its plan."""
    for name, text in export_files(make_plan(run, form)).items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("param_groups", "lion_muon"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("param_groups")
    return module, module.read_plan(folder / "plan.json")


@pytest.mark.parametrize("form", ["multipliers", "folded"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_has_its_optimizer_and_what_the_rules_say(
    kind: OptimizerKind, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = the_run(kind)
    module, plan = exported(run, form, tmp_path, monkeypatch)
    optimizer = module.build_optimizer(build_model(run), plan)
    inner = getattr(optimizer, "optimizers", [optimizer])
    held = {name: (type(each).__name__, group) for each in inner for group in each.param_groups for name in group["names"]}
    rules = [rule for rule, _ in folded_rules(run)] if form == "folded" else tensor_rules(run)
    assert set(held) == {rule.name for rule in rules}
    classes = {"lion": "Lion", "muon": "Muon", "adamw": "AdamW"}
    for rule in rules:
        name, group = held[rule.name]
        assert name == classes[rule.optimizer], rule.name
        expected = (rule.lr, rule.weight_decay, None if kind == "lion" else rule.eps)
        assert (group["lr"], group["weight_decay"], group.get("eps")) == expected, rule.name


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_trainers_to_the_last_bit_also_after_a_restart(
    kind: OptimizerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = the_run(kind)
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    trainer = Trainer(run, corpus)
    expected = [trainer.step(step) for step in range(STEPS)]

    module, plan = exported(run, "multipliers", tmp_path, monkeypatch)
    model, found = build_model(run), []
    module.initialize(model, plan, seed=run.training.seed)
    optimizer = module.build_optimizer(model, plan)
    scheduler = module.build_scheduler(optimizer, plan)
    for step in range(STEPS):
        if step == STEPS // 2:
            kept = optimizer.state_dict(), scheduler.state_dict()
            optimizer = module.build_optimizer(model, plan)
            scheduler = module.build_scheduler(optimizer, plan)
            optimizer.load_state_dict(kept[0])
            scheduler.load_state_dict(kept[1])
        tokens = torch.from_numpy(train_batch(corpus, step=step, data_seed=0, batch_size=4, context=16))
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        norm = module.clip_gradients(model, plan)
        optimizer.step()
        scheduler.step()
        found.append((float(loss.detach()), float(norm)))
    assert found == expected
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True))


def losses(run: RunConfig, form: Form, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """In fp64, by the recipe's groups and clipping; the folded form in a model without multipliers."""
    folder.mkdir()
    module, plan = exported(run, form, folder, monkeypatch)
    model = build_model(run if form == "multipliers" else tiny_run(64, kind="sp", family=FAMILY)).double()
    module.initialize(model, plan, seed=1)
    optimizer, found = module.build_optimizer(model, plan), []
    for step in range(STEPS):
        tokens = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        module.clip_gradients(model, plan)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_folded_form_trains_the_same_function(kind: OptimizerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multipliers are powers of two, so that the draws are the same to the last digit."""
    run = the_run(kind)
    apart, together = (losses(run, form, tmp_path / form, monkeypatch) for form in ("multipliers", "folded"))
    assert abs(apart[-1] - apart[0]) > 1e-3
    assert together == apart


def test_a_torch_without_muon_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, plan = exported(the_run("muon"), "multipliers", tmp_path, monkeypatch)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"has no Muon: pip install 'torch>=2\.9'"):
        module.build_optimizer(build_model(the_run("muon")), plan)
