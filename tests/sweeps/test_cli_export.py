"""`mutransfer export` as programs use it: files, one JSON document, exit codes, and refusals that say what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scaling.exports.recipes.param_groups import read_plan
from sweeps import cli

RUN = """
model: {width: 64, depth: 2, head_dim: 16, context: 16, vocab_size: 64, activation: swiglu, norm_gain: true}
base: {width: 32}
optimizer: {lr: 0.01, weight_decay: 0.1}
training: {steps: 10, batch_size: 8}
"""


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `export RUN.yaml ...` in this process; exit code and the JSON document."""
    (tmp_path / "run.yaml").write_text(RUN)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        options = ["export", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out"), "--json", *arguments]
        monkeypatch.setattr(sys, "argv", ["mutransfer", *options])
        capsys.readouterr()
        code = cli._main()
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("engine", "files"),
    [
        ("pytorch", {"plan.json", "param_groups.py", "run.json", "train_fsdp.py", "model.py", "data.py"}),
        ("deepspeed", {"plan.json", "param_groups.py", "ds_config.json", "engine.py"}),
        ("torchtitan", {"plan.json", "param_groups.py", "model.json", "torchtitan_recipe.py"}),
        ("hf", {"plan.json", "param_groups.py", "config.json", "training_arguments.json", "trainer.py"}),
        ("olmo-core", {"plan.json", "param_groups.py", "model.json", "olmo_core_recipe.py"}),
    ],
)
def test_an_export_writes_its_files_and_says_so(call: Any, tmp_path: Path, engine: str, files: set[str]) -> None:
    code, document = call("--engine", engine)
    assert (code, set(document["files"])) == (0, files | {"export.json"})
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {"export.json"}
    assert read_plan(tmp_path / "out" / "plan.json")["tensors"] == document["tensors"]


def test_megatrons_folded_form_has_every_value_and_nothing_to_accept(call: Any) -> None:
    qk_norm = ("--set", "model.qk_norm=true")
    code, document = call("--engine", "megatron", "--form", "folded", *qk_norm)
    assert (code, document["differences"]) == (0, [])
    assert set(document["files"]) == {
        "export.json",
        "megatron_arguments.sh",
        "megatron_recipe.py",
        "param_groups.py",
        "plan.json",
    }
    assert "--use-mup" not in Path(document["out"], "megatron_arguments.sh").read_text()
    code, document = call("--engine", "megatron", "--form", "folded", "--accept", "eps", *qk_norm)
    assert code == 2
    assert "the folded form has every value" in document["errors"][0]["what"]


def test_the_late_warm_up_is_said_of_megatrons_own_schedule_alone(call: Any, tmp_path: Path) -> None:
    options = ("--engine", "megatron", "--set", "schedule.warmup_fraction=0.3")
    own = call(*options, *(f"--accept={name}" for name in ("eps", "weight_decay", "init_std")), "--out", str(tmp_path / "own"))
    folded = call(*options, "--form", "folded", "--out", str(tmp_path / "folded"))
    assert (own[0], any("warm-up is one update late" in note for note in own[1]["caveats"])) == (1, True)
    assert (folded[0], any("warm-up" in note for note in folded[1]["caveats"])) == (0, False)


def test_the_folded_form_says_what_clipping_does(call: Any) -> None:
    assert any("another clipping" in note for note in call("--engine", "hf")[1]["caveats"])
    code, document = call("--engine", "hf", "--set", "optimizer.clip_norm=null")
    assert code == 0
    assert not any("another clipping" in note for note in document["caveats"])


@pytest.mark.parametrize("kind", ["lion", "muon"])
def test_lion_and_muon_come_as_a_file_without_the_program_for_shards(call: Any, kind: str) -> None:
    code, document = call("--engine", "pytorch", "--set", f"optimizer.kind={kind}")
    assert code == 0
    assert set(document["files"]) == {"plan.json", "param_groups.py", "lion_muon.py", "export.json"}
    assert any(f"{kind} is in lion_muon.py; train_fsdp.py is not written" in note for note in document["caveats"])


def test_granite_has_the_multipliers_of_the_form_with_multipliers(call: Any, tmp_path: Path) -> None:
    code, document = call("--engine", "hf", "--form", "multipliers")
    assert (code, document["caveats"]) == (0, ["the model is Granite's: config.json has the multipliers"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["logits_scaling"]) == ("granite", 2.0)


def test_megatron_is_refused_what_it_cannot_express_and_exits_1_where_that_is_accepted(call: Any, tmp_path: Path) -> None:
    code, document = call("--engine", "megatron")
    assert code == 2
    assert {error["where"] for error in document["errors"]} == {"eps", "weight_decay", "init_std"}
    code, document = call("--engine", "megatron", *(f"--accept={name}" for name in ("eps", "weight_decay", "init_std")))
    assert code == 1
    assert any("the run's 0.2, Megatron's 0.1" in line for line in document["differences"])
    assert "--use-mup" in (tmp_path / "out" / "megatron_arguments.sh").read_text()


@pytest.mark.parametrize(
    ("arguments", "where", "words"),
    [
        (["--engine", "megatorn"], "--engine megatorn", "unknown"),
        (["--engine", "nanotron"], "--engine nanotron", "spectral"),
        (["--engine", "torchtitan", "--form", "folded"], "--form", "is for pytorch, deepspeed"),
        (["--engine", "hf", "--form", "multipliers", "--set", "model.qk_norm=true"], "model.qk_norm", "Granite has no QK-norm"),
        (["--engine", "deepspeed", "--devices", "3"], "--devices 3", "does not divide"),
        (["--engine", "deepspeed", "--set", "optimizer.kind=lion"], "optimizer.kind", "lion is not written"),
        (["--engine", "pytorch", "--set", "training.precision=fp16"], "training.precision", "does not scale losses"),
        (["--engine", "pytorch", "--form", "fold"], "--form fold", "is no form"),
        (["--engine", "hf", "--merge", "absent.json"], "--merge absent.json", "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(
    call: Any, tmp_path: Path, arguments: list[str], where: str, words: str
) -> None:
    code, document = call(*arguments)
    assert code == 2
    assert any(error["where"] == where and words in error["what"] for error in document["errors"]), document
    assert not (tmp_path / "out").exists()


def test_an_engine_setting_that_would_be_passed_over_is_refused(call: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"zero_optimisation": {"overlap_comm": true}}')
    code, document = call("--engine", "deepspeed", "--merge", str(tmp_path / "mine.json"))
    assert code == 2
    assert "did you mean zero_optimization" in document["errors"][0]["cure"]


def test_settings_that_are_no_json_are_refused_by_key(call: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"zero_optimization": {"x": [1, NaN]}, "timers": 1e999, "aio": 1, "aio": 2}')
    code, document = call("--engine", "deepspeed", "--merge", str(mine))
    assert code == 2
    assert {error["where"] for error in document["errors"]} == {
        f"{mine}: {key}" for key in ("aio", "zero_optimization.x.1", "timers")
    }


@pytest.mark.parametrize("key", ["warmup_ratio", "optim_args", "auto_find_batch_size"])
def test_trainer_settings_that_would_not_count_or_make_another_run_are_refused(call: Any, tmp_path: Path, key: str) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({key: 0.1}))
    code, document = call("--engine", "hf", "--merge", str(tmp_path / "mine.json"))
    assert (code, [error["where"] for error in document["errors"]]) == (2, [f"{tmp_path / 'mine.json'}: {key}"])


def test_exporting_loads_no_torch() -> None:
    modules = "batch, deepspeed, folded, huggingface, llama, megatron, olmo, plan, pytorch, torchtitan"
    code = f"import sys; from scaling.exports import {modules}; import sweeps.cli_export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
