"""The Hugging Face export: its files here, and the model, groups and losses inside transformers where that is installed (make engines)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scaling.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from scaling.errors import ConfigError
from scaling.exports import huggingface
from scaling.exports.batch import make_batch
from scaling.exports.folded import folded_rules
from scaling.exports.llama import huggingface_name
from scaling.exports.plan import Form
from scaling.model import build_model
from scaling.model_config import ModelFamily
from scaling.parametrization import TensorRule, tensor_rules
from scaling.schedule import lr_factor
from tests.conftest import tiny_run

STEPS = 5
installed = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not here: make engines")
ignored = pytest.mark.filterwarnings("ignore")
"""transformers and what it imports warn of their own future."""


def llama_run(qk_norm: bool, **optimizer: Any) -> RunConfig:
    """Width 64 from base 32, with multipliers on embedding, branches, readout and attention."""
    family = ModelFamily(
        depth=2, head_dim=8, context=16, vocab_size=32, activation="swiglu", norm_gain=True, qk_norm=qk_norm, queries_per_kv=2
    )
    settings = OptimizerConfig(lr=2.0**-6, weight_decay=0.1, **({"clip_norm": None} | optimizer))
    training = TrainingConfig(steps=STEPS, batch_size=8, micro_batch_size=4)
    factors = {"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.5}
    run = tiny_run(64, family=family, optimizer=settings, training=training, **factors)
    return run.model_copy(update={"schedule": ScheduleConfig(kind="cosine", warmup_fraction=0.4, final_factor=0.1)})


def exported_rules(run: RunConfig, form: Form) -> list[tuple[TensorRule, float]]:
    """Each tensor's rule in the exported form, and the multiplier that went into the tensor."""
    return folded_rules(run) if form == "folded" else [(rule, 1.0) for rule in tensor_rules(run)]


def exported(run: RunConfig, form: Form, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exported trainer.py, imported from its folder."""
    settings = {"output_dir": str(folder / "out"), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    for name, text in huggingface.export_files(run, make_batch(run, 1, None), settings, "", form).items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("trainer", "param_groups"):
        sys.modules.pop(name, None)
    return importlib.import_module("trainer")


MODELS: list[tuple[bool, Form]] = [(False, "folded"), (True, "folded"), (False, "multipliers")]
"""Llama, Qwen 3, Granite."""


@installed
@ignored
@pytest.mark.parametrize(("qk_norm", "form"), MODELS)
def test_every_tensor_in_the_trainers_optimizer_has_the_exported_rule(
    qk_norm: bool, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = llama_run(qk_norm)
    trainer = exported(run, form, tmp_path, monkeypatch).build_trainer()
    trainer.create_optimizer_and_scheduler(STEPS)
    held = {name: group for group in trainer.optimizer.param_groups for name in group["names"]}
    rules = {huggingface_name(rule.name): rule for rule, _ in exported_rules(run, form)}
    assert set(held) == set(rules) == {name for name, _ in trainer.model.named_parameters()}
    for name, rule in rules.items():
        group = held[name]
        assert (group["initial_lr"], group["weight_decay"], group["eps"]) == (rule.lr, rule.weight_decay, rule.eps), name
    weights = dict(trainer.model.named_parameters())
    for rule, factor in exported_rules(run, form):
        weight = weights[huggingface_name(rule.name)]
        if math.isnan(rule.init_std):
            assert bool((weight == factor).all()), rule.name
        else:
            assert weight.std().item() == pytest.approx(rule.init_std, rel=5 / math.sqrt(2 * weight.numel())), rule.name


@installed
@ignored
@pytest.mark.parametrize(("qk_norm", "form"), MODELS)
def test_the_trainer_trains_the_run(qk_norm: bool, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same weights, unfolded: losses of the toolkit's model, and of the Trainer's. With multipliers clipping is the run's too."""
    run = llama_run(qk_norm, clip_norm=None if form == "folded" else 0.3)
    module = exported(run, form, tmp_path, monkeypatch)
    theirs, ours = module.build_model(tmp_path), build_model(run)
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for rule, factor in exported_rules(run, form):
            ours.get_parameter(rule.name).copy_(parameters[huggingface_name(rule.name)] / factor)
    batches = torch.randint(0, 32, (STEPS, 8, 17), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = theirs(batches[0, :, :-1]).logits
        assert torch.allclose(logits, ours(batches[0, :, :-1]), rtol=1e-5, atol=1e-5 * float(logits.abs().max()))
    expected = our_losses(run, ours, batches)

    # The Trainer's labels are the inputs, shifted by the model.
    rows = [{"input_ids": row, "labels": row} for row in batches.flatten(0, 1)]
    trainer = module.build_trainer(tmp_path, model=theirs, train_dataset=rows)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)  # type: ignore[method-assign]
    trainer.args.logging_steps = 1
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(set(found)) == STEPS
    assert found == pytest.approx(expected, abs=2e-4)
    for rule, factor in exported_rules(run, form):
        ours_now, theirs_now = ours.get_parameter(rule.name) * factor, parameters[huggingface_name(rule.name)]
        assert torch.allclose(ours_now, theirs_now, rtol=1e-3, atol=1e-5 * max(factor, 1.0)), rule.name


@installed
@ignored
def test_granite_trains_a_tied_embedding_with_two_multipliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llama_run(qk_norm=False)
    run = run.model_copy(update={"model": run.model.model_copy(update={"tied_embeddings": True})})
    with pytest.raises(ConfigError, match="no folded form"):
        huggingface.plan_of(run, "folded")
    theirs, ours = exported(run, "multipliers", tmp_path, monkeypatch).build_model(tmp_path), build_model(run)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    tokens = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(theirs.get_parameter(huggingface_name(name)))
        assert torch.allclose(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-6)


def our_losses(run: RunConfig, model: Any, batches: torch.Tensor) -> list[float]:
    from scaling.optimizer import build_optimizer, set_lr

    optimizer, losses = build_optimizer(model, run), []
    for step, tokens in enumerate(batches):
        set_lr(optimizer, run.schedule, step, STEPS)
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_norm or math.inf)
        assert run.optimizer.clip_norm is None or norm > run.optimizer.clip_norm
        optimizer.step()
        losses.append(loss.item())
    assert lr_factor(run.schedule, 0, STEPS) < 1
    return losses


def test_what_llama_does_not_have_is_refused_all_at_once() -> None:
    assert [fault.where for fault in huggingface.faults(tiny_run(64))] == ["model.activation", "model.norm_gain"]
    assert huggingface.faults(llama_run(qk_norm=True)) == []


def test_multipliers_that_granite_has_no_key_for_are_refused_all_at_once() -> None:
    family = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32, activation="swiglu", norm_gain=True, qk_norm=True)
    found = huggingface.faults(tiny_run(64, kind="umup", family=family, residual_attention_ratio=0.5), "multipliers")
    assert [fault.where for fault in found] == ["model.qk_norm", "parametrization"]
    assert all(
        words in found[1].what for words in ("each hidden matrix", "beside the one on MLPs", "attention's output", "MLP's output")
    )
    assert huggingface.faults(llama_run(qk_norm=False), "multipliers") == []


def test_granites_keys_are_the_forward_multipliers() -> None:
    config = huggingface.model_config(llama_run(qk_norm=False), "multipliers")
    assert config["architectures"] == ["GraniteForCausalLM"]
    found = {
        key: config[key] for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    }
    expected = {
        "embedding_multiplier": 4.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.5 / 8**0.5,
    }
    assert found == expected


def test_arguments_that_would_not_count_are_refused() -> None:
    run = llama_run(qk_norm=False)
    settings = {"learning_rate": 1.0, "fsdp_config": {"reshard_after_foward": True, "version": 2}}
    with pytest.raises(ConfigError) as caught:
        huggingface.training_arguments(run, make_batch(run, 2, 2), settings, "my.json")
    assert [fault.where for fault in caught.value.faults] == [
        "my.json: learning_rate",
        "my.json: fsdp_config.reshard_after_foward",
    ]


def test_the_plan_names_transformers_tensors() -> None:
    files = huggingface.export_files(llama_run(True), make_batch(llama_run(True), 2, 2), {}, "")
    patterns = [row["pattern"] for row in json.loads(files["plan.json"])["tensors"]]
    assert r"model\.layers\.\d+\.self_attn\.q_norm\.weight" in patterns
    arguments = json.loads(files["training_arguments.json"])
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (2, 2)
