"""Layouts over processes: the losses of one process whatever the mesh, and refusals before a process starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaling.checkpoint import SHARDS
from scaling.config import OptimizerConfig, RunConfig, RuntimeConfig, TrainingConfig
from scaling.data import prepare
from scaling.errors import ConfigError, StudyError
from scaling.model_config import ModelFamily
from scaling.parallel import Layout, parse_layout, require_layout
from scaling.parametrization import tensor_rules
from scaling.ranks import Team
from scaling.records import read_metrics, read_record
from scaling.train import Progress, train_run
from tests.bench.layouts import best_log2_lr, furthest, losses
from tests.conftest import tiny_run
from tests.scaling.elastic import curve, torchrun, write_run

PLAIN = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32)
EVERY_KIND = PLAIN.model_copy(update={"norm_gain": True, "qk_norm": True, "activation": "swiglu", "queries_per_kv": 2})
STEPS = 8
TOLERANCE = 1e-5
"""Nats per token, in fp32."""
BF16 = 1e-3


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The run with every kind of tensor, by one process."""
    return trained(laid(None), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    """Two processes for all layouts of two."""
    with Team() as team:
        yield team


def laid(
    layout: str | None,
    family: ModelFamily = EVERY_KIND,
    precision: str = "fp32",
    every: int | None = None,
    background: bool = False,
) -> RunConfig:
    """A run in which muP scales (width 64 of base 32), clipping cuts, gradients accumulate and a rank has no validation batch."""
    settings = {"steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "validation_sequences": 40, "precision": precision}
    training = TrainingConfig.model_validate(settings)
    run = tiny_run(64, family=family, optimizer=OptimizerConfig(lr=2.0**-6, clip_norm=0.3, weight_decay=0.1), training=training)
    parallel = None if layout is None else parse_layout(layout)
    runtime = RuntimeConfig(
        log_every_steps=1,
        checkpoint_every_steps=every,
        checkpoint_async=background,
        parallel=parallel,
        processes=parallel.processes if parallel else 1,
    )
    return run.model_copy(update={"runtime": runtime})


def trained(run: RunConfig, directory: Path, team: Team | None = None, copy_to: Path | None = None) -> list[float]:
    """Losses of every step, the validation loss and the gradient norms. copy_to: gets what a kill after step 7 would leave."""

    def copy(progress: Progress) -> None:
        if copy_to is not None and progress.step == 7:
            while not copied_whole(directory, copy_to):
                shutil.rmtree(copy_to)

    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    record = train_run(run, directory, corpus, copy, team=team)
    assert record.loss is not None
    rows = [row for row in read_metrics(directory / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(run.training.steps))
    return [row["loss"] for row in rows] + [record.loss] + [row["grad_norm"] for row in rows]


def copied_whole(directory: Path, copy: Path) -> bool:
    """Whether nothing vanished while it was copied, since a checkpoint may be written at that moment."""
    try:
        shutil.copytree(directory, copy)
    except shutil.Error:
        return False
    state = copy / SHARDS / "state.json"
    return not state.exists() or (copy / SHARDS / json.loads(state.read_text())["folder"] / ".metadata").exists()


def test_the_compared_run_is_clipped_under_muP(one: list[float]) -> None:
    """Else equal losses would say nothing of the norm over shards, or of the groups."""
    clip, rules = laid(None).optimizer.clip_norm, tensor_rules(laid(None))
    assert clip is not None
    assert min(one[STEPS + 1 :]) > clip
    assert len({rule.lr for rule in rules}) > 1


@pytest.mark.parametrize(
    "layout", ["fsdp=2", "fsdp=2,zero=2,recompute=full", "tp=2", "tp=2,sp=on,recompute=full", "dp=2,recompute=full"]
)
def test_two_processes_have_the_losses_and_norms_of_one(tmp_path: Path, pair: Team, one: list[float], layout: str) -> None:
    assert trained(laid(layout), tmp_path, pair) == pytest.approx(one, abs=TOLERANCE)


def test_the_best_learning_rate_of_a_small_cell_is_that_of_one_process(pair: Team) -> None:
    """All losses of all learning rates are, too. `make bench` has more layouts and steps."""
    rates = (-7.5, -6.0, -4.5)
    alone = losses(None, rates, 12, pair, micro=8)
    best = best_log2_lr(alone)
    assert rates[0] < best < rates[-1]
    for layout in ("dp=2", "fsdp=2", "tp=2"):
        found = losses(layout, rates, 12, pair, micro=8)
        assert furthest(found, alone) < TOLERANCE
        assert best_log2_lr(found) == pytest.approx(best, abs=1e-4)


def test_tied_embeddings_are_those_of_one_process(tmp_path: Path, pair: Team) -> None:
    tied = PLAIN.model_copy(update={"tied_embeddings": True})
    alone = trained(laid(None, tied), tmp_path / "tied-1")
    assert trained(laid("fsdp=2", tied), tmp_path / "tied-2", pair) == pytest.approx(alone, abs=TOLERANCE)


def test_bf16_under_fsdp_is_that_of_one_process_and_not_fp32(tmp_path: Path, pair: Team) -> None:
    """To three times what was measured over eight seeds (docs/distributed.md); one process's fp32 is further away."""
    rough = trained(laid(None, PLAIN, "bf16"), tmp_path / "one")[: STEPS + 1]
    assert trained(laid("fsdp=2", PLAIN, "bf16"), tmp_path / "two", pair)[: STEPS + 1] == pytest.approx(rough, abs=BF16)
    exact = trained(laid(None, PLAIN), tmp_path / "fp32")[: STEPS + 1]
    assert max(abs(a - b) for a, b in zip(exact, rough, strict=True)) > BF16


def test_a_cut_sharded_run_goes_on_bit_by_bit_and_under_any_other_layout(tmp_path: Path, pair: Team) -> None:
    """Also where the next checkpoint was half written."""
    sharded = laid("fsdp=2", every=4)
    whole = trained(sharded, tmp_path / "whole", pair, copy_to=tmp_path / "cut")
    assert (tmp_path / "cut" / SHARDS / "state.json").exists()
    torn = tmp_path / "cut" / SHARDS / "step-8"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    assert not (tmp_path / "whole" / SHARDS).exists()
    for layout in ("fsdp=2", "tp=2", None):
        shutil.copytree(tmp_path / "cut", tmp_path / str(layout))
        resumed = trained(laid(layout, every=4), tmp_path / str(layout), pair)
        record = read_record(tmp_path / str(layout))
        assert record is not None
        assert record.resumed_from_step == 4
        assert resumed == (whole if layout == "fsdp=2" else pytest.approx(whole, abs=TOLERANCE))


def test_a_run_whose_checkpoints_are_written_in_the_background_is_the_same_and_goes_on_from_them(
    tmp_path: Path, pair: Team
) -> None:
    behind = laid("fsdp=2", every=2, background=True)
    whole = trained(behind, tmp_path / "whole", pair, copy_to=tmp_path / "cut")
    assert whole == trained(laid("fsdp=2"), tmp_path / "plain", pair)
    assert not (tmp_path / "whole" / SHARDS).exists()
    assert trained(behind, tmp_path / "cut", pair) == whole
    record = read_record(tmp_path / "cut")
    assert record is not None
    assert record.resumed_from_step >= 4


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_under_torchrun_ends_bit_by_bit_as_an_undisturbed_one(tmp_path: Path, pair: Team) -> None:
    """Rank 1 as the ranks meet first, then rank 0 in the middle of the second checkpoint (`make bench` kills at random moments)."""
    run = laid("fsdp=2", every=3)
    trained(run, tmp_path / "whole", pair)
    log = tmp_path / "log"
    path = write_run(tmp_path / "run.yaml", run)
    agent = torchrun(path, tmp_path / "killed", "fsdp=2", log, restarts=2, deaths="1@meeting,0@writing")
    try:
        assert agent.wait(timeout=100) == 0, log.read_text()
    finally:
        agent.terminate()
        agent.wait()
    said = log.read_text()
    assert said.count("exitcode: -9") == 2
    assert "Traceback" not in said
    record = read_record(tmp_path / "killed")
    assert record is not None
    assert record.resumed_from_step == 3
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


def test_a_sharded_run_goes_on_from_the_checkpoint_of_one_process(tmp_path: Path, pair: Team) -> None:
    whole = trained(laid(None, every=4), tmp_path / "whole", copy_to=tmp_path / "cut")
    assert trained(laid("fsdp=2"), tmp_path / "cut", pair) == pytest.approx(whole, abs=TOLERANCE)
    record = read_record(tmp_path / "cut")
    assert record is not None
    assert record.resumed_from_step == 4


def test_a_sharded_checkpoint_of_another_run_or_without_its_parts_is_refused(tmp_path: Path) -> None:
    run, folder = laid(None), tmp_path / SHARDS
    folder.mkdir()
    (folder / "state.json").write_text('{"folder": "step-4", "run_id": "other", "state": {"step": 4}}')
    with pytest.raises(StudyError, match="belongs to run other"):
        trained(run, tmp_path)
    (folder / "state.json").write_text(f'{{"folder": "step-4", "run_id": "{run.run_id}", "state": {{"step": 4}}}}')
    with pytest.raises(StudyError, match="step-4: cannot be read"):
        trained(run, tmp_path)


def words(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return "\n".join(str(fault) for fault in error.value.faults)


def test_all_that_is_wrong_with_a_written_layout_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_layout("fdsp=2,tp=0,sp,dp=2,dp=3,zero=1")
    assert len(error.value.faults) == 5
    for part in ("'fdsp' is no part", "did you mean fsdp?", "tp: 0", "sp: has no value", "dp: is given twice", "zero: 1"):
        assert part in words(error)


def test_all_that_a_layout_cannot_divide_is_said_at_once_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Team, "_assemble", lambda *_: pytest.fail("a process was started"))
    run = laid("fsdp=3,tp=3,sp=on").model_copy(update={"optimizer": OptimizerConfig(kind="muon")})
    with pytest.raises(ConfigError) as error:
        trained(run, tmp_path)
    said = words(error)
    for part in (
        "8 attention heads",
        "4 key/value heads",
        "inner width 256",
        "batch_size 8",
        "model.context 16",
        "muon is not known",
    ):
        assert part in said
    assert not list(tmp_path.iterdir())


def test_a_mesh_of_another_size_than_its_processes_is_refused() -> None:
    run = laid("fsdp=2,tp=2")
    with pytest.raises(ConfigError, match="is 4 processes, and torchrun started 2"):
        require_layout(run, 2)
    with pytest.raises(ConfigError, match=r"is 4 processes, and runtime\.processes is 2"):
        require_layout(run.model_copy(update={"runtime": RuntimeConfig(parallel=Layout(fsdp=2, tp=2), processes=2)}))


def test_background_checkpoints_of_one_file_or_none_are_refused() -> None:
    for layout, wrong in ((None, 2), ("dp=2", 2), ("fsdp=2", 1)):
        with pytest.raises(ConfigError) as error:
            require_layout(laid(layout, background=True))
        assert [fault.where for fault in error.value.faults] == ["runtime.checkpoint_async"] * wrong


def test_settings_that_a_mesh_would_ignore_are_refused() -> None:
    run = laid("dp=1,sp=on,zero=2")
    with pytest.raises(ConfigError) as error:
        require_layout(run)
    assert [fault.where for fault in error.value.faults] == ["sp", "zero"]
