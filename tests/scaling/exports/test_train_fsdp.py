"""The exported training program on gloo processes: every loss, gradient norm and tensor's settings are those of one process's trainer."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scaling.config import OptimizerConfig, RunConfig, TrainingConfig
from scaling.data import prepare, train_batch
from scaling.exports.folded import folded_rules
from scaling.exports.plan import Form, make_plan
from scaling.exports.pytorch import training_files
from scaling.model_config import ModelFamily
from scaling.parametrization import tensor_rules
from scaling.train import Trainer
from tests.conftest import tiny_run

ROOT = Path(__file__).parents[3]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
asked = pytest.mark.skipif("MUTRANSFER_ENGINES" not in os.environ, reason="minutes of processes: make engines")
STEPS = 8
TOLERANCE = 1e-5
"""Nats per token, in fp32."""
DATA = """
import torch

def tokens(path, step, first, count, sequences, context, vocabulary):
    return torch.load(path)[step][first : first + count]
"""


def the_run(**parametrization: Any) -> RunConfig:
    """Every kind of tensor, muP away from its base width, clipping at work, accumulation, decay, and a warm-up of several updates."""
    family = ModelFamily(
        depth=2, head_dim=8, context=16, vocab_size=32, norm_gain=True, qk_norm=True, activation="swiglu", queries_per_kv=2
    )
    optimizer = OptimizerConfig(lr=2.0**-6, clip_norm=0.3, weight_decay=0.1)
    training = TrainingConfig(steps=STEPS, batch_size=8, micro_batch_size=2, seed=3)
    run = tiny_run(64, family=family, optimizer=optimizer, training=training, residual_multiplier=0.5, **parametrization)
    schedule = run.schedule.model_copy(update={"warmup_fraction": 0.4})
    return run.model_copy(update={"schedule": schedule})


def export(run: RunConfig, form: Form, folder: Path) -> Path:
    """The exported files, with the trainer's batches in place of data.py; returns what --tokens is given."""
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    places = {"data_seed": run.training.data_seed, "batch_size": run.training.batch_size, "context": run.model.context}
    batches = [torch.from_numpy(train_batch(corpus, step=step, **places)) for step in range(STEPS)]
    torch.save(batches, folder / "batches.pt")
    for name, text in (training_files(make_plan(run, form)) | {"data.py": DATA}).items():
        (folder / name).write_text(text)
    return folder / "batches.pt"


def by_the_trainer(run: RunConfig) -> list[tuple[float, float]]:
    """Loss and gradient norm of every update, of one process."""
    trainer = Trainer(run, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size))
    return [trainer.step(step) for step in range(STEPS)]


def launch(processes: int, *command: str | Path) -> str:
    """What `torchrun` prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [*TORCHRUN, f"--nproc-per-node={processes}", *map(str, command)]
    result = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def read(lines: str) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in lines.splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes that train by the program under FSDP2, under tensor parallel and from there on under FSDP2, and start that again."""
    folder = tmp_path_factory.mktemp("fsdp")
    tokens = export(the_run(), "multipliers", folder)
    other = tmp_path_factory.mktemp("other")
    run = the_run()
    export(run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"lr": 2.0**-5})}), "multipliers", other)
    runs = [
        [folder, "--fsdp", "2", "--recompute", "--out", folder / "fsdp"],
        [folder, "--tp", "2", "--every", "3", "--until", "4", "--out", folder / "tp"],
        [other, "--out", folder / "tp"],
        [folder, "--seed", "9", "--out", folder / "tp"],
        [folder, "--every", "8", "--out", folder / "tp"],
        [folder, "--out", folder / "tp"],
    ]
    (folder / "options.json").write_text(json.dumps([[*map(str, options), "--tokens", str(tokens)] for options in runs]))
    launch(2, Path(__file__).with_name("fsdp_ranks.py"), folder, folder / "options.json")
    return folder


@pytest.fixture(scope="module")
def one() -> list[tuple[float, float]]:
    return by_the_trainer(the_run())


def same(
    found: list[tuple[int, float, float]], one: list[tuple[float, float]], first: int = 0, tolerance: float = TOLERANCE
) -> None:
    assert [step for step, _, _ in found] == list(range(first, first + len(found)))
    expected = one[first : first + len(found)]
    assert [loss for _, loss, _ in found] == pytest.approx([loss for loss, _ in expected], abs=tolerance)
    assert [norm for _, _, norm in found] == pytest.approx([norm for _, norm in expected], abs=tolerance)


@pytest.mark.slow
def test_two_processes_have_the_losses_and_norms_of_one(two: Path, one: list[tuple[float, float]]) -> None:
    clip = the_run().optimizer.clip_norm
    assert clip is not None
    assert min(norm for _, norm in one) > clip
    for number, steps in ((0, STEPS), (1, 4)):
        found = read((two / f"lines-{number}.jsonl").read_text())
        assert len(found) == steps
        same(found, one)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_every_tensors_settings_are_the_rules(two: Path, layout: str) -> None:
    held = json.loads((two / layout / "groups.json").read_text())
    assert {name: (group["peak_lr"], group["weight_decay"], group["eps"]) for name, group in held.items()} == {
        rule.name: (rule.lr, rule.weight_decay, rule.eps) for rule in tensor_rules(the_run())
    }


@pytest.mark.slow
def test_a_run_cut_under_tensor_parallel_goes_on_under_fsdp(two: Path, one: list[tuple[float, float]]) -> None:
    assert {path.name for path in (two / "tp").glob("step-*")} == {"step-3", "step-4", "step-8"}
    resumed = read((two / "lines-4.jsonl").read_text())
    assert len(resumed) == STEPS - 4
    same(resumed, one, first=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "what"), [(2, r"attention\.key\.weight/lr was 0.0078125, is 0.015625"), (3, "seed was 3, is 9")]
)
def test_the_checkpoint_of_another_run_is_refused_with_what_differs(two: Path, number: int, what: str) -> None:
    said = (two / f"said-{number}.txt").read_text()
    assert (two / f"lines-{number}.jsonl").read_text() == ""
    assert "tp/step-4 is of another run: " in said
    assert what in said


@pytest.mark.slow
def test_a_finished_run_says_so_when_it_is_started_again(two: Path) -> None:
    assert (two / "lines-5.jsonl").read_text() == ""
    assert "step-8 has the 8 updates that were asked for, of 8: nothing to train" in (two / "said-5.txt").read_text()
    assert (two / "rank-1-said-5.txt").read_text() == ""


@asked
@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--tp", "2"), ("--dp", "2", "--recompute"), ("--dp", "2", "--fsdp", "1", "--tp", "2")])
def test_four_processes_by_the_command_as_it_is_typed(
    tmp_path: Path, one: list[tuple[float, float]], layout: tuple[str, ...]
) -> None:
    tokens = export(the_run(), "multipliers", tmp_path)
    found = read(launch(4, tmp_path / "train_fsdp.py", "--tokens", tokens, *layout))
    assert len(found) == STEPS
    same(found, one)


@asked
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mup", "completep", "umup", "sp"])
def test_the_folded_form_trains_as_the_trainer_does(tmp_path: Path, kind: str) -> None:
    """Clipped by the unfolded gradients' norm; values are drawn in fp32 at another scale, so that last digits differ."""
    run = the_run()
    settings = {"kind": kind, "residual_multiplier": 0.5}
    run = RunConfig.model_validate(run.model_dump() | {"parametrization": settings})
    tokens = export(run, "folded", tmp_path)
    found = read(launch(2, tmp_path / "train_fsdp.py", "--tokens", tokens, "--tp", "2"))
    assert len(found) == STEPS
    same(found, by_the_trainer(run), tolerance=1e-4)
    held = json.loads((tmp_path / "out" / "groups.json").read_text())
    assert {name: group["peak_lr"] for name, group in held.items()} == {rule.name: rule.lr for rule, _ in folded_rules(run)}


@asked
@pytest.mark.slow
def test_bf16_is_near_fp32(tmp_path: Path, one: list[tuple[float, float]]) -> None:
    tokens = export(the_run(), "multipliers", tmp_path)
    found = read(launch(2, tmp_path / "train_fsdp.py", "--tokens", tokens, "--precision", "bf16"))
    assert [loss for _, loss, _ in found] == pytest.approx([loss for loss, _ in one], abs=2e-2)
    assert not math.isclose(found[-1][1], one[-1][0], abs_tol=1e-7)
