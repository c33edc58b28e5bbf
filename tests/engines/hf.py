"""The Trainer's optimizer and transformers' model, by the exported trainer.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scaling.exports.batch import make_batch
from scaling.exports.huggingface import export_files
from scaling.exports.llama import huggingface_name
from tests.engines.cases import COMPLETEP, MUP, UMUP, exported_rules, title_of
from tests.engines.collect import by_name, exported, held_of
from tests.engines.init_trace import InitTrace
from tests.engines.table import Table

PACKAGE = "transformers"
SETTINGS: dict[str, Any] = {"output_dir": "out", "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}


def tables() -> Iterator[Table]:
    for run in (MUP, COMPLETEP, UMUP):
        with exported(export_files(run, make_batch(run, 1, None), SETTINGS, ""), "trainer") as (module, _):
            with InitTrace() as trace:
                trainer = module.build_trainer()
            trainer.create_optimizer_and_scheduler(run.training.steps)
            held = held_of(trainer.model, by_name(trainer.optimizer.param_groups), trace, "initial_lr")
            yield Table.of("hf", title_of(run, "folded"), exported_rules(run, "folded", huggingface_name), held)
