"""`mutransfer fit --isoflop` as it is typed: the document, exit codes, and options that do not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.isoflop_simulation import DESIGNS


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = DESIGNS[1].table(np.random.default_rng(0))
    path = tmp_path_factory.mktemp("isoflop") / "runs.csv"
    columns = {"N": table.columns["params"], "D": table.columns["tokens"], "C": table.columns["flops"], "loss": table.loss}
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


COLUMNS = ("--column", "params=N", "--column", "tokens=D", "--column", "flops=C", "--params-include", "embedding")


def test_the_document_holds_minima_laws_and_approaches(call: Any, runs: Path) -> None:
    code, text, err = call(
        "fit", runs, *COLUMNS, "--isoflop", "--method", "cubic", "--optimal", "1e22", "--optimal", "3e21", "--json"
    )
    document = json.loads(text)
    assert code == 0
    assert err == ""
    assert document["trusted"] is True
    assert len(document["isoflop"]["budgets"]) == 6
    low, high = document["isoflop"]["laws"]["params"]["exponent"]["interval"]
    assert low < DESIGNS[1].exponent < high
    assert [item["flops"] for item in document["approaches"]] == [1e22, 3e21]
    assert [item["approach"] for item in document["approaches"][0]["approaches"]] == [1, 2, 3]
    assert all(pair["agrees"] for pair in document["approaches"][0]["agreements"])


def test_disagreement_and_doubt_are_exit_code_1(call: Any, runs: Path) -> None:
    code, text, _ = call("fit", runs, *COLUMNS, "--isoflop", "--method", "cubic", "--optimal", "1e26")
    assert code == 1
    assert "  ! approach 2: the optimal params" in text
    assert "approaches 1 and 2" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "cubic"), "--method: says how IsoFLOP curves are read"),
        (("--isoflop", "--predict", "params=1e9,tokens=1e9"), "--predict: does not apply with --isoflop"),
        (("--isoflop", "--bootstrap", "pairs"), "--bootstrap: does not apply with --isoflop"),
        (("--isoflop", "--method", "quartic"), "choose from: spline, parabola, cubic"),
        (("--isoflop", "--window", "4"), "do not apply to the spline"),
        (("--isoflop", "--method", "cubic", "--points", "2"), "points 2: are too few"),
        (("--isoflop", "--optimal", "-1"), "is not positive"),
        (("--isoflop", "--where", "C<2e18", "--tolerance", "7"), "tolerance 7: is no share"),
    ],
)
def test_wrong_use_is_exit_code_2_with_a_cure(call: Any, runs: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = call("fit", runs, *COLUMNS, *arguments)
    assert code == 2
    assert words in err
    assert "cure:" in err
    assert out == ""


def test_curves_are_drawn_where_there_are_some(call: Any, runs: Path, tmp_path: Path) -> None:
    code, _, _ = call("fit", runs, *COLUMNS, "--isoflop", "--method", "cubic", "--plot", tmp_path / "isoflop.png")
    assert code == 0
    assert (tmp_path / "isoflop.png").read_bytes().startswith(b"\x89PNG")
    scattered = pd.read_csv(runs).assign(C=np.geomspace(1e18, 1e21, 48)).drop(columns="D")
    scattered.assign(D=scattered["C"] / (6 * scattered["N"])).to_csv(tmp_path / "runs.csv", index=False)
    options = ("--isoflop", "--tolerance", "0.001", "--plot", tmp_path / "none.png")
    code, out, err = call("fit", tmp_path / "runs.csv", *COLUMNS, *options)
    assert code == 2
    assert "has nothing to draw" in err
    assert out == ""
    assert not (tmp_path / "none.png").exists()


def test_a_table_without_compute_budgets_still_compares_what_it_can(call: Any, runs: Path, tmp_path: Path) -> None:
    scattered = pd.read_csv(runs)
    scattered["C"] *= np.geomspace(1, 1.5, len(scattered))
    scattered["D"] = scattered["C"] / (6 * scattered["N"])
    scattered.to_csv(tmp_path / "runs.csv", index=False)
    code, text, _ = call("fit", tmp_path / "runs.csv", *COLUMNS, "--isoflop", "--tolerance", "0.001", "--json")
    document = json.loads(text)
    assert code in (0, 1)
    assert document["isoflop"] is None
    assert "no budget has 3 sizes" in document["approaches"][0]["approaches"][1]["reason"]
