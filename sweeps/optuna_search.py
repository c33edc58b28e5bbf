"""Optuna's own samplers over one cell's learning rate, by name: tpe, gp, qmc, random.

Owns `next_by_optuna`. The cell's runs are put into a study in memory, in the order in which they were asked for, and the sampler is seeded
by their number: the same runs give the same points. CMA-ES needs two axes or more, and a cell has one.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from analysis.search import Ask, CellRuns, Done, SearchSettings

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def next_by_optuna(kind: str, runs: CellRuns, settings: SearchSettings, count: int) -> list[Ask] | Done:
    """The sampler's next learning rates, or that the cell has all its runs."""
    import optuna

    room = min(count, settings.max_runs - len(runs))
    if room <= 0:
        return Done("budget", math.nan)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=_sampler(kind, len(runs)))
    axis = {"log2_lr": optuna.distributions.FloatDistribution(settings.low, settings.high)}
    # A diverged run counts as the worst finite one: what Optuna's GP makes of infinity itself, with a warning each time.
    worst = max((loss for loss in runs.loss if math.isfinite(loss)), default=0.0)
    for log2_lr, loss in zip(runs.log2_lr, runs.loss, strict=True):
        value = loss if math.isfinite(loss) else worst
        study.add_trial(optuna.trial.create_trial(params={"log2_lr": log2_lr}, distributions=dict(axis), value=value))
    # The sequence of "qmc" begins anew with every study: its first points are the runs that there are.
    skipped = len(runs) if kind == "qmc" else 0
    points = [float(study.ask(dict(axis)).params["log2_lr"]) for _ in range(skipped + room)]
    return [Ask(point, 0, "sampled") for point in points[skipped:]]


def _sampler(kind: str, seed: int) -> BaseSampler:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match kind:
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
            case "gp":
                return optuna.samplers.GPSampler(seed=seed, n_startup_trials=4)
            case "qmc":
                # Another seed a round would be another sequence.
                return optuna.samplers.QMCSampler(seed=0, scramble=True)
            case _:
                return optuna.samplers.RandomSampler(seed=seed)
