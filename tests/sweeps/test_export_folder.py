"""Exporting again into a folder: what an export wrote is renewed, what is a user's is kept or refused by name, and nothing is destroyed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RUN = """
model: {width: 64, depth: 2, head_dim: 16, context: 16, vocab_size: 64, activation: swiglu, norm_gain: true, qk_norm: true}
base: {width: 32}
optimizer: {lr: 0.01, weight_decay: 0.1}
training: {steps: 10, batch_size: 8}
"""
OTHER_LR = ("--set", "optimizer.lr=0.02")


@pytest.fixture
def export(tmp_path: Path, call: Any) -> Any:
    """Runs `export run.yaml ... --out out`; exit code and the JSON document."""
    (tmp_path / "run.yaml").write_text(RUN)

    def typed(*options: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = call("export", tmp_path / "run.yaml", "--out", tmp_path / "out", "--json", *options)
        return code, json.loads(out)

    return typed


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lr_of(folder: Path) -> float:
    """Of the embedding, which muP in this form leaves at the run's."""
    rows = json.loads((folder / "plan.json").read_text())["tensors"]
    return float(next(row["lr"] for row in rows if row["role"] == "embedding"))


def test_what_stands_as_it_was_exported_is_renewed(export: Any, tmp_path: Path) -> None:
    assert export("--engine", "pytorch")[0] == 0
    code, document = export("--engine", "pytorch", *OTHER_LR)
    assert (code, document["kept"], lr_of(tmp_path / "out")) == (0, {}, 0.02)


def test_the_users_model_and_data_are_kept_beside_new_numbers(export: Any, tmp_path: Path) -> None:
    export("--engine", "pytorch")
    for name in ("model.py", "data.py"):
        (tmp_path / "out" / name).write_text("mine = 1\n")
    for _ in range(2):
        code, document = export("--engine", "pytorch", *OTHER_LR)
        assert (code, set(document["kept"])) == (0, {"model.py", "data.py"})
        assert {(tmp_path / "out" / name).read_text() for name in ("model.py", "data.py")} == {"mine = 1\n"}
        assert lr_of(tmp_path / "out") == 0.02


def test_the_users_patterns_are_kept_beside_new_numbers(export: Any, tmp_path: Path) -> None:
    export("--engine", "pytorch")
    plan = tmp_path / "out" / "plan.json"
    theirs = json.loads(plan.read_text())
    theirs["tensors"][0]["pattern"] = r"wte\.weight"
    plan.write_text(json.dumps(theirs))
    for _ in range(2):
        code, document = export("--engine", "pytorch", *OTHER_LR)
        assert (code, set(document["kept"])) == (0, {"plan.json"})
        assert (json.loads(plan.read_text())["tensors"][0]["pattern"], lr_of(tmp_path / "out")) == (r"wte\.weight", 0.02)


@pytest.mark.parametrize(
    "change", [("--set", "model.activation=gelu"), ("--set", "model.norm_gain=false")], ids=["other rows", "fewer rows"]
)
def test_patterns_of_the_user_are_not_laid_over_other_tensors(export: Any, tmp_path: Path, change: tuple[str, ...]) -> None:
    export("--engine", "pytorch")
    plan = tmp_path / "out" / "plan.json"
    plan.write_text(plan.read_text().replace("embedding", "wte"))
    before = held(tmp_path / "out")
    code, document = export("--engine", "pytorch", *change)
    assert (code, [error["where"] for error in document["errors"]]) == (2, [str(plan)])
    assert held(tmp_path / "out") == before


def test_every_other_change_is_refused_by_name_and_nothing_is_written(export: Any, tmp_path: Path) -> None:
    export("--engine", "pytorch")
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    plan["tensors"][0]["lr"] = 5.0
    (tmp_path / "out" / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "out" / "train_fsdp.py").write_text("mine = 1\n")
    before = held(tmp_path / "out")
    code, document = export("--engine", "pytorch", *OTHER_LR)
    names = [str(tmp_path / "out" / name) for name in ("plan.json", "train_fsdp.py")]
    assert (code, sorted(error["where"] for error in document["errors"])) == (2, names)
    assert all("was changed after it was exported" in error["what"] for error in document["errors"])
    assert held(tmp_path / "out") == before


def test_files_that_no_export_wrote_are_not_written_over(export: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.py").write_text("mine = 1\n")
    code, document = export("--engine", "pytorch")
    assert (code, [error["where"] for error in document["errors"]]) == (2, [str(tmp_path / "out" / "model.py")])
    assert set(held(tmp_path / "out")) == {"model.py"}


def test_another_engines_folder_is_refused(export: Any, tmp_path: Path) -> None:
    export("--engine", "pytorch")
    before = held(tmp_path / "out")
    code, document = export("--engine", "deepspeed")
    assert code == 2
    assert "holds an export for pytorch" in document["errors"][0]["what"]
    assert held(tmp_path / "out") == before


def test_a_form_that_would_leave_files_of_another_form_is_refused(export: Any, tmp_path: Path) -> None:
    export("--engine", "megatron", "--form", "folded")
    accepted = [f"--accept={name}" for name in ("eps", "weight_decay", "init_std")]
    code, document = export("--engine", "megatron", *accepted)
    names = [str(tmp_path / "out" / name) for name in ("megatron_recipe.py", "param_groups.py", "plan.json")]
    assert (code, [error["where"] for error in document["errors"]]) == (2, names)


def test_an_export_cut_short_is_made_whole_by_the_same_command(export: Any, tmp_path: Path) -> None:
    export("--engine", "pytorch")
    first = held(tmp_path / "out")
    export("--engine", "pytorch", *OTHER_LR)
    whole = held(tmp_path / "out")
    for name in ("export.json", "run.json"):
        (tmp_path / "out" / name).write_bytes(first[name])
    assert export("--engine", "pytorch", *OTHER_LR)[0] == 0
    assert held(tmp_path / "out") == whole


def test_a_manifest_that_no_export_wrote_is_refused(export: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "export.json").write_text('{"engine": "pytorch"}')
    code, document = export("--engine", "pytorch")
    assert (code, [error["where"] for error in document["errors"]]) == (2, [str(tmp_path / "out" / "export.json")])
