"""Branched training: branches are ordinary runs, read the same tokens, go on after a kill, and are compared by a stated definition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from analysis.branched_batch import BranchLosses, compare
from scaling.config import OptimizerConfig, RunConfig, TrainingConfig
from scaling.data import prepare
from scaling.errors import StudyError, UserError
from scaling.records import read_metrics, read_record, run_directory
from scaling.train import Trainer, train_run
from sweeps.branch import Branching, branches_of, compare_branches, make_branches, parent_run
from sweeps.cli import app
from tests.conftest import tiny_run


def runtime(run: RunConfig, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(run.model_dump() | {"runtime": settings})


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig, Any]:
    """A finished run of 20 steps with a checkpoint of step 8 kept, from the constant part of its schedule."""
    folder = tmp_path_factory.mktemp("parent")
    training = TrainingConfig(steps=20, batch_size=4, validation_sequences=8)
    run = runtime(tiny_run(16, training=training), keep_checkpoints_at_steps=[8], log_every_steps=1)
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    train_run(run, folder, corpus)
    return folder, run, corpus


def no_words(_: str) -> None:
    pass


def test_a_branch_at_the_runs_own_batch_and_lr_is_the_run_itself(parent: tuple[Path, RunConfig, Any], tmp_path: Path) -> None:
    """Step 8 to 10 lie before the decay: the same weights, moments, LR and batches give the same losses, bit by bit."""
    folder, run, corpus = parent
    asked = Branching(folder, 8, (1,))
    branches = branches_of(asked, run)
    make_branches(asked, run, branches, tmp_path, corpus, no_words)
    own = {row["step"]: row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row}
    found = {
        row["step"]: row["loss"]
        for row in read_metrics(run_directory(tmp_path, branches[0].run_id) / "metrics.jsonl")
        if "loss" in row
    }
    assert [found[0], found[1]] == [own[8], own[9]]


def test_branches_are_ordinary_runs_of_the_same_tokens_at_the_rules_lr(
    parent: tuple[Path, RunConfig, Any], tmp_path: Path
) -> None:
    folder, run, corpus = parent
    asked = Branching(folder, 8, (1, 2, 4), noise_every_steps=4)
    branches = branches_of(asked, run)
    make_branches(asked, run, branches, tmp_path, corpus, no_words)
    records = [read_record(run_directory(tmp_path, branch.run_id)) for branch in branches]
    assert [record.batch_tokens for record in records if record] == [64, 128, 256]
    assert len({record.tokens for record in records if record}) == 1
    assert [branch.optimizer.lr / run.optimizer.lr for branch in branches] == pytest.approx([1, math.sqrt(2), 2])
    found, noise = compare_branches(asked, branches, tmp_path, tolerance=0.01)
    assert [item.branch.batch_sequences for item in found.branches] == [4, 8, 16]
    assert [len(item.branch.loss) for item in found.branches] == [32, 32, 32]
    assert noise is not None
    assert noise.steps == 32
    assert "0.01 nats" in found.to_dict()["definition"]


def test_an_interrupted_branch_goes_on_and_a_finished_one_is_kept(parent: tuple[Path, RunConfig, Any], tmp_path: Path) -> None:
    folder, run, corpus = parent
    run = runtime(run, keep_checkpoints_at_steps=[8], checkpoint_every_steps=5, log_every_steps=1)
    asked = Branching(folder, 8, (1, 2))
    branches = branches_of(asked, run)
    make_branches(asked, run, branches, tmp_path / "whole", corpus, no_words)
    step, calls = Trainer.step, []

    def killed(self: Trainer, number: int) -> tuple[float, float]:
        if len(calls) == 12:
            raise KeyboardInterrupt
        calls.append(number)
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            make_branches(asked, run, branches, tmp_path / "cut", corpus, no_words)
    make_branches(asked, run, branches, tmp_path / "cut", corpus, no_words)
    whole, cut = (
        [read_record(run_directory(tmp_path / name, branch.run_id)) for branch in branches] for name in ("whole", "cut")
    )
    assert [record.loss for record in whole if record] == [record.loss for record in cut if record]
    assert [record.resumed_from_step for record in cut if record] == [10, 0]


def test_a_branch_without_its_start_is_not_trained_from_scratch(parent: tuple[Path, RunConfig, Any], tmp_path: Path) -> None:
    folder, run, corpus = parent
    branch = branches_of(Branching(folder, 8, (1,)), run)[0]
    with pytest.raises(StudyError, match="mutransfer branch"):
        train_run(branch, tmp_path, corpus)


def test_a_branch_gets_the_values_carried_to_its_parents_steps() -> None:
    run = tiny_run(optimizer=OptimizerConfig(lr=0.01), training=TrainingConfig(steps=400, batch_size=4))
    run = RunConfig.model_validate(run.model_dump() | {"base": run.base.model_dump() | {"steps": 100}})
    branch = branches_of(Branching(Path(), 100, (1,)), run)[0]
    assert branch.optimizer.lr == pytest.approx(0.005)
    assert branch.base.steps is None


def test_a_run_that_is_no_branch_keeps_its_name() -> None:
    assert "branch" not in tiny_run().identity()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 9}, ["no checkpoint of step 9; kept: [8]"]),
        ({"factors": (1, 3, 4)}, ["[3] do not divide"]),
        ({"rule": "surge"}, ["--b-noise"]),
        ({"noise_sequences": 8.0, "tokens": 10, "step": 3}, ["is surge's", "16 steps of the largest batch", "step 3"]),
    ],
)
def test_what_cannot_be_branched_is_refused_at_once(
    parent: tuple[Path, RunConfig, Any], changes: dict[str, Any], words: list[str]
) -> None:
    asked = Branching(**({"parent": parent[0], "step": 8, "factors": (1, 2)} | changes))
    with pytest.raises(UserError) as caught:
        parent_run(asked)
    assert len(caught.value.faults) == len(words)
    for word in words:
        assert word in str(caught.value)


def test_the_commands_answer_in_one_json_document(
    parent: tuple[Path, RunConfig, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "branch",
        str(parent[0]),
        "--step",
        "8",
        "--factors",
        "1,2",
        "--noise-every",
        "4",
        "--out",
        str(tmp_path),
        "--json",
    ]
    code = app(arguments, standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    assert code == (1 if document["at_least"] else 0)
    assert document["noise_scale"]["unit"] == "sequences"
    code = app(
        ["noise-scale", str(parent[0]), "--step", "8", "--batches", "8", "--sequences", "8", "--json"], standalone_mode=False
    )
    (window,) = json.loads(capsys.readouterr().out)["windows"]
    assert window["batch_sequences"] == 8
    assert code == (0 if window["interval"][1] is not None else 1)
    base = next(
        run
        for run in (tmp_path / "runs").iterdir()
        if yaml.safe_load((run / "config.yaml").read_text())["training"]["batch_size"] == 4
    )
    app(["noise-scale", str(base), "--windows", "1", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["windows"][0]["steps"] == 16


def losses(batch: int, excess: float, scatter: float = 0.001) -> BranchLosses:
    sequences = np.arange(1, 33) * 64.0
    noise = scatter * np.random.default_rng(batch).standard_normal(32)
    return BranchLosses(f"run{batch}", batch, 0.01, 2048 // batch, sequences, 2 + excess + noise * (batch > 4))


def compared(*branches: BranchLosses) -> Any:
    return compare(branches, tolerance=0.01, tokens=2048 * 16, context=16, lr_rule="sqrt", from_step=8)


def test_the_critical_batch_is_the_last_within_the_tolerance_before_the_first_that_is_not() -> None:
    found = compared(losses(64, 0.0), losses(32, 0.03), losses(16, 0.004), losses(8, -0.01), losses(4, 0.0))
    assert found.critical == 16
    assert found.bracket == (16.0, 32.0)
    assert found.crossing == pytest.approx(16 * 2 ** (0.006 / 0.026), rel=0.05)
    assert not found.censored


def test_the_critical_batch_is_at_least_the_largest_where_all_are_within() -> None:
    found = compared(losses(4, 0.0), losses(8, 0.001))
    assert found.censored
    assert found.bracket == (8.0, math.inf)
    assert "at least 8 sequences" in str(found)


def test_a_branch_near_the_tolerance_is_in_neither_end_of_the_bracket() -> None:
    found = compared(losses(4, 0.0), losses(8, 0.01, scatter=0.02), losses(16, 0.1))
    assert found.bracket == (4.0, 16.0)


def test_a_branch_that_diverged_is_beyond_the_critical_batch() -> None:
    lost = BranchLosses("lost", 16, 0.01, 128, np.array([]), np.array([]))
    found = compared(losses(4, 0.0), losses(8, 0.001), lost)
    assert (found.critical, found.censored) == (8, False)
    assert found.bracket == (8.0, 16.0)
    assert found.to_dict()["branches"][2]["excess"] is None
