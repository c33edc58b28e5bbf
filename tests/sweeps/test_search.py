"""Searched studies: the plan stays a pure function of the results; LRSampler serves any Optuna study."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from scaling.records import RunRecord
from sweeps.lr_sampler import LRSampler
from sweeps.plan import PlannedRun, make_plan
from sweeps.search import run_limit, searched_runs
from tests.sweeps.test_plan import bowl, grown, record_of, study_of

ADAPTIVE = {
    "widths": [16, 32, 64],
    "search": {"kind": "adaptive", "precision": 0.2, "max_runs": 6},
    "log2_lr": {"low": -10, "high": -3},
}


def noisy(planned: PlannedRun) -> float:
    """The bowl, with noise that depends on the run alone."""
    return bowl(planned) + 0.004 * math.sin(1e4 * planned.log2_lr + 7 * planned.seed + planned.width)


def test_a_searched_study_ends_and_knows_the_optimum_of_every_cell(tmp_path: Path) -> None:
    study = study_of(tmp_path, **ADAPTIVE)
    plan = grown(study, noisy)
    assert {(run.parametrization, run.width) for run in plan} == {
        (kind, width) for kind in ("mup", "sp") for width in (16, 32, 64)
    }
    assert len({run.run_id for run in plan}) == len(plan)
    results = {run.run_id: record_of(run, noisy(run)) for run in plan}
    for kind in ("mup", "sp"):
        for cell in searched_runs(study, kind, results):
            assert cell.done is not None
            assert len(cell.asks) <= run_limit(study, cell.width)
            best = -7.0 if kind == "mup" else -5.0 - math.log2(cell.width / 16)
            near = min(cell.runs.loss), min(abs(lr - best) for lr in cell.runs.log2_lr)
            assert near[1] <= 0.5


def test_the_plan_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    """Results come in one at a time, last first, or all at once: the runs that are made are the same."""
    study = study_of(tmp_path, **ADAPTIVE)
    one_by_one = {run.run_id for run in grown(study, noisy)}
    results: dict[str, RunRecord] = {}
    while todo := [run for run in make_plan(study, results) if run.run_id not in results]:
        results |= {run.run_id: record_of(run, noisy(run)) for run in todo}
    assert set(results) == one_by_one


def test_a_larger_width_waits_for_the_smaller_one(tmp_path: Path) -> None:
    study = study_of(tmp_path, **ADAPTIVE)
    assert {run.width for run in make_plan(study, {})} == {16}


@pytest.mark.parametrize("kind", ["tpe", "gp", "qmc", "random"])
def test_optunas_samplers_by_name(tmp_path: Path, kind: str) -> None:
    study = study_of(tmp_path, **(ADAPTIVE | {"search": {"kind": kind, "max_runs": 5}, "widths": [16, 32]}))
    plan = grown(study, noisy)
    assert len(plan) == 2 * sum(run_limit(study, width) for width in (16, 32))
    assert all(-10 <= run.log2_lr <= -3 for run in plan)
    assert [run.run_id for run in plan] == [run.run_id for run in grown(study, noisy)]


SPACE: dict[str, Any] = {"lr": FloatDistribution(2**-12, 2**-2, log=True), "width": CategoricalDistribution([128, 64])}


def objective(trial: optuna.Trial) -> float:
    width = trial.suggest_categorical("width", [128, 64])
    u = math.log2(trial.suggest_float("lr", 2**-12, 2**-2, log=True)) + 7.3
    trial.suggest_float("dropout", 0, 0.5)
    return math.inf if u > 2.5 else 3 - 0.1 * math.log2(width) + 0.04 * u**2 + 0.003 * math.sin(1e5 * u + width)


def test_the_sampler_serves_a_study_of_the_users_own() -> None:
    sampler = LRSampler(SPACE)
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=200)
    assert len(study.trials) < 25, "it stops by itself"
    assert sampler.done(study)
    for optimum in sampler.optima(study).values():
        assert optimum is not None
        assert optimum.log2_lr == pytest.approx(-7.3, abs=0.3)
    widths = [trial.params["width"] for trial in study.trials]
    assert widths == sorted(widths), "small models first"
    rates = [(trial.params["width"], trial.params["lr"]) for trial in study.trials]
    assert len(set(rates)) == len(rates), "without a seed to vary, no learning rate is run twice"


def test_the_sampler_works_with_ask_and_tell_and_seeds_and_plain_log2() -> None:
    sampler = LRSampler({"log2_lr": FloatDistribution(-12, -2), "seed": IntDistribution(0, 9)}, lr="log2_lr", max_runs=12)
    study = optuna.create_study(sampler=sampler)
    made = 0
    while not sampler.done(study):
        pair = [study.ask(), study.ask()]
        points = [(trial.suggest_float("log2_lr", -12, -2), trial.suggest_int("seed", 0, 9)) for trial in pair]
        assert len(set(points)) == 2, "two at once are not the same"
        for trial, (log2_lr, seed) in zip(pair, points, strict=True):
            study.tell(trial, 2 + 0.04 * (log2_lr + 7) ** 2 + 0.01 * math.sin(1e4 * log2_lr + seed))
        made += 2
        assert made <= 14
    assert sampler.optima(study)[1.0].log2_lr == pytest.approx(-7, abs=0.3)  # type: ignore[union-attr]


def test_the_sampler_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="needs 'lr', a FloatDistribution"):
        LRSampler({"width": SPACE["width"]})
    with pytest.raises(ValueError, match="of positive numbers"):
        LRSampler(SPACE | {"width": CategoricalDistribution(["small", "large"])})
    with pytest.raises(ValueError, match="alone"):
        LRSampler(SPACE | {"dropout": FloatDistribution(0, 1)})
    study = optuna.create_study(sampler=LRSampler(SPACE), direction="maximize")
    with pytest.raises(ValueError, match="minimizes a loss"):
        study.optimize(objective, n_trials=1)
