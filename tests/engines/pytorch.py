"""torch's own AdamW by param_groups.py, in the toolkit's model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scaling.exports.plan import Form, make_plan
from scaling.exports.pytorch import export_files
from scaling.model import build_model
from tests.engines.cases import COMPLETEP, MUP, UMUP, engine_run, exported_rules, title_of
from tests.engines.collect import by_name, exported, held_of
from tests.engines.init_trace import InitTrace
from tests.engines.table import Table

PACKAGE = "torch"


def tables() -> Iterator[Table]:
    cases: list[tuple[object, Form]] = [
        (engine_run("sp"), "multipliers"),
        (MUP, "multipliers"),
        (MUP, "folded"),
        (COMPLETEP, "multipliers"),
        (UMUP, "multipliers"),
    ]
    for run, form in cases:
        with exported(export_files(make_plan(run, form)), "param_groups") as (recipe, folder):
            plan, model = recipe.read_plan(folder / "plan.json"), build_model(run)
            with InitTrace() as trace:
                recipe.initialize(model, plan, seed=0)
            groups = by_name(recipe.build_optimizer(model, plan).param_groups)
            assert isinstance(recipe.build_optimizer(model, plan), torch.optim.AdamW)
            yield Table.of("pytorch", title_of(run, form), exported_rules(run, form), held_of(model, groups, trace))
