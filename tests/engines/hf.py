"""The Trainer's optimizer and transformers' model, Llama, Qwen 3 or Granite, by the exported trainer.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scaling.config import RunConfig
from scaling.exports.batch import make_batch
from scaling.exports.huggingface import export_files
from scaling.exports.llama import huggingface_name
from scaling.exports.plan import Form
from tests.engines.cases import COMPLETEP, COMPLETEP_PLAIN, MUP, UMUP, exported_rules, title_of
from tests.engines.collect import by_name, exported, held_of
from tests.engines.init_trace import InitTrace
from tests.engines.table import Table

PACKAGE = "transformers"
SETTINGS: dict[str, Any] = {"output_dir": "out", "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}


def tables() -> Iterator[Table]:
    cases: list[tuple[RunConfig, Form]] = [(MUP, "folded"), (COMPLETEP, "folded"), (UMUP, "folded")]
    cases += [(MUP, "multipliers"), (COMPLETEP_PLAIN, "multipliers")]
    for run, form in cases:
        with exported(export_files(run, make_batch(run, 1, None), SETTINGS, "", form), "trainer") as (module, _):
            with InitTrace() as trace:
                trainer = module.build_trainer()
            trainer.create_optimizer_and_scheduler(run.training.steps)
            held = held_of(trainer.model, by_name(trainer.optimizer.param_groups), trace, "initial_lr")
            yield Table.of("hf", title_of(run, form), exported_rules(run, form, huggingface_name), held)
