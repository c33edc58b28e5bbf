"""Training: determinism, resume bit by bit, accumulation, clipping, divergence, schedules, precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from scaling.checkpoint import CHECKPOINT_NAME, save_checkpoint
from scaling.config import OptimizerConfig, RunConfig, RuntimeConfig, ScheduleConfig, TrainingConfig
from scaling.data import prepare
from scaling.errors import ConfigError, StudyError
from scaling.model_config import ModelFamily
from scaling.records import read_metrics, read_record, run_directory
from scaling.schedule import lr_factor
from scaling.train import Progress, Trainer, train_run
from tests.conftest import tiny_run


def corpus_of(run: RunConfig) -> Any:
    return prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)


def losses_of(directory: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(directory / "metrics.jsonl") if "loss" in row]


def every_step(run: RunConfig, checkpoint: int | None = None) -> RunConfig:
    return run.model_copy(update={"runtime": RuntimeConfig(log_every_steps=1, checkpoint_every_steps=checkpoint)})


def test_the_loss_falls_to_near_the_entropy_floor(tmp_path: Path) -> None:
    """The synthetic source has a known entropy: a model that beats it would be a bug, one far above it does not learn."""
    training = TrainingConfig(steps=150, batch_size=16, validation_sequences=64)
    run = tiny_run(32, log2_lr=-6, training=training)
    corpus = corpus_of(run)
    record = train_run(run, tmp_path, corpus)
    assert record.loss is not None
    assert corpus.entropy_floor is not None
    assert corpus.entropy_floor - 0.05 < record.loss < corpus.entropy_floor + 0.35
    assert record.initial_loss == pytest.approx(math.log(32), abs=0.1)


def test_the_same_run_twice_is_bit_identical_and_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    run = every_step(tiny_run())
    corpus = corpus_of(run)
    first, second = (train_run(run, tmp_path / name, corpus) for name in "ab")
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b")
    assert first.loss == second.loss
    assert train_run(run, tmp_path / "a", corpus).started_at == first.started_at
    assert len(losses_of(tmp_path / "a")) == run.training.steps


class Killed(Exception):
    """Stands for a kill in the middle of a run."""


@pytest.mark.parametrize(
    ("kill_at", "kind"), [(4, "adamw"), (7, "adamw"), (11, "adamw"), (7, "adam"), (7, "sgd"), (7, "lion"), (7, "muon")]
)
def test_resume_from_a_checkpoint_repeats_the_uninterrupted_run_bit_by_bit(tmp_path: Path, kill_at: int, kind: str) -> None:
    optimizer = OptimizerConfig.model_validate({"kind": kind, "lr": 0.01, "weight_decay": 0.1})
    run = every_step(tiny_run(optimizer=optimizer), checkpoint=3)
    corpus = corpus_of(run)
    whole = train_run(run, tmp_path / "whole", corpus)

    def kill(progress: Progress) -> None:
        if progress.step == kill_at:
            raise Killed

    with pytest.raises(Killed):
        train_run(run, tmp_path / "cut", corpus, kill)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # what a kill in the middle of a write leaves
    resumed = train_run(run, tmp_path / "cut", corpus)
    assert resumed.resumed_from_step == (kill_at - 1) // 3 * 3
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    assert (resumed.loss, resumed.tokens) == (whole.loss, whole.tokens)
    assert not (tmp_path / "cut" / CHECKPOINT_NAME).exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run = tiny_run()
    save_checkpoint(tmp_path, {"run_id": "other"})
    with pytest.raises(StudyError, match="belongs to run other"):
        train_run(run, tmp_path, corpus_of(run))
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"torn")
    with pytest.raises(StudyError, match="cannot be read"):
        train_run(run, tmp_path, corpus_of(run))


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulated_gradient_equals_the_unsplit_one(micro: int) -> None:
    def gradients(micro: int | None) -> dict[str, torch.Tensor]:
        run = tiny_run(training=TrainingConfig(batch_size=8, micro_batch_size=micro, steps=1, validation_sequences=8))
        trainer = Trainer(run, corpus_of(run))
        tokens = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(3))
        trainer.gradient(tokens)
        return {name: parameter.grad for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}

    whole, split = gradients(None), gradients(micro)
    assert whole.keys() == split.keys()
    for name, gradient in whole.items():
        relative = (gradient - split[name]).norm() / gradient.norm()
        assert relative < 1e-6, name


def test_clipping_bounds_the_gradient_and_logs_the_norm_before_it(tmp_path: Path) -> None:
    def trained(clip: float | None) -> tuple[list[float], Trainer]:
        run = every_step(tiny_run(optimizer=OptimizerConfig(lr=0.01, clip_norm=clip)))
        train_run(run, tmp_path / str(clip), corpus_of(run))
        trainer = Trainer(run, corpus_of(run))
        trainer.step(0)
        rows = read_metrics(tmp_path / str(clip) / "metrics.jsonl")
        return [row["grad_norm"] for row in rows if "grad_norm" in row], trainer

    (free, unclipped), (logged, clipped) = trained(None), trained(0.05)
    assert logged[0] == free[0] > 0.05
    norms = [
        math.sqrt(sum(float(p.grad.square().sum()) for p in trainer.model.parameters() if p.grad is not None))
        for trainer in (unclipped, clipped)
    ]
    assert norms == pytest.approx([free[0], 0.05], rel=1e-4)


def test_a_diverging_run_is_a_result_with_its_last_finite_loss(tmp_path: Path) -> None:
    run = tiny_run(
        optimizer=OptimizerConfig(lr=1e30, clip_norm=None),
        training=TrainingConfig(steps=30, batch_size=4, validation_sequences=8),
    )
    record = train_run(run, run_directory(tmp_path, run.run_id), corpus_of(run))
    assert (record.status, record.loss) == ("diverged", None)
    assert record.steps_done < 30
    assert record.last_finite_loss is not None
    assert read_record(run_directory(tmp_path, run.run_id)) == record


def test_a_run_that_ends_worse_than_it_began_has_diverged(tmp_path: Path) -> None:
    run = tiny_run(log2_lr=2, kind="sp")
    record = train_run(run, tmp_path, corpus_of(run))
    assert (record.status, record.steps_done) == ("diverged", run.training.steps)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_schedule(kind: str) -> None:
    schedule = ScheduleConfig.model_validate({"kind": kind, "warmup_fraction": 0.1, "decay_fraction": 0.5, "final_factor": 0.1})
    factors = [lr_factor(schedule, step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(factors) == 1
    if kind == "constant":
        assert set(factors[10:]) == {1.0}
        return
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0.1 < factors[-1] < 0.13
    assert factors[49] == (1.0 if kind == "wsd" else pytest.approx(factors[49]))
    assert factors[75] == pytest.approx(
        {"linear": 0.35, "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * 65 / 90)) / 2, "wsd": 0.55}[kind]
    )


def test_groups_are_few_and_keep_their_ratios_under_the_schedule() -> None:
    run = tiny_run(128, family=ModelFamily(depth=3, head_dim=8, context=16, vocab_size=32))
    trainer = Trainer(run, corpus_of(run))
    groups = trainer.optimizer.param_groups
    assert len(groups) <= 5
    peak = [group["peak_lr"] for group in groups]
    assert len(set(peak)) > 1
    for step in range(5):
        trainer.step(step)
        factor = lr_factor(run.schedule, step, run.training.steps)
        assert [group["lr"] for group in groups] == pytest.approx([lr * factor for lr in peak])


def test_bf16_follows_fp32_and_keeps_fp32_master_weights() -> None:
    def losses(precision: str) -> list[float]:
        training = TrainingConfig.model_validate(
            {"steps": 12, "batch_size": 8, "precision": precision, "validation_sequences": 8}
        )
        run = tiny_run(training=training)
        trainer = Trainer(run, corpus_of(run))
        history = [trainer.step(step)[0] for step in range(12)]
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        return history

    fp32, bf16 = losses("fp32"), losses("bf16")
    assert fp32 != bf16
    assert bf16 == pytest.approx(fp32, abs=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can do what the test wants refused")
@pytest.mark.parametrize(("precision", "device"), [("fp16", "cpu"), ("fp32", "cuda")])
def test_a_device_that_cannot_is_refused(precision: str, device: str) -> None:
    run = tiny_run(training=TrainingConfig.model_validate({"precision": precision}))
    run = run.model_copy(update={"runtime": RuntimeConfig.model_validate({"device": device})})
    with pytest.raises(ConfigError, match="CUDA"):
        Trainer(run, corpus_of(run))


def test_validation_during_a_run_does_not_change_it(tmp_path: Path) -> None:
    quiet = every_step(tiny_run())
    training = quiet.training.model_copy(update={"validate_every_steps": 4})
    watched = quiet.model_copy(update={"training": training})
    for name, run in (("quiet", quiet), ("watched", watched)):
        train_run(run, tmp_path / name, corpus_of(run))
    assert losses_of(tmp_path / "quiet") == losses_of(tmp_path / "watched")
    rows = read_metrics(tmp_path / "watched" / "metrics.jsonl")
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 7, 12]
