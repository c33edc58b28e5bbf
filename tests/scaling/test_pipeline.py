"""Stages of a pipeline over processes: their tensors, the losses of one process, checkpoints that know no stages, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from scaling.checkpoint import SHARDS
from scaling.config import OptimizerConfig, RunConfig
from scaling.errors import ConfigError
from scaling.model import Matrix, build_model, materialize
from scaling.parallel import require_layout
from scaling.parallel_pipeline import Stage, outline_stage
from scaling.ranks import Team
from scaling.records import read_record
from tests.scaling.test_parallel import PLAIN, STEPS, TOLERANCE, laid, trained, words


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The run with every kind of tensor, clipped, under muP away from its base (tests.scaling.test_parallel), by one process."""
    return trained(laid(None), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with Team() as team:
        yield team


def with_training(run: RunConfig, **training: object) -> RunConfig:
    return run.model_copy(update={"training": run.training.model_copy(update=training)})


def resumed_from(directory: Path) -> int:
    record = read_record(directory)
    assert record is not None
    return record.resumed_from_step


def built(run: RunConfig, rank: int) -> Stage:
    stage = outline_stage(run, rank)
    materialize(stage, run)
    return stage


def multipliers(model: nn.Module) -> dict[str, float]:
    return {name: module.multiplier for name, module in model.named_modules() if isinstance(module, Matrix)}


def test_stages_hold_the_tensors_of_the_whole_model_once_each_bit_by_bit() -> None:
    run = laid("pp=2,tp=2")
    stages = [built(run, rank) for rank in range(4)]
    assert [(stage.first, stage.last) for stage in stages] == [(True, False)] * 2 + [(False, True)] * 2
    first, last, whole = dict(stages[0].named_parameters()), dict(stages[2].named_parameters()), build_model(run)
    expected = dict(whole.named_parameters())
    assert not first.keys() & last.keys()
    assert (first | last).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in (first | last).items())
    assert multipliers(stages[0]) | multipliers(stages[2]) == multipliers(whole)


def test_stages_after_one_another_are_the_model() -> None:
    run = laid("pp=2")
    ids = torch.arange(32).reshape(2, 16)
    x: torch.Tensor = ids
    for rank in range(2):
        x = built(run, rank)(x)
    assert torch.equal(x, build_model(run)(ids))


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,recompute=full"])
def test_two_stages_have_the_losses_and_norms_of_one_process(tmp_path: Path, pair: Team, one: list[float], layout: str) -> None:
    assert trained(laid(layout), tmp_path, pair) == pytest.approx(one, abs=TOLERANCE)


def test_bf16_is_that_of_one_process(tmp_path: Path, pair: Team) -> None:
    rough = trained(laid(None, PLAIN, "bf16"), tmp_path / "one")
    staged = trained(laid("pp=2", PLAIN, "bf16"), tmp_path / "two", pair)
    assert staged[0] == rough[0]
    # Norms are summed over stages in another order; what that does to a weight can be one unit of bf16's last place, 0.4 %.
    assert staged[: STEPS + 1] == pytest.approx(rough[: STEPS + 1], abs=1e-3)


def test_a_cut_pipeline_goes_on_bit_by_bit_and_under_any_other_layout(tmp_path: Path, pair: Team) -> None:
    whole = trained(laid("pp=2", every=4), tmp_path / "whole", pair, copy_to=tmp_path / "cut")
    for layout in ("pp=2", "fsdp=2"):
        shutil.copytree(tmp_path / "cut", tmp_path / layout)
        shards = tmp_path / layout / SHARDS
        shutil.copytree(shards / "step-4", shards / "step-8")  # written, and cut before it counted
        went_on = trained(laid(layout, every=4), tmp_path / layout, pair)
        assert went_on == (whole if layout == "pp=2" else pytest.approx(whole, abs=TOLERANCE))
        assert resumed_from(tmp_path / layout) == 4


def test_a_pipeline_goes_on_as_one_process_and_that_as_a_pipeline(tmp_path: Path, pair: Team, one: list[float]) -> None:
    trained(laid("pp=2", every=4), tmp_path / "stages", pair, copy_to=tmp_path / "alone")
    trained(laid(None, every=6), tmp_path / "alone", copy_to=tmp_path / "again")
    assert resumed_from(tmp_path / "alone") == 4
    assert trained(laid("pp=2"), tmp_path / "again", pair) == pytest.approx(one, abs=TOLERANCE)
    assert resumed_from(tmp_path / "again") == 6


def test_a_pipeline_goes_on_from_shards(tmp_path: Path, pair: Team, one: list[float]) -> None:
    trained(laid("fsdp=2", every=4), tmp_path / "whole", pair, copy_to=tmp_path / "cut")
    assert trained(laid("pp=2"), tmp_path / "cut", pair) == pytest.approx(one, abs=TOLERANCE)
    assert resumed_from(tmp_path / "cut") == 4


def test_all_that_keeps_a_run_from_its_stages_is_said_at_once_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Team, "_assemble", lambda *_: pytest.fail("a process was started"))
    tied = PLAIN.model_copy(update={"tied_embeddings": True})
    run = with_training(laid("pp=3,tp=3", tied), micro_batch_size=4).model_copy(
        update={"optimizer": OptimizerConfig(kind="muon")}
    )
    with pytest.raises(ConfigError) as error:
        trained(run, tmp_path)
    assert len(error.value.faults) == 7
    for part in (
        "model.depth 2 (blocks) cannot be shared equally by 3",
        "8 attention heads",
        "4 makes 2 of the 8 sequences of a data rank's share: 3 stages need 3 micro-batches",
        "set it to 2 or less",
        "model.tied_embeddings: is true",
        "muon is not known",
    ):
        assert part in words(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layout", "micro", "said"),
    [
        ("pp=2", None, "is not set, and makes 1 of the 8 sequences"),
        ("pp=2,dp=2", 8, "8 leaves a remainder of the 4 sequences"),
        ("pp=2,dp=8", 1, "set training.batch_size to 16 or more"),
    ],
)
def test_micro_batches_that_do_not_fill_the_stages_are_refused(layout: str, micro: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        require_layout(with_training(laid(layout), micro_batch_size=micro))
    (fault,) = error.value.faults
    assert fault.where == "training.micro_batch_size"
    assert said in str(fault)


def test_a_batch_that_leaves_a_remainder_is_said_once_of_a_pipeline() -> None:
    run = with_training(laid("pp=2,dp=3"), micro_batch_size=None)
    with pytest.raises(ConfigError) as error:
        require_layout(run)
    assert [fault.where for fault in error.value.faults] == ["--parallel dp x fsdp"]
