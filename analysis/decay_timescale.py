"""How long weights remember: the timescale of decoupled weight decay in steps, as a share of the run, beside the study's.

Owns `timescale_step`. A run's weights are an average of its updates over the last 1 / (lr * weight decay) steps (Wang and Aitchison,
2405.13698). The LR and the decay are derived one by one, and this is where it shows whether they still belong together.
"""

from __future__ import annotations

from analysis.recommendation import Step
from scaling.config import RunConfig
from scaling.parametrization import tensor_rules

APART = 2.0
"""Shares further apart than this are warned about: an octave of the product of LR and decay."""
SOURCE = "1 / (lr * weight decay): Wang and Aitchison, 2405.13698"


def timescale_step(run: RunConfig, studied: RunConfig) -> tuple[Step | None, list[str]]:
    """The step that says the timescale, and a warning where its share of the run is not the study's; nothing without decay.

    studied: a run of the study at its best LR, at the width from which the recommendation starts.
    """
    here, there = _steps_and_share(run), _steps_and_share(studied)
    if here is None or there is None:
        return None, []
    (steps, share), (_, was) = here, there
    value = f"{steps:,.0f} steps, {share:.3g} of the run; in the study {was:.3g} of a run"
    formula = "1 / (lr * weight decay) of hidden tensors at the peak LR / steps"
    step = Step("Timescale of weight decay", formula, value, SOURCE, "the share that served the study serves the target")
    ratio = share / was
    if 1 / APART <= ratio <= APART:
        return step, []
    kept = run.optimizer.weight_decay * ratio
    what = f"weights average over {share:.3g} of the run, in the study over {was:.3g}: optimizer.weight_decay {kept:.3g} would keep it"
    return step, [what]


def _steps_and_share(run: RunConfig) -> tuple[float, float] | None:
    """The timescale in steps and over those of the run; None where no hidden tensor decays by the LR."""
    if run.optimizer.kind == "adam":  # Its decay is part of the gradient, and no average of updates follows from it.
        return None
    products = [rule.lr * rule.weight_decay for rule in tensor_rules(run) if rule.role == "hidden"]
    if not products or not products[0] > 0:
        return None
    return 1 / products[0], 1 / products[0] / run.training.steps
