"""torchtitan's Llama 3 and its own grouping of parameters, by the exported torchtitan_recipe.py."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.components.optimizer import OptimizersContainer

from scaling.exports.batch import make_batch
from scaling.exports.llama import torchtitan_name
from scaling.exports.torchtitan import export_files
from tests.engines.cases import COMPLETEP_PLAIN, MUP, UMUP, exported_rules, title_of
from tests.engines.collect import by_name, exported, held_of
from tests.engines.init_trace import InitTrace
from tests.engines.table import Table

PACKAGE = "torchtitan"


def tables() -> Iterator[Table]:
    for run in (MUP, COMPLETEP_PLAIN, UMUP):
        with exported(export_files(run, make_batch(run, 1, 4)), "torchtitan_recipe") as (recipe, _):
            config = recipe.run()
            model = config.model_spec.model.build()
            with InitTrace() as trace:
                model.init_states()
            groups, _ = OptimizersContainer._build_param_groups(model, config.optimizer.param_groups, {})
            held = held_of(model, by_name(groups["AdamW"], "param_names"), trace)
            yield Table.of("torchtitan", title_of(run, "folded"), exported_rules(run, "folded", torchtitan_name), held)
