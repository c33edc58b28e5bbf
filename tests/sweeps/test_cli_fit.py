"""`mutransfer fit` as it is typed: documents, exit codes, and what is said about wrong options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.fit import load_fit
from analysis.fit_simulation import Design, simulate

REFERENCE = Path(__file__).parents[1] / "fixtures" / "reference.csv"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = simulate(Design(16, "huber-log", noise=0.002), np.random.default_rng(0))
    path = tmp_path_factory.mktemp("fit") / "runs.csv"
    pd.DataFrame({"N": table.columns["params"], "D": table.columns["tokens"], "val": table.loss}).to_csv(path, index=False)
    return path


COLUMNS = ("--column", "params=N", "--column", "tokens=D", "--column", "loss=val")


def test_the_document_holds_what_other_programs_rely_on(call: Any, runs: Path) -> None:
    code, text, _ = call("fit", runs, *COLUMNS, "--predict", "params=2e10,tokens=4e11", "--optimal", "1e22", "--json")
    document = json.loads(text)
    assert code == 0
    assert document["law"] == "chinchilla"
    assert set(document["params"]) == {"E", "A", "B", "alpha", "beta"}
    assert all({"value", "stderr", "interval"} <= set(item) for item in document["params"].values())
    assert document["starts"]["total"] >= document["starts"]["at_optimum"] > 0
    assert document["success"] is document["trusted"] is True
    assert document["flags"] == []
    low, high = document["predictions"][0]["loss"]["interval"]
    assert low < document["predictions"][0]["loss"]["value"] < high
    assert document["optimal"][0]["params"]["value"] * document["optimal"][0]["tokens"]["value"] * 6 == pytest.approx(1e22)


def test_an_untrusted_answer_is_exit_code_1(call: Any, runs: Path) -> None:
    code, text, _ = call("fit", runs, *COLUMNS, "--predict", "params=1e12,tokens=4e11", "--json")
    document = json.loads(text)
    assert code == 1
    assert document["trusted"] is False
    assert any("x100 from what was measured" in flag for flag in document["flags"])


def test_every_wrong_option_is_said_at_once(call: Any, runs: Path) -> None:
    code, _, err = call("fit", runs, "--column", "paramsN", "--predict", "params=many", "--bootstrap", "pears")
    assert code == 2
    for words in ("--column paramsN", "'many' is not a number", "--bootstrap pears"):
        assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--law", "chinchila"), "law 'chinchila': is not known"),
        (("--loss", "mse"), "choose from: huber-log"),
        (("--delta", "0"), "delta 0: is not positive"),
        (("--where", "size=1"), "has no column 'size'"),
        (("--where", "loss"), "is not of the form NAME=VALUE"),
        (("--law", "moe"), "--column experts=NAME"),
        (("--predict", "params=1e9"), "prediction: tokens: is missing"),
        (("--predict", "params=-1,tokens=1e9"), "is not positive and finite"),
        (("--optimal", "-1"), "is not positive"),
        (("--law", "power", "--optimal", "1e20"), "cannot be split by the law power"),
        (("--level", "2"), "is no level of an interval"),
        (("--loss-unit", "bytes"), "choose from: nats, bits"),
    ],
)
def test_wrong_use_is_exit_code_2_with_a_cure(call: Any, runs: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = call("fit", runs, *COLUMNS, *arguments)
    assert code == 2
    assert words in err
    assert out == ""


def test_a_table_without_the_columns_names_the_nearest(call: Any, runs: Path) -> None:
    code, _, err = call("fit", runs)
    assert code == 2
    assert "--column loss=NAME" in err
    assert "--column params=NAME" in err


def test_two_parametrizations_are_not_fitted_together(call: Any) -> None:
    code, _, err = call("fit", REFERENCE)
    assert code == 2
    assert "choose one: --parametrization mup" in err


def test_runs_of_a_study_take_their_best_learning_rate(call: Any) -> None:
    code, text, _ = call("fit", REFERENCE, "--parametrization", "mup", "--law", "power", "--json")
    document = json.loads(text)
    assert code in (0, 1)
    assert any("other learning rates than the best of their size" in note for note in document["notes"])
    assert 0.02 < document["params"]["alpha"]["value"] < 0.1


def test_a_saved_fit_and_a_bootstrap(call: Any, runs: Path, tmp_path: Path) -> None:
    code, text, _ = call("fit", runs, *COLUMNS, "--save", tmp_path / "fit.json", "--bootstrap", "groups:params:50")
    assert code == 0
    assert "bootstrap of groups" in text
    assert str(load_fit(tmp_path / "fit.json")) in text


def test_a_fit_is_not_saved_over_its_table(call: Any, runs: Path) -> None:
    before = runs.read_bytes()
    code, _, err = call("fit", runs, *COLUMNS, "--save", runs)
    assert (code, runs.read_bytes()) == (2, before)
    assert "exists, and is no fit: it would be lost" in " ".join(err.split())


def test_a_wild_bootstrap_names_what_shares_a_weight(call: Any, runs: Path) -> None:
    _, text, _ = call("fit", runs, *COLUMNS, "--bootstrap", "wild:params:50", "--json")
    assert json.loads(text)["bootstrap"]["kind"] == "wild of 4 levels of params"
    code, _, err = call("fit", runs, *COLUMNS, "--bootstrap", "wild:width")
    assert code == 2
    assert "no column width" in err


def test_left_out_sizes_stand_in_the_document(call: Any, runs: Path) -> None:
    _, text, _ = call("fit", runs, *COLUMNS, "--leave-out", "params", "--json")
    left_out = json.loads(text)["left_out"]
    assert len(left_out["levels"]) == 4
    assert left_out["error"] > left_out["fitted_error"] > 0


def test_a_plot_is_written_and_a_wrong_name_is_said_first(call: Any, runs: Path, tmp_path: Path) -> None:
    code, out, _ = call("fit", runs, *COLUMNS, "--plot", tmp_path / "fit.svg", "--json")
    assert code == 0
    assert json.loads(out)["law"] == "chinchilla"
    assert "<svg" in (tmp_path / "fit.svg").read_text()[:2000]
    code, _, err = call("fit", runs, *COLUMNS, "--plot", tmp_path / "none" / "fit.jpg")
    assert code == 2
    assert "end the name in .png, .svg, .pdf" in err
    assert "none does not exist" in err


def test_auto_prints_the_comparison(call: Any, runs: Path) -> None:
    code, text, _ = call("fit", runs, *COLUMNS, "--law", "auto", "--json")
    document = json.loads(text)
    assert code in (0, 1)
    assert document["law"] == document["comparison"]["best"]
    assert document["comparison"]["scores"][0]["error"] <= document["comparison"]["scores"][1]["error"]
