"""What --use-mup gives every tensor, as the export states it: here, and inside megatron-core where that is installed (make engines)."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaling.config import InitConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from scaling.exports import megatron
from scaling.exports.batch import make_batch
from scaling.model_config import ModelFamily
from scaling.parametrization import tensor_rules
from scaling.schedule import lr_factor, warmup_steps
from tests.conftest import tiny_run

ROOT = Path(__file__).parents[3]
STEPS = 10
SCHEDULES = [
    ScheduleConfig(kind=kind, warmup_fraction=0.3, decay_fraction=0.4, final_factor=0.1)
    for kind in ("constant", "linear", "cosine", "wsd")
]
installed = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not here: make engines")


def megatron_run(**optimizer: Any) -> RunConfig:
    """Width 128 from 32; what Megatron can express but for eps."""
    family = ModelFamily(depth=2, head_dim=16, context=16, vocab_size=512, activation="swiglu", norm_gain=True)
    init = InitConfig(block_output="depth_scaled", hidden_std=0.04, embedding_std=0.03, readout_std=0.03)
    settings = OptimizerConfig(**({"lr": 2.0**-6, "weight_decay": 0.1, "weight_decay_rule": "unscaled"} | optimizer))
    training = TrainingConfig(steps=STEPS, batch_size=8)
    return tiny_run(128, family=family, init=init, optimizer=settings, training=training)


def test_only_eps_differs_where_the_rest_can_be_expressed() -> None:
    assert {fault.where for fault in megatron.faults(megatron_run(), [])} == {"eps"}
    assert megatron.faults(megatron_run(), ["eps"]) == []


def test_a_decay_that_megatron_cannot_express_is_refused() -> None:
    faults = megatron.faults(megatron_run(weight_decay_rule="constant"), ["eps"])
    assert [fault.where for fault in faults] == ["weight_decay"]
    assert "the run's 0.4, Megatron's 0.1" in faults[0].what


@pytest.mark.parametrize(
    ("init", "settings"),
    [
        ({"hidden_std": "fan_in"}, ["hidden_std"]),
        ({"block_output": "hidden"}, ["block_output"]),
        ({"hidden_std": "fan_in", "block_output": "zero", "readout_std": 0.05}, ["hidden_std", "block_output", "readout_std"]),
    ],
)
def test_the_cure_of_an_init_names_the_settings_that_cure_it(init: dict[str, Any], settings: list[str]) -> None:
    values = megatron_run().model_dump()
    values["parametrization"]["init"] |= init
    (fault,) = megatron.faults(RunConfig.model_validate(values), ["eps"])
    named = re.findall(r"--set parametrization\.init\.(\w+)=(\S+)", fault.cure)
    assert [key for key, _ in named] == settings
    values["parametrization"]["init"] |= {key: yaml.safe_load(value) for key, value in named}
    assert megatron.faults(RunConfig.model_validate(values), ["eps"]) == []


def test_an_lr_that_differs_cannot_be_accepted() -> None:
    run = megatron_run(lr_multipliers={"embedding": 2.0})
    assert "lr" in {fault.where for fault in megatron.faults(run, ["eps"])}
    assert "--accept lr" in {fault.where for fault in megatron.faults(run, ["lr"])}


def test_a_rotary_base_that_megatron_would_round_is_refused() -> None:
    values = megatron_run().model_dump()
    values["model"]["rope_base"] = 10000.7
    faults = megatron.shared_faults(RunConfig.model_validate(values))
    assert [(fault.where, fault.cure) for fault in faults] == [("model.rope_base", "--set model.rope_base=10001")]


def test_other_parametrizations_are_refused() -> None:
    run = tiny_run(64, kind="completep")
    assert {"parametrization", "model.activation", "model.norm_gain"} <= {fault.where for fault in megatron.faults(run, [])}


def in_megatron(flags: megatron.Flags, folder: Path | None = None) -> dict[str, Any]:
    """What Megatron's own code makes of the flags, and of the recipe in `folder`."""
    asked = json.dumps({"flags": dict(flags), "folder": folder and str(folder)})
    result = subprocess.run(
        [sys.executable, "-m", "tests.scaling.exports.megatron_values"],
        cwd=ROOT,
        input=asked,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert found["unknown_flags"] == []
    return found


@installed
def test_every_tensor_in_megatron_core_has_what_the_export_states() -> None:
    run = megatron_run()
    found = in_megatron(megatron.arguments(run, make_batch(run, 1, None)))
    assert found["softmax_scale"] == pytest.approx(1 / math.sqrt(16))
    assert found["output_mult"] == 0.25
    seen = set()
    for rule in tensor_rules(run):
        name = megatron_name(rule.name)
        values, stated = found["tensors"][name], megatron.native(run, rule)
        seen.add(name)
        assert (values["lr"], values["weight_decay"], values["eps"]) == (stated.lr, stated.weight_decay, stated.eps), rule.name
        if not math.isnan(stated.init_std):
            assert values["std"] == pytest.approx(stated.init_std, rel=5 / math.sqrt(2 * values["entries"])), rule.name
    assert seen == set(found["tensors"])


@installed
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_megatrons_own_schedule_is_the_runs_but_for_a_warm_up_that_is_one_update_late(schedule: ScheduleConfig) -> None:
    run = megatron_run().model_copy(update={"schedule": schedule})
    found = in_megatron(megatron.arguments(run, make_batch(run, 1, None)))
    ours = [lr_factor(schedule, step, STEPS) for step in range(STEPS)]
    warmup = warmup_steps(schedule, STEPS)
    assert warmup == 3
    expected = [step / warmup for step in range(warmup)] + ours[warmup:]
    assert len({len(factors) for factors in found["schedule"]} - {1}) == 1
    for step, factors in enumerate(found["schedule"]):
        assert factors == pytest.approx([expected[step]] * len(factors), rel=1e-12), step
    assert "k / 3 of the LR, the run's (k + 1) / 3" in (megatron.warmup_note(run) or "")


def test_without_a_warm_up_there_is_nothing_to_say_of_it() -> None:
    run = megatron_run().model_copy(update={"schedule": ScheduleConfig(kind="linear", warmup_fraction=0.0)})
    assert megatron.warmup_note(run) is None


def megatron_name(name: str) -> str:
    """Ours -> megatron-core's GPTModel, whose query, key and value, and gate and up, are one tensor each."""
    ends = {
        "embedding": "embedding.word_embeddings",
        "final_norm": "decoder.final_layernorm",
        "readout": "output_layer",
        "attention.query": "self_attention.linear_qkv",
        "attention.key": "self_attention.linear_qkv",
        "attention.value": "self_attention.linear_qkv",
        "attention.output": "self_attention.linear_proj",
        "mlp.up": "mlp.linear_fc1",
        "mlp.gate": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
        "attention_norm": "input_layernorm",
        "mlp_norm": "pre_mlp_layernorm",
        "attention.query_norm": "self_attention.q_layernorm",
        "attention.key_norm": "self_attention.k_layernorm",
    }
    parts = name.removesuffix(".weight").split(".")
    if parts[0] != "blocks":
        return f"{ends[parts[0]]}.weight"
    return f"decoder.layers.{parts[1]}.{ends['.'.join(parts[2:])]}.weight"
