"""`mutransfer fit --law critical-batch | lr-batch | multi-power` as it is typed: documents, exit codes, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.batch_simulation import simulate_frame, simulate_steps
from analysis.fit_search import OTHER_LAWS
from sweeps import cli_fit_other


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = simulate_steps(np.random.default_rng(0))
    path = tmp_path_factory.mktemp("steps") / "steps.csv"
    pd.DataFrame({"params": table.columns["params"], "batch_seqs": table.batch, "steps": table.steps}).to_csv(path, index=False)
    return path


def test_the_command_knows_the_laws_of_the_library() -> None:
    assert cli_fit_other.OTHER_LAWS == OTHER_LAWS


def test_a_critical_batch_is_answered_with_its_definition(call: Any, steps: Path, tmp_path: Path) -> None:
    arguments = ("fit", steps, "--law", "critical-batch", "--column", "steps_to_target=steps", "--option", "definition=256")
    code, text, _ = call(*arguments, "--predict", "params=1e9", "--save", tmp_path / "fit.json", "--json")
    document = json.loads(text)
    assert code == (0 if document["trusted"] else 1)
    assert document["law"] == "critical-batch"
    assert document["predictions"][0]["definition"] == "20 % over linear scaling from B = 256 sequences"
    assert document["starts"]["total"] >= document["starts"]["at_optimum"] > 0
    assert json.loads((tmp_path / "fit.json").read_text())["params"] == document["params"]


def test_an_lr_law_predicts_and_doubts_far_away(call: Any, tmp_path: Path) -> None:
    simulate_frame(np.random.default_rng(0), 6, 3e-4, 0.02, ("lr",)).to_csv(tmp_path / "grid.csv", index=False)
    arguments = ("fit", tmp_path / "grid.csv", "--law", "lr-batch", "--option", "draws=20", "--option", "window=0.03")
    code, text, _ = call(*arguments, "--predict", "params=1e13,tokens=1e10", "--json")
    document = json.loads(text)
    assert code == 1
    assert document["predictions"][0]["lr"]["value"] > 0
    assert any("beyond x10" in flag for flag in document["flags"])


def test_a_schedule_that_was_not_run_is_predicted_and_compared(call: Any, tmp_path: Path) -> None:
    lr = np.minimum(np.arange(1, 401) / 40, 1) * 3e-3
    loss = 2.5 + 0.6 * np.cumsum(lr) ** -0.45
    rows = [
        (name, step, lr[step - 1], loss[step - 1] + 0.01 * index) for index, name in enumerate("abc") for step in range(1, 401, 9)
    ]
    pd.DataFrame(rows, columns=["schedule", "step", "lr", "loss"]).to_csv(tmp_path / "curves.csv", index=False)
    named = "kind=cosine,steps=400,peak_lr=3e-3,warmup_fraction=0.1,final_factor=0.1"
    code, text, _ = call(
        "fit", tmp_path / "curves.csv", "--law", "multi-power", "--predict", "schedule=a", "--predict", named, "--json"
    )
    document = json.loads(text)
    assert code == 1
    assert any("no fitted schedule decays" in flag for flag in document["flags"])
    assert len(document["predictions"]) == 2
    assert len(document["comparisons"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--law", "critical-batch", "--optimal", "1e20"), "--optimal: does not apply to the law critical-batch"),
        (("--law", "critical-batch", "--loss-unit", "bits"), "loss_unit: does not apply"),
        (("--law", "critical-batch", "--option", "definition"), "is not of the form NAME=VALUE"),
        (("--law", "critical-batch", "--predict", "tokens=1e9"), "prediction: params: is missing"),
        (("--law", "chinchilla", "--option", "window=0.1"), "--option: does not apply to the law chinchilla"),
        (("--law", "multi-power"), "'steps_to_target' is not a column this program knows"),
    ],
)
def test_wrong_use_is_exit_code_2(call: Any, steps: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = call("fit", steps, "--column", "steps_to_target=steps", *arguments)
    assert code == 2
    assert words in err
    assert out == ""
