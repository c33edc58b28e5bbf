"""The OLMo-core export: its files here; and inside OLMo-core 3.0.0, where that is installed, every tensor and the losses (make engines)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scaling.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from scaling.errors import ConfigError
from scaling.exports import olmo
from scaling.exports.batch import make_batch
from scaling.exports.folded import folded_rules
from scaling.exports.llama import olmo_name
from scaling.model import build_model
from scaling.model_config import ModelFamily
from scaling.optimizer import build_optimizer, set_lr
from tests.conftest import tiny_run

installed = pytest.mark.skipif(importlib.util.find_spec("olmo_core") is None, reason="OLMo-core is not here: make engines")
ignored = pytest.mark.filterwarnings("ignore")
"""OLMo-core and what it imports warn of their own future."""
STEPS = 6
ROOT = Path(__file__).parents[3]
RANKS = Path(__file__).with_name("olmo_ranks.py")


def olmo_run(qk_norm: bool = False, rules: str = "mup", **optimizer: Any) -> RunConfig:
    """Width 64 from base 32, with multipliers on embedding, branches and attention, all of which are folded."""
    family = ModelFamily(
        depth=2, head_dim=8, context=16, vocab_size=32, activation="swiglu", norm_gain=True, qk_norm=qk_norm, queries_per_kv=2
    )
    settings = OptimizerConfig(lr=2.0**-6, weight_decay=0.1, **({"clip_norm": None} | optimizer))
    training = TrainingConfig(steps=STEPS, batch_size=8, micro_batch_size=4)
    factors: dict[str, Any] = {"residual_multiplier": 0.5, "attention_multiplier": 0.5, "embedding_multiplier": 4.0}
    run = tiny_run(64, kind=rules, family=family, optimizer=settings, training=training, **factors)
    return run.model_copy(
        update={"schedule": ScheduleConfig(kind="wsd", warmup_fraction=0.34, decay_fraction=0.5, final_factor=0.1)}
    )


def exported(run: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exported olmo_core_recipe.py, imported from its folder."""
    for name, text in olmo.export_files(run, make_batch(run, 1, None)).items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("olmo_core_recipe", "param_groups"):
        sys.modules.pop(name, None)
    return importlib.import_module("olmo_core_recipe")


def train_module(recipe: Any) -> Any:
    return recipe.train_module_config().build(recipe.model_config().build(init_device="meta"), device=torch.device("cpu"))


@installed
@ignored
@pytest.mark.parametrize(
    ("qk_norm", "rules", "optimizer"),
    [(False, "mup", "adamw"), (True, "mup", "adamw"), (True, "completep", "adamw"), (False, "mup", "adam")],
)
def test_every_tensor_in_olmo_core_has_the_folded_rule(
    qk_norm: bool, rules: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = olmo_run(qk_norm, rules, kind=optimizer)
    module = train_module(exported(run, tmp_path, monkeypatch))
    assert type(module.optim) is {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer]
    groups = {id(parameter): group for group in module.optim.param_groups for parameter in group["params"]}
    weights = dict(module.model.named_parameters())
    assert set(weights) == {olmo_name(rule.name) for rule, _ in folded_rules(run)}
    for rule, factor in folded_rules(run):
        weight = weights[olmo_name(rule.name)]
        group = groups[id(weight)]
        assert (group["initial_lr"], group["weight_decay"], group["eps"]) == (rule.lr, rule.weight_decay, rule.eps), rule.name
        assert group["betas"] == (run.optimizer.beta1, run.optimizer.beta2)
        assert tuple(weight.shape) == rule.shape, rule.name
        if math.isnan(rule.init_std):
            assert bool((weight == factor).all()), rule.name
        else:
            assert weight.std().item() == pytest.approx(rule.init_std, rel=5 / math.sqrt(2 * weight.numel())), rule.name


@installed
@ignored
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_train_module_trains_the_run(qk_norm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same weights, unfolded: losses of the toolkit's model with multipliers, and of OLMo-core's, two micro-batches a step."""
    run = olmo_run(qk_norm)
    module = train_module(exported(run, tmp_path, monkeypatch))
    theirs, ours = dict(module.model.named_parameters()), build_model(run)
    with torch.no_grad():
        for rule, factor in folded_rules(run):
            ours.get_parameter(rule.name).copy_(theirs[olmo_name(rule.name)] / factor)
    start = {rule.name: theirs[olmo_name(rule.name)].detach().clone() for rule, _ in folded_rules(run)}
    optimizer, metrics = build_optimizer(ours, run), {}
    module._trainer = SimpleNamespace(
        global_step=0, max_steps=STEPS, record_metric=lambda name, value, *_, **__: metrics.update({name: float(value)})
    )
    module._trainer.record_ce_loss = lambda value, *_, **__: metrics.update(loss=float(value))
    found, expected, lrs, rule_lrs = [], [], [], []
    for step, tokens in enumerate(torch.randint(0, 32, (STEPS, 8, 17), generator=torch.Generator().manual_seed(5))):
        module.trainer.global_step = step + 1  # as OLMo-core's Trainer counts
        module.zero_grads()
        module.train_batch({"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
        module.optim_step()
        found.append(metrics["loss"])
        lrs.append([group["lr"] for group in module.optim.param_groups])
        set_lr(optimizer, run.schedule, step, STEPS)
        optimizer.zero_grad()
        loss = ours.loss(tokens)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        rule_lrs.append(optimizer.param_groups[0]["lr"])
    assert len(set(found)) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)
    factors = [step[0] / lrs[2][0] for step in lrs]
    assert factors == pytest.approx([lr / rule_lrs[2] for lr in rule_lrs], rel=1e-12)
    assert len(set(factors)) > 3
    for rule, factor in folded_rules(run):
        ours_now, theirs_now = ours.get_parameter(rule.name) * factor, theirs[olmo_name(rule.name)]
        apart, moved = (ours_now - theirs_now).norm(), (theirs_now - start[rule.name]).norm()
        assert apart < 1e-3 * moved, rule.name


@installed
def test_two_processes_under_fsdp_and_recomputation_start_and_train_as_one(tmp_path: Path) -> None:
    run = olmo_run(qk_norm=True, clip_norm=0.3)
    for name, text in olmo.export_files(run, make_batch(run, 2, 2)).items():
        (tmp_path / name).write_text(text)
    for world in (1, 2):
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={world}",
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        result = subprocess.run([*start, str(RANKS), str(tmp_path)], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"found-{world}.json").read_text()) for world in (1, 2))
    assert len(set(one["losses"])) == STEPS
    assert min(one["norms"]) > 0.3
    for key in ("losses", "norms"):
        assert two[key] == pytest.approx(one[key], rel=1e-5)
    # The sum of a tensor's entries at the start: the same draws, whole on one process or sharded over two.
    assert two["tensors"].keys() == one["tensors"].keys()
    for name, values in one["tensors"].items():
        assert two["tensors"][name] == pytest.approx(values, rel=1e-12), name


@installed
@ignored
def test_a_tied_embedding_with_one_multiplier_is_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = olmo_run()
    run = tiny_run(64, kind="sp", family=ModelFamily(**run.model.model_dump(exclude={"width"}) | {"tied_embeddings": True}))
    module = train_module(exported(run, tmp_path, monkeypatch))
    assert module.model.lm_head.w_out.weight is module.model.embeddings.weight
    rule = next(rule for rule, _ in folded_rules(run) if rule.name == "embedding.weight")
    assert module.model.embeddings.weight.std().item() == pytest.approx(rule.init_std, rel=5 / math.sqrt(2 * 32 * 64))
    held = [group for group in module.optim.param_groups if module.model.embeddings.weight in set(group["params"])]
    assert [group["initial_lr"] for group in held] == [rule.lr]


@installed
@ignored
def test_the_configs_survive_being_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = exported(olmo_run(), tmp_path, monkeypatch)
    for config in (recipe.model_config(), recipe.train_module_config()):
        assert type(config).from_dict(json.loads(json.dumps(config.as_config_dict()))) == config


@installed
@ignored
def test_what_is_the_runs_cannot_be_set_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = exported(olmo_run(), tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="scheduler: set by the export"):
        recipe.train_module_config(scheduler=None)
    with pytest.raises(TypeError, match="compil_model"):
        recipe.train_module_config(compil_model=True)
    with pytest.raises(ValueError, match="the trainer has 9 steps and the run 6"):
        recipe.train_module_config().scheduler.get_lr(1.0, 1, 9)


@installed
@ignored
def test_a_model_that_is_not_the_plans_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = exported(olmo_run(), tmp_path, monkeypatch)
    config = recipe.model_config()
    config.lm_head.bias = True
    with pytest.raises(ValueError, match=r"lm_head\.w_out\.bias matches 0 rows"):
        config.build()


@installed
@ignored
def test_another_version_of_olmo_core_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = exported(olmo_run(), tmp_path, monkeypatch)
    monkeypatch.setattr(recipe, "WRITTEN_FOR", "2.9.0")
    with pytest.raises(ValueError, match="this recipe is for 2"):
        recipe.model_config()


def test_what_olmo_core_cannot_express_is_refused_all_at_once() -> None:
    family = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32, rope_base=10_000.5)
    run = tiny_run(64, family=family)
    half = run.model_copy(update={"training": run.training.model_copy(update={"precision": "fp16"})})
    found = {fault.where for fault in olmo.faults(half)}
    assert found == {"model.activation", "model.norm_gain", "training.precision", "model.rope_base"}
    assert olmo.faults(olmo_run(qk_norm=True)) == []


def test_a_tied_embedding_with_two_multipliers_is_refused() -> None:
    run = olmo_run()
    tied = run.model_copy(update={"model": run.model.model_copy(update={"tied_embeddings": True})})
    with pytest.raises(ConfigError, match="no folded form"):
        olmo.plan_of(tied)


def test_the_plan_names_olmo_cores_tensors_and_the_batch_is_in_sequences() -> None:
    files = olmo.export_files(olmo_run(qk_norm=True), make_batch(olmo_run(), 2, 2))
    patterns = {row["pattern"] for row in json.loads(files["plan.json"])["tensors"]}
    assert {r"blocks\.\d+\.attention\.q_norm\.weight", r"lm_head\.norm\.weight"} <= patterns
    shape = json.loads(files["model.json"])
    assert (shape["micro_batch_sequences"], shape["batch_sequences"], shape["context_tokens"]) == (2, 8, 16)
