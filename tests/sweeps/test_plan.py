"""The plan is a pure function of study and results: grid, extensions while the best LR is near an edge, seeds near the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaling.accounting import run_flops
from scaling.config_file import load_config
from scaling.hyperparameters import hyperparameters
from scaling.records import RunRecord
from sweeps.plan import PlannedRun, make_plan
from sweeps.study import StudyConfig
from tests.sweeps.studies import write_study


def study_of(folder: Path, **changes: Any) -> StudyConfig:
    model = {"depth": 1, "head_dim": 8, "context": 16, "vocab_size": 32}
    return load_config(write_study(folder, model=model, **changes), StudyConfig)


def record_of(planned: PlannedRun, loss: float) -> RunRecord:
    run = planned.run
    return RunRecord(
        run_id=planned.run_id,
        status="complete" if math.isfinite(loss) else "diverged",
        parametrization=planned.parametrization,
        width=planned.width,
        depth=run.model.depth,
        head_dim=run.model.head_size,
        batch_tokens=run.batch_tokens,
        tokens=run.tokens,
        steps=run.training.steps,
        steps_done=run.training.steps,
        lr=run.optimizer.lr,
        log2_lr=planned.log2_lr,
        seed=planned.seed,
        data_seed=planned.seed,
        precision="fp32",
        loss=loss if math.isfinite(loss) else None,
        initial_loss=5.0,
        last_finite_loss=loss,
        params={"total": 1},
        flops=planned.flops,
        wall_s=1.0,
        process_s=1.0,
        data_sha256="x",
        versions={},
        host="here",
        started_at="2026-01-01T00:00:00+00:00",
        hyperparameters=hyperparameters(run),
    )


def grown(study: StudyConfig, loss: Callable[[PlannedRun], float]) -> list[PlannedRun]:
    """Carry out the plan until it stops growing."""
    results: dict[str, RunRecord] = {}
    while True:
        todo = [planned for planned in make_plan(study, results) if planned.run_id not in results]
        if not todo:
            return make_plan(study, results)
        # One at a time, as the last of the first ones: growth must not depend on the order in which results come in.
        results[todo[-1].run_id] = record_of(todo[-1], loss(todo[-1]))


def bowl(planned: PlannedRun) -> float:
    """muP's optimum at 2^-7 at every width; SP's an octave lower a doubling of the width, from 2^-5 at width 16."""
    best = -7.0 if planned.parametrization == "mup" else -5.0 - math.log2(planned.width / 16)
    return 2 + 0.04 * (planned.log2_lr - best) ** 2


def lrs(plan: list[PlannedRun], kind: str, width: int, seed: int = 0) -> list[float]:
    return sorted(run.log2_lr for run in plan if (run.parametrization, run.width, run.seed) == (kind, width, seed))


def test_grid_has_every_run_once_with_ids_of_their_own(tmp_path: Path) -> None:
    plan = make_plan(study_of(tmp_path, seeds=2), {})
    assert len(plan) == 2 * 2 * 3 * 2
    assert len({planned.run_id for planned in plan}) == len(plan)
    assert [planned.flops for planned in plan] == sorted((planned.flops for planned in plan), reverse=True)


def test_a_plan_names_and_costs_its_runs_as_their_configs_do(tmp_path: Path) -> None:
    study = study_of(tmp_path, log2_lr={"low": -8.3, "high": -6, "step": 0.7}, seeds=2, optimizer={"beta1": 0.85})
    for planned in make_plan(study, {}):
        assert planned.run_id == planned.run.run_id
        assert planned.flops == run_flops(planned.run)
        assert (planned.log2_lr, planned.seed) == (pytest.approx(planned.run.log2_lr), planned.run.training.seed)


def test_a_cell_is_extended_until_its_best_run_has_its_margin(tmp_path: Path) -> None:
    plan = grown(study_of(tmp_path, follow_up={"margin_points": 2}), bowl)
    assert lrs(plan, "mup", 16) == lrs(plan, "mup", 32) == [-9, -8, -7, -6, -5]
    assert lrs(plan, "sp", 16) == [-8, -7, -6, -5, -4, -3]
    assert lrs(plan, "sp", 32) == [-8, -7, -6, -5, -4]


def test_extensions_stop_at_their_limit(tmp_path: Path) -> None:
    plan = grown(study_of(tmp_path, follow_up={"margin_points": 1, "max_extensions": 3}), lambda planned: 10 + planned.log2_lr)
    assert lrs(plan, "mup", 16) == [-11, -10, -9, -8, -7, -6]


def test_divergence_is_an_edge_that_is_not_passed(tmp_path: Path) -> None:
    def loss(planned: PlannedRun) -> float:
        return math.inf if planned.log2_lr > -7.5 else bowl(planned)

    plan = grown(study_of(tmp_path, follow_up={"margin_points": 1}), loss)
    assert lrs(plan, "mup", 16) == [-9, -8, -7, -6]
    everything = grown(study_of(tmp_path, follow_up={"margin_points": 1}), lambda _: math.inf)
    assert lrs(everything, "mup", 16) == [-12, -11, -10, -9, -8, -7, -6], "what can be learned lies lower"


def test_seeds_are_spent_near_the_best_only(tmp_path: Path) -> None:
    follow_up = {"margin_points": 1, "seeds_near_best": 3, "near_octaves": 1}
    plan = grown(study_of(tmp_path, follow_up=follow_up), bowl)
    assert lrs(plan, "mup", 16, seed=0) == [-8, -7, -6]
    assert lrs(plan, "mup", 16, seed=2) == lrs(plan, "mup", 16, seed=1) == [-8, -7, -6]
    assert lrs(plan, "sp", 16, seed=0) == [-8, -7, -6, -5, -4]
    assert lrs(plan, "sp", 16, seed=2) == [-6, -5, -4]


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_plan_does_not_depend_on_how_often_it_was_made(tmp_path: Path, seeds: int) -> None:
    study = study_of(tmp_path, seeds=seeds, follow_up={"margin_points": 1})
    assert [planned.run_id for planned in grown(study, bowl)] == [planned.run_id for planned in grown(study, bowl)]
