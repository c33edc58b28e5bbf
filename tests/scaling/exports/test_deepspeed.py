"""The DeepSpeed export inside DeepSpeed: its config accepted, and two gloo processes that train as the plain recipe does, ZeRO 1 to 3."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scaling.config import OptimizerConfig, TrainingConfig
from scaling.errors import ConfigError
from scaling.exports.batch import make_batch
from scaling.exports.deepspeed import KNOWN_KEYS, OTHER_RUN, OWN_KEYS, REMOVED_KEYS, config, export_files, known_keys
from scaling.exports.plan import make_plan
from scaling.parametrization import tensor_rules
from tests.conftest import tiny_run

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not here: the extra `engines`, Linux only", allow_module_level=True)
ROOT = Path(__file__).parents[3]
STEPS = 4
TRAINING = TrainingConfig(steps=STEPS, batch_size=8, validation_sequences=8)
RUN = tiny_run(64, optimizer=OptimizerConfig(lr=2.0**-6, weight_decay=0.1, clip_norm=0.5), training=TRAINING)
SCRIPT = Path(__file__).with_name("deepspeed_ranks.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found: the plain recipe's losses, and under each ZeRO stage losses and every tensor's settings."""
    folder = tmp_path_factory.mktemp("deepspeed")
    plan, batch = make_plan(RUN, "multipliers"), make_batch(RUN, devices=2, micro=2)
    for stage in (1, 2, 3):
        (folder / f"zero{stage}").mkdir()
        for name, text in export_files(plan, batch, stage, {}, "").items():
            (folder / f"zero{stage}" / name).write_text(text)
    (folder / "run.json").write_text(RUN.model_dump_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([*command, str(SCRIPT), str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_two_processes_train_as_the_plain_recipe(trained: dict[str, Any], stage: str) -> None:
    plain = trained["plain"]["losses"]
    assert len(set(plain)) == STEPS
    assert trained[stage]["losses"] == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_every_tensor_in_the_engine_has_what_the_rules_say(trained: dict[str, Any], stage: str) -> None:
    held = trained[stage]["tensors"]
    rules = tensor_rules(RUN)
    assert {name: tuple(values) for name, values in held.items()} == {
        rule.name: (rule.lr, rule.weight_decay, rule.eps) for rule in rules
    }


def test_keys_that_deepspeed_would_pass_over_are_refused() -> None:
    plan, batch = make_plan(RUN, "multipliers"), make_batch(RUN, 2, 2)
    with pytest.raises(ConfigError) as caught:
        config(plan, batch, 1, {"zero_optimisation": {}, "train_batch_size": 3, "wall_clock_breakdown": True})
    assert [fault.where for fault in caught.value.faults] == ["--merge: zero_optimisation", "--merge: train_batch_size"]
    assert "zero_optimization" in caught.value.faults[0].cure


READS = """
import json, sys
from deepspeed.runtime import config

class Asked(dict):
    names = set()
    def get(self, name, default=None): self.names.add(name); return super().get(name, default)
    def __contains__(self, name): self.names.add(name); return super().__contains__(name)
    def __getitem__(self, name): self.names.add(name); return super().__getitem__(name)
    def keys(self): return self

config.DeepSpeedConfig(Asked(train_batch_size=1))
print(json.dumps([sorted(Asked.names), sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)]))
"""


def test_the_keys_are_those_that_deepspeeds_own_config_asks_for() -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", READS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True).stdout
    asked, removed = json.loads(found.splitlines()[-1])
    assert removed == sorted(REMOVED_KEYS)
    # Asked for where processes have met.
    met = {"data_parallel_size", "sequence_parallel_size"}
    assert sorted({*OWN_KEYS, *KNOWN_KEYS, *OTHER_RUN, *REMOVED_KEYS} - met) == asked


@pytest.mark.parametrize(
    ("key", "words"), [("elasticity", "has been removed"), ("bfloat16", "is set by"), ("gradient_allreduce_op", "another run")]
)
def test_keys_that_deepspeed_reads_are_refused_for_what_they_are(key: str, words: str) -> None:
    (fault,) = known_keys({key: {}, "dataloader_drop_last": True, "hybrid_engine": {}}, "mine.json")
    assert fault.where == f"mine.json: {key}"
    assert words in fault.what


def test_the_batch_triplet_comes_out_even_or_is_refused() -> None:
    batch = make_batch(RUN, devices=2, micro=2)
    assert (batch.sequences, batch.micro, batch.accumulation) == (8, 2, 2)
    with pytest.raises(ConfigError, match="does not divide over 3 devices"):
        make_batch(RUN, devices=3, micro=None)
    with pytest.raises(ConfigError, match="for example --micro-batch 2"):
        make_batch(RUN, devices=2, micro=3)
