"""`mutransfer import` as it is typed: a tracker's runs to a verdict in two commands, and the runs of one study taken over by another."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from scaling.records import read_records, run_directory
from sweeps import cli
from sweeps.board import Board
from sweeps.plan import make_plan
from sweeps.study_dir import open_study
from tests.sweeps.studies import write_study

GRID: dict[str, Any] = {"parametrizations": {"mup": {}}, "widths": [16]}


def mutransfer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in this process."""
    monkeypatch.setattr("sys.argv", ["mutransfer", *map(str, arguments)])
    code = cli._main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: mutransfer(monkeypatch, capsys, *arguments)


def project(folder: Path) -> Path:
    """A W&B project as its API gives it: muP and SP at four widths, the optimum of SP falling with the width."""
    runs = []
    for width in (64, 128, 256, 512):
        for mup in (True, False):
            for log2_lr in range(-12, -4):
                best = -8 - (0 if mup else math.log2(width / 64))
                loss = 3 - 0.1 * math.log2(width) + 0.02 * (log2_lr - best) ** 2
                config = {"model": {"d_model": width}, "optim": {"lr": 2.0**log2_lr}, "use_mup": mup, "host": f"h{len(runs)}"}
                runs.append({"id": f"r{len(runs)}", "state": "finished", "config": config, "summary": {"val/loss": loss}})
    runs[0]["state"] = "crashed"
    path = folder / "project.json"
    path.write_text(json.dumps(runs))
    return path


def test_a_trackers_runs_are_judged_in_two_commands(tmp_path: Path, call: Any) -> None:
    code, text, _ = call("import", project(tmp_path), "--out", tmp_path / "runs.csv")
    assert code == 0, text
    assert "64 runs read" in text
    assert "1 crashed, last loss finite: crashed: r0" in text
    assert text.splitlines()[-1].endswith(f"next: mutransfer transfer {tmp_path}/runs.csv")
    code, text, _ = call("transfer", tmp_path / "runs.csv", "--json")
    assert code == 0
    verdicts = {kind: fit["verdict"] for kind, fit in json.loads(text)["parametrizations"].items()}
    assert verdicts == {"mup": "transfers", "sp": "drifts"}


def test_json_and_parquet(tmp_path: Path, call: Any) -> None:
    code, text, _ = call("import", project(tmp_path), "--out", tmp_path / "runs.parquet", "--where", "use_mup=true", "--json")
    document = json.loads(text)
    assert code == 0
    counts = {key: document[key] for key in ("read", "complete", "diverged", "crashed", "elsewhere", "unusable")}
    assert counts == {"read": 64, "complete": 31, "diverged": 0, "crashed": 1, "elsewhere": 32, "unusable": 0}
    assert len(pd.read_parquet(tmp_path / "runs.parquet")) == 31


def test_without_out_nothing_is_written(tmp_path: Path, call: Any) -> None:
    source = project(tmp_path)
    code, text, _ = call("import", source)
    assert code == 0
    assert "nothing is written" in text
    assert list(tmp_path.iterdir()) == [source]


def test_runs_that_another_command_would_bring_in_make_it_incomplete(tmp_path: Path, call: Any) -> None:
    runs = json.loads(project(tmp_path).read_text())
    del runs[1]["summary"]["val/loss"]
    (tmp_path / "project.json").write_text(json.dumps(runs))
    code, text, _ = call("import", tmp_path / "project.json")
    assert code == 1
    assert "1 cannot be used: no value of summary.val/loss: r1" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "runs.txt"], "is neither .csv nor .parquet"),
        (["--loss-from", "median"], "--loss-from median: is not one of its values"),
        (["--loss-from", "mean:0", "--column", "lr"], "2 faults"),
        (["--format", "aim"], "choose from: table, wandb, mlflow, tensorboard"),
        (["--column", "lr=optim.lr", "--column", "lr=lr"], "'lr' is given twice"),
        (["--into", "study", "--column", "lr=x", "--loss-unit", "bits"], "2 faults"),
        (["--name", "other"], "is for --into"),
        (["--value", "width=wide"], "'wide' is not a number"),
    ],
)
def test_wrong_options_are_messages(tmp_path: Path, call: Any, arguments: list[str], words: str) -> None:
    code, text, message = call("import", project(tmp_path), *arguments)
    assert (code, text) == (2, "")
    assert words in message


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three runs, made on "another machine"."""
    from scaling.data import prepare
    from scaling.train import train_run

    folder = tmp_path_factory.mktemp("there")
    study = open_study(write_study(folder, **GRID), folder / "study")
    corpus = prepare(**study.data_arguments())
    for planned in make_plan(study.config, {}):
        train_run(planned.run, run_directory(study.directory, planned.run_id), corpus)
    return study.directory


def test_the_runs_of_another_directory_count_as_done(tmp_path: Path, finished: Path, call: Any) -> None:
    config = write_study(tmp_path, **GRID)
    study = tmp_path / "study"
    assert call("plan", config, "--out", study, "--no-timing")[0] == 0
    assert "no such file" in call("import", finished, "--into", study)[2], "a plan makes no study"
    open_study(config, study)
    code, text, _ = call("import", finished, "--into", study)
    assert code == 0
    assert "3 runs taken over" in text
    assert "3 of them in its plan; 0 were there already" in text
    for record in read_records(finished):
        for name in ("record.json", "config.yaml", "metrics.jsonl"):
            assert (study / "runs" / record.run_id / name).read_text() == (finished / "runs" / record.run_id / name).read_text()
    assert "0 runs taken over" in call("import", finished / "runs", "--into", study)[1]
    assert "3 of 3 runs done" in call("status", study)[1]
    code, text, _ = call("run", study, "--jobs", "1")
    assert code == 0
    assert "Nothing left to do" in text


def test_runs_of_another_study_stay_out_with_the_reason(tmp_path: Path, finished: Path, call: Any) -> None:
    study = open_study(write_study(tmp_path, **GRID | {"optimizer": {"beta1": 0.8}}), tmp_path / "study").directory
    source = tmp_path / "moved"
    shutil.copytree(finished, source)
    first, second, third = sorted(source.glob("runs/*/record.json"))
    first.write_text(first.read_text()[:50])
    second.write_text(second.read_text().replace('"parametrization": "mup"', '"parametrization": "sp"'))
    code, text, _ = call("import", source, "--into", study, "--json")
    document = json.loads(text)
    assert code == 1
    assert document["taken"] == 0
    assert document["strangers"][second.parent.name] == "parametrization sp; this study has mup"
    assert document["strangers"][third.parent.name] == "optimizer.beta1 0.9, here 0.8"
    assert list(document["damaged"]) == [str(first.parent)]
    assert not list((study / "runs").glob("*/record.json"))


def test_what_is_here_is_kept_where_it_differs(tmp_path: Path, finished: Path, call: Any) -> None:
    study = tmp_path / "study"
    shutil.copytree(finished, study)
    record = min(study.glob("runs/*/record.json"))
    loss = json.loads(record.read_text())["loss"]
    record.write_text(record.read_text().replace(str(loss), "1.25"))
    code, text, _ = call("import", finished, "--into", study)
    assert code == 0
    assert f"{record.parent.name} is there already with another loss (1.25 here, {loss:.6g} there): kept as it is here" in text
    assert json.loads(record.read_text())["loss"] == 1.25
    assert "is this study itself" in call("import", study, "--into", study)[2]
    assert "holds no finished run" in call("import", tmp_path, "--into", study)[2]


def test_a_study_in_a_database_gives_and_takes_runs(tmp_path: Path, finished: Path, call: Any) -> None:
    url = f"sqlite:///{tmp_path}/board.db"
    assert "no such file" in call("import", url, "--into", finished)[2]
    shared = open_study(write_study(tmp_path, **GRID, storage=url), tmp_path / "shared").directory
    code, text, _ = call("import", finished, "--into", shared)
    assert code == 0, text
    board = Board(url, "small")
    assert list(board.states().values()) == ["done"] * 3
    board.close()
    alone = open_study(write_study(tmp_path, **GRID), tmp_path / "alone").directory
    code, text, _ = call("import", url, "--into", alone)
    assert code == 0, text
    assert {record.run_id: record.loss for record in read_records(alone)} == {
        record.run_id: record.loss for record in read_records(finished)
    }
    assert "holds no study 'other'; it holds: small" in call("import", url, "--into", alone, "--name", "other")[2]
