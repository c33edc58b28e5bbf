"""megatron-core's GPTModel and its own groups: by --use-mup, whose rules differ where the export says so, and by the folded recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scaling.config import InitConfig, RunConfig
from scaling.exports import megatron, megatron_folded
from scaling.exports.batch import make_batch
from tests.engines.cases import COMPLETEP, engine_run, exported_rules, title_of
from tests.engines.table import Held, Table
from tests.scaling.exports.test_megatron import in_megatron, megatron_name

PACKAGE = "megatron-core"
MEGATRONS_INIT = InitConfig(block_output="depth_scaled", hidden_std=0.04, embedding_std=0.03, readout_std=0.03)
NATIVE = {
    "as near to --use-mup as a run can be": engine_run(
        "mup", init=MEGATRONS_INIT, optimizer={"weight_decay_rule": "unscaled"}, embedding_multiplier=4.0
    ),
    "with decay and init by the rules, accepted as they differ": engine_run("mup", embedding_multiplier=4.0),
}
FOLDED = (
    engine_run("mup", residual_multiplier=0.5, embedding_multiplier=4.0),
    COMPLETEP,
    engine_run("umup", qk_norm=True, queries_per_kv=1),  # with grouped queries the exporter refuses it
)
REASONS = {
    "weight_decay": "one weight decay for all matrices (`--accept weight_decay`)",
    "eps": "eps is scaled for hidden matrices alone (`--accept eps`)",
    "init": "one std for embedding and readout, output projections at std / sqrt(2 L m) (`--accept init_std`)",
}


def tables() -> Iterator[Table]:
    for words, run in NATIVE.items():
        found = in_megatron(megatron.arguments(run, make_batch(run, 1, None)))
        differs = {"init" if name == "init_std" else name for name in megatron.differences(run)}
        title = f"{title_of(run, 'multipliers')}, {words}"
        rules, expected = exported_rules(run, "multipliers", megatron_name), {name: REASONS[name] for name in sorted(differs)}
        yield Table.of("megatron", title, rules, _held(found), expected=expected)
    for run in FOLDED:
        yield Table.of("megatron", title_of(run, "folded"), exported_rules(run, "folded", megatron_name), _folded(run))


def _folded(run: RunConfig) -> dict[str, Held]:
    assert not megatron_folded.faults(run)
    with TemporaryDirectory() as folder:
        for name, text in megatron_folded.export_files(run, make_batch(run, 1, None)).items():
            (Path(folder) / name).write_text(text)
        return _held(in_megatron(megatron_folded.arguments(run, make_batch(run, 1, None)), Path(folder)))


def _held(found: dict[str, Any]) -> dict[str, Held]:
    return {
        name: Held(values["lr"], values["weight_decay"], values["eps"], found["init"][name])
        for name, values in found["tensors"].items()
    }
