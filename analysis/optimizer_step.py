"""The step that says an optimizer's betas, eps, decay and clipping at a large run, and by which powers of its steps they came about.

Owns `optimizer_step` and `optimizer_values`.
"""

from __future__ import annotations

from analysis.lr_step import HorizonRule
from analysis.recommendation import Step
from scaling.config import RunConfig
from scaling.parametrization import carried

CARRIED = ("lr", "weight_decay", "eps", "beta1", "beta2")


def optimizer_values(run: RunConfig) -> dict[str, float | None]:
    """What the run's config holds; with base.steps also what its own rule makes of it, as NAME_at_steps."""
    optimizer = run.optimizer
    found = {name: getattr(optimizer, name) for name in ("weight_decay", "beta1", "beta2", "eps", "clip_norm")}
    if run.base.steps is not None:
        at_steps = carried(run)
        found |= {f"{name}_at_steps": getattr(at_steps, name) for name in CARRIED}
    return found


def optimizer_step(run: RunConfig, rule: HorizonRule, betas: str) -> Step:
    """The values at the run's number of steps; betas: as the target asks, keep or scale."""
    held, optimizer = run.optimizer, carried(run)
    value = f"betas {optimizer.beta1:g}, {optimizer.beta2:g}; eps {optimizer.eps:.2g}; weight decay {optimizer.weight_decay:g}; "
    value += f"clipping at {optimizer.clip_norm}; {run.training.precision}"
    if optimizer != held:
        kept = f"betas {held.beta1:g}, {held.beta2:g}; eps {held.eps:.2g}; weight decay {held.weight_decay:g}"
        value += f"; the config holds {kept}, the values at {run.base.steps:,} steps"
    title = f"{held.kind} at the base shape"
    if rule.fault:
        return Step(title, f"eps and weight decay as in the study; betas: {betas}", value, "as in the study", rule.fault)
    # An independent decay is the product of LR and decay, and both go with the steps.
    decay = 2 * rule.carried if held.weight_decay_rule == "independent" else rule.carried
    formula = f"eps * S^{rule.carried:g}, weight decay * S^-{decay:g}, betas: {betas}"
    return Step(title, formula, value, f"as in the study; {rule.source}")
