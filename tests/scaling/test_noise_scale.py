"""The gradient at two batch sizes, measured: the training stays what it is, the numbers are those of the gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from analysis.noise_scale import NoiseScale, noise_scale, norms_of, read_norms
from scaling.batch_rules import lr_factor_at_batch, surge
from scaling.config import RunConfig, RuntimeConfig, TrainingConfig
from scaling.data import prepare, stream_batch, train_batch
from scaling.horizon import horizon_factors
from scaling.model import build_model
from scaling.noise_scale import example_norms, extra_passes, part_sequences
from scaling.records import read_metrics
from scaling.train import Trainer, train_run
from tests.conftest import tiny_run


def corpus_of(run: RunConfig) -> Any:
    return prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)


def measured(run: RunConfig, every: int | None = 2, **runtime: Any) -> RunConfig:
    settings = {"noise_scale_every_steps": every, "log_every_steps": 1, **runtime}
    return RunConfig.model_validate(run.model_dump() | {"runtime": settings})


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return read_metrics(directory / "metrics.jsonl")


@pytest.mark.parametrize("micro", [None, 2])
def test_training_is_bit_identical_with_the_measurement_on_and_off(tmp_path: Path, micro: int | None) -> None:
    plain = tiny_run(training=TrainingConfig(steps=12, batch_size=8, micro_batch_size=micro, validation_sequences=8))
    corpus = corpus_of(plain)
    off = train_run(measured(plain, None), tmp_path / "off", corpus)
    on = train_run(measured(plain), tmp_path / "on", corpus)
    assert (on.run_id, on.loss) == (off.run_id, off.loss)
    with_norms = rows_of(tmp_path / "on")
    assert [row["step"] for row in with_norms if "gradient_sq" in row] == [0, 2, 4, 6, 8, 10]
    assert [{key: row[key] for key in row if key != "gradient_sq"} for row in with_norms] == rows_of(tmp_path / "off")


def test_norms_are_those_of_the_gradients_of_the_batch_and_its_parts() -> None:
    run = measured(tiny_run(training=TrainingConfig(steps=3, batch_size=16, validation_sequences=8)), 1)
    corpus = corpus_of(run)
    trainer, expected = Trainer(run, corpus), Trainer(run, corpus)
    tokens = torch.from_numpy(train_batch(corpus, step=0, data_seed=0, batch_size=16, context=run.model.context))
    trainer.step(0)
    norms = trainer.norms
    assert norms is not None
    assert (norms.batch_sequences, norms.part_sequences) == (16, 4)

    def squared(part: torch.Tensor) -> float:
        expected.gradient(part)
        return sum(float(parameter.grad.double().square().sum()) for parameter in expected.model.parameters())  # type: ignore[union-attr]

    assert norms.batch == pytest.approx(squared(tokens), rel=1e-5)
    assert norms.parts == pytest.approx(np.mean([squared(part) for part in torch.split(tokens, 4)]), rel=1e-5)


def test_an_accumulation_gives_the_same_norms_as_extra_passes() -> None:
    run = measured(tiny_run(training=TrainingConfig(steps=3, batch_size=8, micro_batch_size=2, validation_sequences=8)), 1)
    trainer = Trainer(run, corpus_of(run))
    trainer.step(0)
    tokens = torch.from_numpy(train_batch(trainer.corpus, step=1, data_seed=0, batch_size=8, context=run.model.context))
    _, norms = trainer.measured_gradient(tokens)
    direct = extra_passes(trainer.model.loss, list(trainer.model.parameters()), tokens, 2)
    assert norms.parts == pytest.approx(direct / 4, rel=1e-5)


def test_processes_measure_what_one_process_measures(tmp_path: Path) -> None:
    run = tiny_run(training=TrainingConfig(steps=4, batch_size=8, validation_sequences=8))
    corpus = corpus_of(run)
    train_run(measured(run), tmp_path / "one", corpus)
    train_run(measured(run, processes=2), tmp_path / "two", corpus)
    one, two = (read_norms(tmp_path / name) for name in ("one", "two"))
    assert one.part_sequences.tolist() == two.part_sequences.tolist() == [2.0, 2.0]
    assert two.parts == pytest.approx(one.parts, rel=1e-4)
    assert two.batch == pytest.approx(one.batch, rel=1e-4)


@pytest.mark.parametrize(
    ("batch", "ranks", "micro", "expected"),
    [(16, 1, None, 4), (16, 2, None, 4), (4, 1, None, 1), (2, 2, None, 1), (13, 1, None, 1), (24, 1, None, 6), (16, 1, 2, 2),
     (16, 1, 16, 4)],
)  # fmt: skip
def test_a_batch_is_split_into_at_least_two_parts(batch: int, ranks: int, micro: int | None, expected: int) -> None:
    assert part_sequences(batch, ranks, micro) == expected


@pytest.mark.parametrize(("batch", "precision", "words"), [(1, "fp32", "two sequences"), (4, "fp16", "fp16")])
def test_what_cannot_be_measured_is_refused(batch: int, precision: str, words: str) -> None:
    values = tiny_run().model_dump()
    values["training"] |= {"batch_size": batch, "precision": precision}
    values["runtime"] = RuntimeConfig(noise_scale_every_steps=1).model_dump()
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate(values)


class Double(torch.nn.Module):
    """A tiny transformer in fp64 after some steps of training."""

    def __init__(self) -> None:
        super().__init__()
        run = tiny_run(16, training=TrainingConfig(steps=40, batch_size=8, validation_sequences=8))
        self.corpus, self.run = corpus_of(run), run
        trainer = Trainer(run, self.corpus)
        for step in range(20):
            trainer.step(step)
        self.model = copy.deepcopy(trainer.model).double()
        self.loss = self.model.loss

    def batch(self, step: int, size: int) -> torch.Tensor:
        return torch.from_numpy(train_batch(self.corpus, step=step, data_seed=7, batch_size=size, context=self.run.model.context))


@pytest.fixture(scope="module")
def double() -> Double:
    return Double()


def test_example_norms_are_those_of_one_example_at_a_time(double: Double) -> None:
    tokens = double.batch(0, 6)
    norms, each = example_norms(double.model, tokens, chunk_sequences=4)
    parameters = list(double.model.parameters())
    alone = [extra_passes(double.loss, parameters, example[None], 1) for example in tokens]
    assert each.tolist() == pytest.approx(alone, rel=1e-6)
    assert norms.parts == pytest.approx(np.mean(alone), rel=1e-6)
    assert norms.batch == pytest.approx(extra_passes(double.loss, parameters, tokens, 6), rel=1e-6)


def test_both_estimators_find_the_same_noise_scale(double: Double) -> None:
    """Parts of four sequences and single examples, on batches of their own, at the same weights: each within the other's interval."""
    parameters = list(double.model.parameters())
    by_example = [
        {"step": step, "gradient_sq": example_norms(double.model, double.batch(step, 16))[0].row()} for step in range(24)
    ]
    by_parts = []
    for step in range(100, 124):
        tokens = double.batch(step, 16)
        sums = {size: extra_passes(double.loss, parameters, tokens, size) for size in (4, 16)}
        row = {"batch_sequences": 16, "batch": sums[16], "part_sequences": 4, "parts": sums[4] / 4}
        by_parts.append({"step": step, "gradient_sq": row})
    examples, parts = (noise_scale(norms_of(rows)) for rows in (by_example, by_parts))
    assert overlap(examples, parts)
    assert examples.bounded
    assert parts.bounded
    assert examples.trace == pytest.approx(parts.trace, rel=0.15)


def overlap(one: NoiseScale, other: NoiseScale) -> bool:
    return one.interval[0] < other.sequences < one.interval[1] and other.interval[0] < one.sequences < other.interval[1]


def test_the_model_of_the_estimators_is_the_toolkits_own() -> None:
    """All of its variants have a rule for torch.func: grouped queries, SwiGLU, gains, tied embeddings."""
    run = tiny_run()
    family = run.model.model_copy(update={"activation": "swiglu", "norm_gain": True, "qk_norm": True, "num_kv_heads": 2})
    model = build_model(run.model_copy(update={"model": family}))
    tokens = torch.from_numpy(train_batch(corpus_of(run), step=0, data_seed=0, batch_size=4, context=16))
    _, each = example_norms(model, tokens)
    alone = [extra_passes(model.loss, list(model.parameters()), example[None], 1) for example in tokens]
    assert each.tolist() == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("ratio", [0.25, 2.0, 32.0])
def test_batch_rules_are_the_published_ones(ratio: float) -> None:
    assert lr_factor_at_batch("sqrt", ratio) == pytest.approx(ratio**0.5)
    assert lr_factor_at_batch("sqrt", ratio) == horizon_factors(1 / ratio, 0.5)["lr"]
    assert lr_factor_at_batch("linear", ratio) == ratio
    expected = (8**0.5 + 8**-0.5) / ((8 / ratio) ** 0.5 + (ratio / 8) ** 0.5)
    assert lr_factor_at_batch("surge", ratio, noise_ratio=8) == pytest.approx(expected)


def test_surge_peaks_at_the_noise_batch_and_is_the_square_root_far_below() -> None:
    assert surge(1) == 1
    assert surge(0.5) == pytest.approx(surge(2))
    assert surge(2) < 1
    assert surge(1e-6) / surge(0.25e-6) == pytest.approx(2, rel=1e-5)
    with pytest.raises(ValueError, match="B_noise"):
        lr_factor_at_batch("surge", 2)


def test_batches_of_every_size_read_on_in_the_same_order() -> None:
    corpus = corpus_of(tiny_run())
    order = [train_batch(corpus, step=step, data_seed=3, batch_size=4, context=16) for step in (5, 6, 7, 8, 9, 10)]
    whole = np.concatenate(order)
    for size in (2, 4, 6, 12):
        places: dict[str, Any] = {"after_step": 5, "order_of": 4, "data_seed": 3, "batch_size": size, "context": 16}
        read = [stream_batch(corpus, step=step, **places) for step in range(24 // size)]
        assert np.array_equal(np.concatenate(read), whole)
