"""Early stopping: whom each rule ends and leaves; a study with pruned runs ends, tells them apart, and has the same optimum."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from analysis.optimum import WALL, CellOptimum, cell_optima
from analysis.table import load_table
from scaling.config import RunConfig, TrainingConfig
from scaling.config_file import load_config
from scaling.data import prepare
from scaling.errors import ConfigError
from scaling.records import Pruned, RunRecord, read_metrics, read_record, read_records, run_directory, write_record
from scaling.train import train_run
from sweeps.driver import drive
from sweeps.fleet import board_of, work
from sweeps.plan import make_plan
from sweeps.progress import Watcher
from sweeps.pruning import Curve, siblings, watch_for
from sweeps.queue import open_storage, optuna_trial
from sweeps.status import status_document
from sweeps.study import PruningConfig, StudyConfig
from sweeps.study_dir import open_study
from tests.conftest import tiny_run
from tests.sweeps.studies import write_study
from tests.sweeps.test_plan import record_of, study_of

STEPS = 100
SAFE = PruningConfig(kind="safe")
Loss = Callable[[int], float]


def falling(end: float, excess: float, left: float = 1.0) -> Loss:
    """Training loss that lies `excess` above a curve which ends at 2, and at the end `left` times that."""
    batches = random.Random(0)
    noise = [batches.gauss(0, 0.1) for _ in range(STEPS)]
    return lambda step: end + 3 * 0.95**step + excess * (1 - (1 - left) * step / STEPS) + noise[step]


def run_at(log2_lr: float, seed: int = 0) -> RunConfig:
    training = TrainingConfig(steps=STEPS, batch_size=4, seed=seed, data_seed=seed)
    return tiny_run(log2_lr=log2_lr, training=training)


def curve(log2_lr: float, loss: Loss, final: float | None, status: str = "complete") -> Curve:
    return Curve(f"run at {log2_lr}", log2_lr, 0, final, {step: loss(step) for step in range(0, STEPS, 2)}, status)


def ended(pruning: PruningConfig, log2_lr: float, loss: Loss, finished: list[Curve]) -> Pruned | None:
    watch = watch_for(pruning, run_at(log2_lr), finished)
    rows = [{"step": step, "loss": loss(step)} for step in range(0, STEPS, 2)]
    return None if watch is None else next((found for row in rows if (found := watch(row)) is not None), None)


BEST = curve(-7, falling(2.0, 0.0), 2.0)
STAYING = [BEST, curve(-8, falling(2.0, 0.4, 0.8), 2.32), curve(-9, falling(2.0, 1.0, 0.8), 2.8)]
"""Of a gap in mid-run 0.8 and more is left at the end."""
CLOSING = [BEST, curve(-6, falling(2.0, 0.3, 0.1), 2.03), curve(-5, falling(2.0, 0.6, 0.1), 2.06)]
"""High learning rates: worse in mid-run, and nearly as good once the LR has decayed."""


def test_a_run_that_is_sure_to_end_on_a_wall_is_ended_with_a_bound_that_is_one() -> None:
    found = ended(SAFE, -10, falling(2.0, 1.2, 0.8), STAYING)
    assert found is not None
    assert found.rule == "safe"
    assert found.reference == BEST.run_id
    assert found.bound is not None
    assert 2.0 * (1 + WALL) < found.bound < 2.0 + 0.8 * 1.2
    assert found.reference_loss is not None
    assert found.smoothed_loss - found.reference_loss == pytest.approx(1.2, abs=0.1)


@pytest.mark.parametrize("excess", [0.0, 0.45, 0.8])
def test_a_run_that_may_end_below_a_wall_is_left(excess: float) -> None:
    assert ended(SAFE, -10, falling(2.0, excess, 0.8), STAYING) is None


def test_a_gap_that_closes_in_the_decay_ends_nobody() -> None:
    """The same gap on the other side, where the finished runs' gaps stayed, would."""
    assert ended(SAFE, -4, falling(2.0, 1.2, 0.1), CLOSING) is None
    assert ended(SAFE, -10, falling(2.0, 1.2, 0.8), STAYING) is not None


def test_a_loss_that_has_blown_up_counts_no_more_than_the_gaps_that_were_seen() -> None:
    """Measured: a loss of fifteen times the initial one came back to half of it."""
    seen = [BEST, curve(-6, falling(2.0, 0.1), 2.1), curve(-5, falling(2.0, 0.2), 2.2)]
    assert ended(SAFE, -4, falling(2.0, 80.0, 0.01), seen) is None


@pytest.mark.parametrize(
    ("pruning", "finished"),
    [
        (SAFE, STAYING[:2]),
        (SAFE, [BEST, STAYING[1], CLOSING[1]]),
        (SAFE.model_copy(update={"min_finished": 4}), STAYING),
        (PruningConfig(), STAYING),
    ],
    ids=["two finished", "one on its side", "min_finished", "none"],
)
def test_nobody_is_ended_where_too_little_is_known(pruning: PruningConfig, finished: list[Curve]) -> None:
    assert ended(pruning, -10, falling(2.0, 1.2, 0.8), finished) is None


def test_every_run_makes_its_share_of_the_steps() -> None:
    steps = [ended(PruningConfig(kind="safe", min_share=share), -10, falling(2.0, 1.2, 0.8), STAYING) for share in (0.3, 0.7)]
    assert [found.step for found in steps if found is not None] == [31, 71]


@pytest.mark.parametrize("kind", ["median", "hyperband", "asha"])
def test_optunas_rules_end_a_bad_run_and_leave_the_best(kind: str) -> None:
    pruning = PruningConfig.model_validate({"kind": kind})
    seen = [curve(-7 - place, falling(2.0, 0.1 * place), 2.0 + 0.1 * place) for place in range(8)]
    found = ended(pruning, -4, falling(2.0, 2.0), seen)
    assert found is not None
    assert (found.rule, found.bound, found.reference) == (kind, None, None)
    assert ended(pruning, -7, falling(1.9, 0.0), seen) is None


def test_a_median_rule_ends_a_run_that_would_have_been_the_best() -> None:
    """Why it is not safe: it takes the gap in mid-run for the one at the end."""
    worse_at_first = falling(1.9, 0.9, 0.0)
    assert ended(PruningConfig(kind="median"), -5, worse_at_first, STAYING) is not None
    assert ended(SAFE, -5, worse_at_first, STAYING) is None


def test_a_run_is_compared_with_runs_that_differ_in_the_learning_rate_alone(tmp_path: Path) -> None:
    plan = make_plan(study_of(tmp_path, seeds=2), {})
    records = [record_of(planned, 2.0) for planned in plan]
    mine = next(planned for planned in plan if (planned.parametrization, planned.width, planned.seed) == ("mup", 16, 1))
    for kind, seeds in (("safe", {1}), ("median", {0, 1})):
        found = siblings(PruningConfig.model_validate({"kind": kind}), mine.run, records)
        cell = {(item.parametrization, item.width, item.seed) for item in found}
        assert cell == {("mup", 16, seed) for seed in seeds}
        assert len(found) == 3 * len(seeds)
    other = mine.run.model_copy(update={"optimizer": mine.run.optimizer.model_copy(update={"weight_decay": 0.3})})
    assert siblings(SAFE, other, records) == []
    assert siblings(PruningConfig(), mine.run, records) == []


def test_pruning_is_no_part_of_a_run_or_of_what_a_study_is(tmp_path: Path) -> None:
    plain, pruned = study_of(tmp_path), study_of(tmp_path, pruning={"kind": "safe"})
    assert {item.run_id for item in make_plan(plain, {})} == {item.run_id for item in make_plan(pruned, {})}
    assert plain.identity() == pruned.identity()


def test_the_middle_of_the_range_is_made_first_where_runs_are_pruned(tmp_path: Path) -> None:
    plan = make_plan(study_of(tmp_path, pruning={"kind": "safe"}, log2_lr={"low": -10, "high": -4}), {})
    assert [item.log2_lr for item in plan if (item.parametrization, item.width) == ("mup", 32)][:3] == [-7, -8, -6]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"pruning": {"kind": "safe", "min_share": 0.1}}, "pruning.min_share"),
        ({"pruning": {"kind": "safe", "reduction": 3}}, "pruning.reduction"),
        ({"pruning": {"kind": "median"}, "search": {"kind": "adaptive"}}, "pruning"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path, changes: Mapping[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(write_study(tmp_path, **changes), StudyConfig)


def test_a_pruned_run_leaves_its_reason_and_no_loss(tmp_path: Path) -> None:
    run = tiny_run(training=TrainingConfig(steps=12, batch_size=4, validation_sequences=8, validate_every_steps=1))
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    reason = Pruned(rule="safe", step=5, smoothed_loss=3.0, reference="x", reference_loss=2.0, bound=2.5)
    record = train_run(run, tmp_path, corpus, watch=lambda row: reason if row["step"] == 4 else None)
    assert (record.status, record.loss, record.steps_done, record.pruned) == ("pruned", None, 5, reason)
    assert read_record(tmp_path) == record
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    # What is finished is finished: another watcher, or none, makes no other result of it.
    assert train_run(run, tmp_path, corpus) == record


def test_a_resumed_run_shows_its_watcher_what_went_before(tmp_path: Path) -> None:
    run = tiny_run(training=TrainingConfig(steps=12, batch_size=4, validation_sequences=8, validate_every_steps=1))
    run = run.model_copy(update={"runtime": run.runtime.model_copy(update={"checkpoint_every_steps": 6})})
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)

    def die(row: Mapping[str, Any]) -> None:
        if row["step"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(run, tmp_path, corpus, watch=die)
    shown: list[int] = []
    train_run(run, tmp_path, corpus, watch=lambda row: shown.append(row["step"]))
    assert shown == list(range(11))


def words_study(folder: Path, **changes: Any) -> Path:
    """A study whose low learning rates end far up: words in any order, of which a run learns the letters."""
    draw = random.Random(0)
    texts = [folder / f"words{place}.txt" for place in range(8)]
    for path in texts:
        path.write_text(" ".join(draw.choices(["run", "loss", "width", "rate", "step", "batch", "seed"], k=1500)))
    return write_study(
        folder,
        **{
            "widths": [16],
            "parametrizations": {"mup": {}},
            "log2_lr": {"low": -12, "high": -3},
            "training": {"steps": 60, "batch_size": 8, "validation_sequences": 8},
            "data": {"source": "text", "paths": [str(path) for path in texts]},
            "runtime": {"log_every_steps": 2},
            "pruning": {"kind": "safe"},
        }
        | changes,
    )


def made_to_their_end(study_dir: Path, config: StudyConfig, folder: Path) -> list[RunRecord]:
    """The study's records with the pruned runs trained to their end."""
    corpus = prepare(config.data, context=config.model.context, vocab_size=config.model.vocab_size)
    runs = {planned.run_id: planned.run for planned in make_plan(config, {})}
    records = []
    for record in read_records(study_dir):
        whole = train_run(runs[record.run_id], folder / record.run_id, corpus) if record.pruned else record
        assert record.pruned is None or (whole.loss is not None and whole.loss >= (record.pruned.bound or 0.0))
        records.append(whole)
    return records


def optimum_in(study_dir: Path) -> CellOptimum:
    return cell_optima(load_table(study_dir))[0]


def test_a_study_with_safe_pruning_ends_tells_its_runs_apart_and_has_the_optimum_of_whole_runs(tmp_path: Path) -> None:
    study = open_study(words_study(tmp_path), tmp_path / "study")
    outcome = drive(study.directory, study.config, 1, Watcher(1), study.data_arguments(), "again")
    assert outcome.pruned >= 2
    assert (outcome.complete + outcome.pruned, outcome.missing, outcome.failed) == (10, 0, {})
    row = status_document(study)["cells"][0]
    assert (row["pruned"], row["complete"], row["missing"]) == (outcome.pruned, outcome.complete, 0)
    assert status_document(study)["finished"]
    states = [trial.state for trial in optuna.load_study(study_name="small", storage=open_storage(study.directory)).trials]
    assert states.count(optuna.trial.TrialState.PRUNED) == outcome.pruned
    assert any(f"{outcome.pruned} pruned runs bound the optimum" in note for note in load_table(study.directory).notes)

    whole = tmp_path / "whole"
    for record in made_to_their_end(study.directory, study.config, tmp_path / "ends"):
        write_record(run_directory(whole, record.run_id), record)
    one, two = optimum_in(whole), optimum_in(study.directory)
    assert two.n_pruned == outcome.pruned
    assert (two.log2_lr, two.interval, two.best_loss) == (one.log2_lr, one.interval, one.best_loss)

    # Nothing is made twice: the next driver finds pruned runs finished, and enters them where the journal is gone.
    (study.directory / "optuna-journal.log").unlink()
    assert drive(study.directory, study.config, 1, Watcher(1), study.data_arguments(), "again").made == 0
    states = [trial.state for trial in optuna.load_study(study_name="small", storage=open_storage(study.directory)).trials]
    assert states.count(optuna.trial.TrialState.PRUNED) == outcome.pruned


def test_workers_of_a_board_prune_by_the_curves_in_the_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'board.db'}"
    # The worker's directory is empty but for its own runs; the best runs are on the board as another machine's.
    whole = words_study(tmp_path, storage=url, log2_lr={"low": -9, "high": -6}, pruning={"kind": "none"})
    elsewhere = open_study(whole, tmp_path / "elsewhere")
    assert work(elsewhere, lambda _: None) == 4
    study = open_study(words_study(tmp_path, storage=url), tmp_path / "study")
    made: list[str] = []
    assert work(study, made.append) == 6
    board = board_of(study)
    records = [record for record, _ in board.results().values()]
    board.close()
    pruned = [record for record in records if record.pruned is not None]
    assert len(records) == 10
    assert pruned
    assert all(record.log2_lr < -9 for record in pruned)
    assert sum("ended at step" in line for line in made) == len(pruned)
    trials = optuna.load_study(study_name="small", storage=url).trials
    assert {trial.user_attrs["run_id"] for trial in trials if trial.state == optuna.trial.TrialState.PRUNED} == {
        record.run_id for record in pruned
    }


def test_a_pruned_record_is_a_pruned_trial(tmp_path: Path) -> None:
    planned = make_plan(study_of(tmp_path), {})[0]
    reason = Pruned(rule="median", step=3, smoothed_loss=3.0)
    record = record_of(planned, np.nan).model_copy(update={"status": "pruned", "pruned": reason})
    trial = optuna_trial(record)
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert trial.user_attrs["pruned"] == reason.model_dump()
