"""The commands as programs use them: one JSON document on stdout with the promised keys, exit codes that mean something."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from scaling.records import read_records
from tests.sweeps.studies import SMALL, write_study

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "sweeps.cli"]


def call(folder: Path, *arguments: str) -> tuple[int, Any, str]:
    """Exit code, the JSON document, stderr."""
    result = subprocess.run([*CLI, *arguments, "--json"], cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout), result.stderr


def text_of(folder: Path, *arguments: str) -> str:
    result = subprocess.run([*CLI, *arguments], cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any]]:
    """A folder in which a small study was made, and what `study` answered."""
    folder = tmp_path_factory.mktemp("studied")
    (folder / "target.yaml").write_text("width: 128\ntokens: 10240\n")
    training = {"steps": 40, "batch_size": 4, "validation_sequences": 16}
    write_study(folder, widths=[16, 32, 64], training=training, target="target.yaml", follow_up={"margin_points": 1})
    code, document, _ = call(folder, "study", "small.yaml")
    return folder, code, document


def test_study_answers_with_verdicts_a_recommendation_and_its_files(studied: tuple[Path, int, dict[str, Any]]) -> None:
    folder, code, document = studied
    assert set(document["parametrizations"]) == {"mup", "sp"}
    assert code == (0 if document["parametrizations"]["mup"]["verdict"] == "transfers" else 1)
    assert document["planned"] == document["complete"] + document["diverged"]
    study = folder / "studies" / "small"
    for name in ("report.html", "runs.csv", "transfer.json", "recommendation.json", "recommended.yaml", "lr_curves.svg"):
        assert (study / name).stat().st_size > 0, name
    page = (study / "report.html").read_text()
    assert page.index('class="verdict') < page.index("<table") < page.index("<svg")
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert set(document["best_losses"]) == {"width", "mup", "sp"}


def test_typed_again_it_has_nothing_to_do(studied: tuple[Path, int, dict[str, Any]]) -> None:
    folder, code, before = studied
    again, document, messages = call(folder, "study", "small.yaml")
    assert (again, document["made"]) == (code, 0)
    assert "Nothing left to do" in messages
    assert document["parametrizations"] == before["parametrizations"]


def test_status_counts_and_names_the_next_command(studied: tuple[Path, int, dict[str, Any]]) -> None:
    folder = studied[0]
    code, document, _ = call(folder, "status", "studies/small")
    assert (code, document["finished"], document["missing"], document["failed"]) == (0, True, 0, [])
    assert document["next"] is None
    assert len(document["cells"]) == 6
    records = list(read_records(folder / "studies" / "small"))
    victim = records[0]
    path = folder / "studies" / "small" / "runs" / victim.run_id / "record.json"
    kept = path.read_text()
    path.unlink()
    code, document, _ = call(folder, "status", "small.yaml")
    assert code == 1
    assert document["missing"] >= 1
    assert document["next"] == "mutransfer study studies/small"
    path.write_text(kept)


def test_transfer_keeps_its_contract_for_a_study_and_for_a_table(studied: tuple[Path, int, dict[str, Any]]) -> None:
    folder, code, document = studied
    again, from_study, _ = call(folder, "transfer", "studies/small")
    assert again == code
    assert from_study["parametrizations"] == document["parametrizations"]
    table = (
        pd.read_csv(folder / "studies" / "small" / "runs.csv")
        .rename(columns={"lr": "eta", "loss": "final"})
        .drop(columns="log2_lr")
    )
    table.to_csv(folder / "mine.csv", index=False)
    again, from_table, _ = call(folder, "transfer", "mine.csv", "--column", "lr=eta", "--column", "loss=final")
    assert again == code
    for kind, fit in from_study["parametrizations"].items():
        other = from_table["parametrizations"][kind]
        assert other["verdict"] == fit["verdict"]
        assert other["slope"]["value"] == pytest.approx(fit["slope"]["value"], abs=1e-6)
        assert set(fit["slope"]) >= {"value", "interval"}
        assert {"width", "log2_lr", "interval", "censored"} <= set(fit["optima"][0])
    assert call(folder, "transfer", "studies/small", "--parametrization", "sp")[1]["parametrizations"].keys() == {"sp"}


def test_recommendation_is_a_config_that_explain_and_train_take(studied: tuple[Path, int, dict[str, Any]]) -> None:
    folder = studied[0]
    _, document, _ = call(folder, "recommend", "studies/small", "--out", "large.yaml")
    _, explained, _ = call(folder, "explain", "large.yaml")
    assert explained["width"] == 128
    assert [(row["name"], row["lr"], row["multiplier"]) for row in explained["tensors"]] == [
        (row["name"], row["lr"], row["multiplier"]) for row in document["tensors"]
    ]
    code, record, _ = call(folder, "train", "large.yaml", "--training.steps=3", "--out", "run")
    assert (code, record["width"], record["steps"]) == (0, 128, 3)
    assert len(document["steps"]) >= 8
    assert all(step["source"] and step["formula"] for step in document["steps"])


def test_a_table_and_the_config_of_a_run_recommend_what_the_study_does(studied: tuple[Path, int, dict[str, Any]]) -> None:
    folder = studied[0]
    study = folder / "studies" / "small"
    _, from_study, _ = call(folder, "recommend", "studies/small")
    record = next(record for record in read_records(study) if record.parametrization == "mup")
    arguments = ("studies/small/runs.csv", "--target", "target.yaml", "--run", f"studies/small/runs/{record.run_id}/config.yaml")
    _, from_table, _ = call(folder, "recommend", *arguments)
    assert from_table["hyperparameters"] == from_study["hyperparameters"]
    assert from_table["tensors"] == from_study["tensors"]
    refused = subprocess.run(
        [*CLI, "recommend", "studies/small/runs.csv", "--target", "target.yaml"], cwd=folder, capture_output=True
    )
    assert refused.returncode == 2
    assert b"--run" in refused.stderr


def test_a_target_smaller_than_the_base_is_refused_with_its_line(studied: tuple[Path, int, dict[str, Any]]) -> None:
    folder = studied[0]
    (folder / "tiny.yaml").write_text("name: tiny\nwidth: 8\ntokens: 10240\n")
    result = subprocess.run(
        [*CLI, "recommend", "studies/small", "--target", "tiny.yaml"], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "tiny.yaml:2: width: target width 8 is smaller than the base width 16" in result.stderr


def test_a_run_deleted_by_hand_is_made_again(studied: tuple[Path, int, dict[str, Any]]) -> None:
    folder, _, before = studied
    victim = next(iter(read_records(folder / "studies" / "small")))
    shutil.rmtree(folder / "studies" / "small" / "runs" / victim.run_id)
    _, document, messages = call(folder, "run", "small.yaml")
    assert document["made"] == 1
    assert f"without a record now (deleted?), so made again: {victim.run_id}" in messages
    assert call(folder, "transfer", "studies/small")[1]["parametrizations"] == before["parametrizations"]


def test_a_grid_grows_in_place_and_finished_runs_are_kept(studied: tuple[Path, int, dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(studied[0], folder)
    _, planned, _ = call(folder, "plan", "studies/small", "--set", "log2_lr.low=-10")
    more = planned["total"] - planned["done"]
    assert more > 0
    _, document, messages = call(folder, "run", "studies/small", "--set", "log2_lr.low=-10")
    assert "log2_lr.low: -8.0 -> -10.0" in messages
    assert document["made"] >= more
    status = call(folder, "status", "studies/small")[1]
    assert status["total"] == status["done"] == studied[2]["made"] + document["made"], "no finished run is made again"


def test_runs_of_other_settings_in_the_directory_are_left_out(studied: tuple[Path, int, dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(studied[0], folder)
    runs = folder / "studies" / "small" / "runs"
    victim = next(iter(read_records(folder / "studies" / "small")))
    stranger = runs / "0123456789ab"
    shutil.copytree(runs / victim.run_id, stranger)
    record = json.loads((stranger / "record.json").read_text()) | {"run_id": stranger.name, "loss": 0.1}
    (stranger / "record.json").write_text(json.dumps(record))
    _, document, _ = call(folder, "transfer", "studies/small")
    assert document["parametrizations"] == studied[2]["parametrizations"]
    assert any("1 runs of another config or other data are left out" in note for note in document["notes"])


def test_a_finished_run_that_then_fails_is_reported_and_retried(
    studied: tuple[Path, int, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(studied[0], folder)
    victim = next(iter(read_records(folder / "studies" / "small"))).run_id
    directory = folder / "studies" / "small" / "runs" / victim
    shutil.rmtree(directory)
    (directory / "metrics.jsonl").mkdir(parents=True)
    code, document, _ = call(folder, "run", "studies/small")
    assert (code, list(document["failed"])) == (1, [victim])
    assert call(folder, "status", "studies/small")[1]["next"] == "mutransfer retry studies/small"
    (directory / "metrics.jsonl").rmdir()
    code, document, _ = call(folder, "retry", "studies/small")
    assert (code, document["made"], document["failed"]) == (0, 1, {})


def test_faults_are_a_json_document_too(tmp_path: Path) -> None:
    code, document, messages = call(tmp_path, "status", "nowhere.yaml")
    assert code == 2
    assert document["errors"][0]["what"] == "no such file"
    assert "no such file" in messages


def test_plan_costs_before_anything_runs(tmp_path: Path) -> None:
    write_study(tmp_path)
    _, document, _ = call(tmp_path, "plan", "small.yaml")
    assert (document["total"], document["done"]) == (12, 0)
    assert not (tmp_path / "studies" / "small" / "runs").exists()
    for row in document["runs"]:
        assert row["tokens"] == 8 * 4 * 16
        assert row["flops"] > 0
        assert row["seconds"] > 0
    assert document["wall_s_left"] == pytest.approx(sum(row["seconds"] for row in document["runs"]) / document["jobs"])
    printed = text_of(tmp_path, "plan", "small.yaml", "--no-timing")
    assert all(row["run_id"] in printed for row in document["runs"])


def test_a_run_that_raises_is_tried_again_then_reported_and_retried(tmp_path: Path) -> None:
    """A directory where metrics.jsonl should be makes one run fail, as a user's broken code would."""
    write_study(tmp_path)
    _, document, _ = call(tmp_path, "plan", "small.yaml", "--no-timing")
    victim = document["runs"][0]["run_id"]
    blocked = tmp_path / "studies" / "small" / "runs" / victim / "metrics.jsonl"
    blocked.mkdir(parents=True)
    code, document, messages = call(tmp_path, "run", "small.yaml")
    assert code == 1
    assert (document["complete"], list(document["failed"])) == (11, [victim])
    assert messages.count("FAILED") == 2
    code, status, _ = call(tmp_path, "status", "small.yaml")
    assert code == 1
    assert status["failed"][0]["run_id"] == victim
    assert status["next"] == "mutransfer retry studies/small"
    blocked.rmdir()
    code, document, _ = call(tmp_path, "retry", "small.yaml")
    assert (code, document["complete"], document["failed"]) == (0, 12, {})


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "studies").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_studies_plan(path: Path, tmp_path: Path) -> None:
    _, document, _ = call(tmp_path, "plan", str(path), "--no-timing")
    study = yaml.safe_load(path.read_text())
    # A searched study begins at its smallest width.
    first = {min(study["widths"])} if "search" in study else set(study["widths"])
    assert {row["width"] for row in document["runs"]} == first
    assert max(study["widths"]) >= 4 * min(study["widths"])


def test_shipped_model_explains_itself(tmp_path: Path) -> None:
    _, document, _ = call(tmp_path, "explain", str(ROOT / "configs" / "models" / "base.yaml"))
    hidden = next(row for row in document["tensors"] if row["role"] == "hidden")
    assert hidden["lr"] == pytest.approx(0.005 / 2)
    assert "2203.03466" in hidden["source"]
    assert SMALL["name"] == "small"


def test_damaged_files_are_named_with_what_to_delete(studied: tuple[Path, int, dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(studied[0], folder)
    study = folder / "studies" / "small"
    journal = study / "optuna-journal.log"
    kept = journal.read_bytes()
    for content in (kept[:300] + b"garbage\n" + kept[300:], bytes(range(256)) + b"\n"):
        journal.write_bytes(content)
        code, document, _ = call(folder, "status", "studies/small")
        assert (code, document["errors"][0]["what"]) == (2, "is damaged")
    journal.unlink()
    assert call(folder, "run", "studies/small")[1]["made"] == 0, "the records are the truth, the journal is made again"
    first, second, third, *_ = sorted((study / "runs").glob("*/record.json"))
    first.write_text("{")
    second.write_bytes(b"\xff")
    third.write_text(third.read_text().replace(third.parent.name, "0123456789ab"))
    code, document, _ = call(folder, "status", "studies/small")
    assert code == 2
    assert [error["what"].split()[0:3] for error in document["errors"]] == [
        ["is", "not", "a"],
        ["is", "not", "a"],
        ["is", "the", "record"],
    ]
