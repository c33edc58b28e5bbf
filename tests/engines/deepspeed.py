"""DeepSpeed's own optimizer wrappers under ZeRO 1, 2 and 3, over gloo, one process; two processes train in test_deepspeed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"LOCAL_RANK": "0"}

import deepspeed
import torch.distributed as dist

from scaling.config import RunConfig
from scaling.exports.batch import make_batch
from scaling.exports.deepspeed import export_files
from scaling.exports.plan import Form, make_plan
from scaling.model import build_model
from tests.engines.cases import COMPLETEP, MUP, UMUP, exported_rules, title_of
from tests.engines.collect import by_name, exported
from tests.engines.init_trace import InitTrace
from tests.engines.table import Held, Table

PACKAGE = "deepspeed"


def tables() -> Iterator[Table]:
    # A reduction between processes of one machine, which is compiled on its first use, for more than a minute.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # the attribute of that name is torch
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    cases: list[tuple[RunConfig, Form, int]] = [(MUP, "multipliers", 1), (COMPLETEP, "multipliers", 2), (UMUP, "folded", 3)]
    for run, form, stage in cases:
        rules = exported_rules(run, form)
        yield Table.of("deepspeed", f"{title_of(run, form)}, ZeRO {stage}", rules, _held(run, form, stage))
    dist.destroy_process_group()


def _held(run: RunConfig, form: Form, stage: int) -> dict[str, Held]:
    with exported(export_files(make_plan(run, form), make_batch(run, 1, None), stage, {}, ""), "engine") as (engine, folder):
        import param_groups

        plan, model = param_groups.read_plan(folder / "plan.json"), build_model(run)
        with InitTrace() as trace:
            param_groups.initialize(model, plan, seed=0)
        drawn = {name: trace.init_of(parameter) for name, parameter in model.named_parameters()}
        _, optimizer, _ = engine.initialize_engine(model)
        factor = param_groups.lr_factor(plan, 0)
        groups: dict[str, dict[str, Any]] = by_name(optimizer.param_groups)
        # The engine's groups already stand at the schedule's first factor.
        return {
            name: Held(group["lr"] / factor, group["weight_decay"], group["eps"], vars(drawn[name]))
            for name, group in groups.items()
        }
