"""OLMo-core's transformer and train module, by the exported olmo_core_recipe.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scaling.exports.batch import make_batch
from scaling.exports.llama import olmo_name
from scaling.exports.olmo import export_files
from tests.engines.cases import COMPLETEP, MUP, UMUP, exported_rules, title_of
from tests.engines.collect import exported, held_of
from tests.engines.init_trace import InitTrace
from tests.engines.table import Table

PACKAGE = "ai2-olmo-core"


def tables() -> Iterator[Table]:
    for run in (MUP, COMPLETEP, UMUP):
        with exported(export_files(run, make_batch(run, 1, None)), "olmo_core_recipe") as (recipe, _):
            with InitTrace() as trace:
                module = recipe.train_module_config().build(
                    recipe.model_config().build(init_device="meta"), device=torch.device("cpu")
                )
            names = {id(parameter): name for name, parameter in module.model.named_parameters()}
            groups = {names[id(tensor)]: group for group in module.optim.param_groups for tensor in group["params"]}
            held = held_of(module.model, groups, trace, "initial_lr")
            yield Table.of("olmo-core", title_of(run, "folded"), exported_rules(run, "folded", olmo_name), held)
