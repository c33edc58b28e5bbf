"""What every engine is given: one row for each kind of tensor, and the optimizer, schedule and batch of the run. Torch-free.

Owns ExportPlan and its JSON, which `recipes/param_groups.py` reads. Values come from `scaling.parametrization`, none is computed here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import scaling
from scaling.config import RunConfig
from scaling.exports.folded import folded_rules
from scaling.parametrization import TensorRule, carried, forward_rules, tensor_rules
from scaling.schedule import warmup_steps

Form = Literal["multipliers", "folded"]
SCHEMA = 1
PLAN = "plan.json"


@dataclass(frozen=True)
class ExportRow:
    """What the tensors of one kind get, in every layer alike; absolute values."""

    pattern: str
    """Regular expression that the whole parameter name matches."""
    rule: TensorRule
    init_constant: float | None
    """Gains start at this value; matrices from N(0, rule.init_std)."""
    folded_multiplier: float
    """The factor that is part of the tensor; 1 where the forward pass applies it."""

    def to_dict(self) -> dict[str, Any]:
        rule = self.rule
        keys = ("role", "optimizer", "lr", "weight_decay", "eps", "multiplier")
        return {
            "pattern": self.pattern,
            **{key: getattr(rule, key) for key in keys},
            "shape": list(rule.shape),
            "init_std": None if math.isnan(rule.init_std) else rule.init_std,
            "init_constant": self.init_constant,
            "folded_multiplier": self.folded_multiplier,
            "source": rule.source,
        }


@dataclass(frozen=True)
class ExportPlan:
    """A run in numbers that any engine can be given."""

    run: RunConfig
    form: Form
    rows: tuple[ExportRow, ...]

    @property
    def needs_multipliers(self) -> bool:
        """Whether the engine's forward pass has to apply a multiplier."""
        forward = forward_rules(self.run)
        plain = 1 / math.sqrt(self.run.model.head_size)
        values = [value for name, value in vars(forward).items() if name != "attention_scale"]
        values += [row.rule.multiplier for row in self.rows]
        return self.form == "multipliers" and (any(value != 1.0 for value in values) or forward.attention_scale != plain)

    @property
    def changes_clipping(self) -> bool:
        """Whether clipping by the plain global gradient norm would be another clipping than the run's."""
        return self.run.optimizer.clip_norm is not None and any(row.folded_multiplier != 1.0 for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        run, optimizer = self.run, carried(self.run)
        folded = self.form == "folded"
        forward = dict.fromkeys(vars(forward_rules(run)), 1.0) | {"attention_scale": 1 / math.sqrt(run.model.head_size)}
        return {
            "schema": SCHEMA,
            "made_by": f"mutransfer {scaling.__version__}",
            "run_id": run.run_id,
            "form": self.form,
            "optimizer": {
                "kind": optimizer.kind,
                "beta1": optimizer.beta1,
                "beta2": optimizer.beta2,
                "clip_norm": optimizer.clip_norm,
                **({"muon_momentum": optimizer.muon_momentum} if optimizer.kind == "muon" else {}),
            },
            "schedule": schedule_dict(run),
            "batch": {"sequences": run.training.batch_size, "context_tokens": run.model.context},
            "forward": forward if folded else dict(vars(forward_rules(run))),
            "tensors": [row.to_dict() for row in self.rows],
        }

    def to_json(self) -> str:
        return plan_text(self.to_dict())


def plan_text(plan: dict[str, Any]) -> str:
    """plan.json of a plan's dict."""
    return json.dumps(plan, indent=1, allow_nan=False) + "\n"


def schedule_dict(run: RunConfig) -> dict[str, Any]:
    """The schedule in steps: warm-up to `warmup_steps`, the peak until `decay_start_step`, then a decay to `final_factor`."""
    schedule, steps = run.schedule, run.training.steps
    warmup = warmup_steps(schedule, steps)
    decay_start = {"wsd": steps - round(schedule.decay_fraction * steps), "constant": steps}.get(schedule.kind, warmup)
    shape = "cosine" if schedule.kind == "cosine" else "linear"
    return {
        "steps": steps,
        "warmup_steps": warmup,
        "decay_start_step": decay_start,
        "decay_shape": shape,
        "final_factor": schedule.final_factor,
    }


def make_plan(run: RunConfig, form: Form, name_of: Callable[[str], str] = str) -> ExportPlan:
    """The plan of `run`. name_of: our name of a tensor -> the engine's, a layer's number standing as one part of either.

    Raises ConfigError where the folded form does not exist.
    """
    pairs = folded_rules(run) if form == "folded" else [(rule, 1.0) for rule in tensor_rules(run)]
    rows: dict[str, ExportRow] = {}
    for rule, factor in pairs:
        pattern = pattern_of(name_of(rule.name))
        row = ExportRow(pattern, rule, factor if math.isnan(rule.init_std) else None, factor)
        first = rows.setdefault(pattern, row)
        assert _values(first) == _values(row), f"layers differ: {first.rule.name}, {rule.name}"
    return ExportPlan(run, form, tuple(rows.values()))


def _values(row: ExportRow) -> dict[str, Any]:
    return row.to_dict()


def pattern_of(name: str) -> str:
    """The regular expression of a tensor's name with any number for its layer's."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))


def caveats(plan: ExportPlan, clips_by_plain_norm: bool) -> list[str]:
    """What a reader of an export must know, in sentences. clips_by_plain_norm: the engine clips without knowing of multipliers."""
    notes = []
    if plan.form == "folded":
        notes.append(f"folded form: exact for {plan.run.optimizer.kind} up to clipping by the global gradient norm")
        if plan.changes_clipping and clips_by_plain_norm:
            what = f"the engine clips at {plan.run.optimizer.clip_norm:g} a norm to which folded tensors contribute 1/multiplier"
            notes.append(f"{what}: another clipping than the run's wherever it acts")
    if plan.needs_multipliers:
        notes.append("the model's forward pass has to apply the multipliers in `forward` and in each tensor's row")
    return notes


def unsupported_optimizer(run: RunConfig, supported: Sequence[str], engine: str) -> str | None:
    """Why `engine`'s export cannot write this run's optimizer, or None."""
    kind = run.optimizer.kind
    return None if kind in supported else f"{kind} is not written for {engine}; optimizers that are: {', '.join(supported)}"
