"""Runs from what the trackers themselves write: W&B's offline runs, MLflow's stores and TensorBoard's event files, whole and broken."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from analysis.import_sources import detect, read_source
from analysis.importers import Imported, ImportOptions, import_runs
from scaling.errors import DataError

WANDB = """
import sys, wandb
for width, code in ((64, 0), (128, 1), (256, 0)):
    run = wandb.init(project="p", name=f"w{width}", config={"model": {"d_model": width}, "lr": 2**-7, "seed": 0})
    for step in range(1, 400):
        run.log({"train/loss": 5 / step + width / 1000, **({"val/loss": 5.1 / step} if step % 10 == 0 else {})})
    if width == 256:
        run.log({"val/loss": float("nan")})
    run.finish(exit_code=code)
"""


def written_by(code: str, folder: Path, *arguments: str) -> None:
    """Run a script that writes with a tracker's package, in a process of its own: its warnings and threads are not ours."""
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def imported(place: Path | str, pattern: str | None = None, config_file: str | None = None, **options: object) -> Imported:
    source = read_source(str(place), name_pattern=pattern, config_file=config_file)
    return import_runs(source, ImportOptions.model_validate(options))


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wandb_runs")
    written_by(WANDB, folder)
    return folder


def test_wandb_offline_runs_with_states_and_curves(wandb_folder: Path) -> None:
    assert detect(str(wandb_folder)) == "wandb"
    result = imported(wandb_folder)
    assert {item.run.name: item.fate for item in result.placed} == {"w64": "complete", "w128": "crashed", "w256": "diverged"}
    losses = dict(zip(result.frame["width"], result.frame["loss"], strict=True))  # Runs of one second come in any order.
    assert set(losses) == {64, 256}
    assert losses[64] == pytest.approx(5.1 / 390)
    frame = imported(wandb_folder, loss_from="mean:2").frame
    means = dict(zip(frame["width"], frame["loss"], strict=True))
    assert means[64] == pytest.approx((5.1 / 390 + 5.1 / 380) / 2)
    one = next(wandb_folder.glob("wandb/offline-run-*"))
    assert len(read_source(str(one)).runs) == 1


def test_a_torn_wandb_log_says_so_and_is_not_finished(wandb_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(wandb_folder / "wandb", tmp_path / "wandb")
    logs = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    content = logs[0].read_bytes()
    assert len(content) > 2 * 32768, "the log spans blocks"
    logs[0].write_bytes(content[:40_000])
    logs[1].write_bytes(content[:7])
    logs[2].write_bytes(b"something else")
    source = read_source(str(tmp_path))
    assert [run.state for run in source.runs] == ["running"]
    assert "its log is torn after" in source.notes[0]
    assert [why for _, why in source.unreadable] == [
        f"{logs[1].name} holds no record of a run (it was killed before anything was written)",
        "is not a log of Weights & Biases",
    ]
    with pytest.raises(DataError, match="no run is left for the table: 1 runs not finished: running"):
        import_runs(source, ImportOptions())


def test_wandb_directories_with_files_alone(tmp_path: Path) -> None:
    for name, value in (("run-20260101_000000-a", 1), ("run-20260102_000000-a", 2), ("run-20260101_000000-b", 3)):
        files = tmp_path / "wandb" / name / "files"
        files.mkdir(parents=True)
        (files / "config.yaml").write_text(
            f"wandb_version: 1\n_wandb: {{value: {{}}}}\nwidth: {{desc: null, value: {64 * value}}}\nlr: {{value: 0.1}}\n"
        )
        (files / "wandb-summary.json").write_text(json.dumps({"val_loss": float(value), "_wandb": {"runtime": 1}}))
    (tmp_path / "wandb" / "latest-run").symlink_to("run-20260101_000000-b")
    result = imported(tmp_path)
    assert sorted(zip(result.frame["run_id"], result.frame["width"], result.frame["loss"], strict=True)) == [
        ("a", 128, 2),
        ("b", 192, 3),
    ]
    assert "1 directories are the continuation of a run" in str(result)
    (tmp_path / "wandb" / "run-20260101_000000-b" / "files" / "config.yaml").write_text("a: [")
    assert "run-20260101_000000-b" in str(imported(tmp_path))


@pytest.fixture(scope="module")
def mlflow_stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("mlflow")
    store, url = folder / "mlruns", f"sqlite:///{folder}/runs.db"
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        for place in (store.as_uri(), url):
            write_mlflow(place)
    return store, url


def write_mlflow(place: str) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=place)
    experiment = client.create_experiment("widths")
    for width, end in ((64, "FINISHED"), (128, "FAILED"), (256, "FINISHED"), (512, "FINISHED")):
        run_id = client.create_run(experiment, run_name=f"w{width}").info.run_id
        for name, value in {"model.d_model": width, "lr": 2**-7, "seed": 0}.items():
            client.log_param(run_id, name, value)
        for step in range(1, 5):
            client.log_metric(run_id, "val_loss", math.nan if width == 256 and step == 4 else 5 / step, step=step)
        client.set_terminated(run_id, end)
    client.delete_run(run_id)


@pytest.mark.parametrize("at", [0, 1], ids=["file_store", "sqlite"])
def test_mlflow_stores_with_states_and_curves(mlflow_stores: tuple[Path, str], at: int) -> None:
    place = mlflow_stores[at]
    assert detect(str(place)) == "mlflow"
    result = imported(place)
    assert {item.run.name: item.fate for item in result.placed} == {"w64": "complete", "w128": "crashed", "w256": "diverged"}
    complete = result.frame[result.frame["status"] == "complete"]
    assert list(complete[["width", "lr", "loss"]].iloc[0]) == [64, 2**-7, 1.25]
    assert "1 deleted runs are not read" in result.notes
    only = imported(place, where={"experiment": "widths", "model.d_model": "64"}, loss_from="mean:2")
    assert only.frame["loss"][0] == pytest.approx((5 / 3 + 5 / 4) / 2)
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ


def test_a_database_that_is_not_mlflows_is_left_alone(tmp_path: Path) -> None:
    import sqlite3

    with pytest.raises(DataError, match="no such file"):
        read_source(f"sqlite:///{tmp_path}/absent.db")
    assert not (tmp_path / "absent.db").exists()
    connection = sqlite3.connect(tmp_path / "other.db")
    connection.execute("CREATE TABLE mine (a)")
    connection.close()
    before = (tmp_path / "other.db").read_bytes()
    with pytest.raises(DataError, match="is not MLflow's database"):
        read_source(f"sqlite:///{tmp_path}/other.db")
    assert (tmp_path / "other.db").read_bytes() == before


def events(folder: Path, steps: int = 20, value: float = 2.0, hparams: dict[str, object] | None = None) -> Path:
    """A run as torch writes it."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for step in range(steps):
        writer.add_scalar("val/loss", value + 1 / (step + 1), step)
    if hparams:
        writer.add_hparams(hparams, {"hparam/best": value})
    writer.close()
    return next(folder.glob("*tfevents*"))


NAME = r"w(?P<width>\d+)_lr(?P<lr>[^_]+)_s(?P<seed>\d+)"


def test_tensorboard_runs_named_by_their_folders(tmp_path: Path) -> None:
    for width in (64, 128):
        events(tmp_path / "sweep" / f"w{width}_lr0.01_s3")
    events(tmp_path / "sweep" / "scratch")
    result = imported(tmp_path, NAME)
    assert list(result.frame["width"]) == [128, 64]
    assert result.frame["loss"][0] == pytest.approx(2.05)
    assert set(result.frame["seed"]) == {"3"}
    assert "--name-pattern matches no part of 1 names: sweep/scratch" in str(result)
    assert "no value of name.width" in str(result)
    assert "3 runs do not say how they ended" in str(result)


def test_tensorboard_hparams_and_config_files(tmp_path: Path) -> None:
    events(tmp_path / "a", hparams={"width": 64, "lr": 0.01})
    events(tmp_path / "b")
    (tmp_path / "b" / "hparams.yaml").write_text(
        "model: {d_model: 64}\nlr: 0.02\npath: !!python/object/apply:pathlib.PosixPath [x]\n"
    )
    events(tmp_path / "c", hparams={"width": 64, "lr": 0.01})
    (tmp_path / "c" / "config.json").write_text('{"lr": 0.04}')
    result = imported(tmp_path, columns={"width": "width"}, loss_metric="val/loss")
    assert list(result.frame["run_id"]) == ["a"]
    assert "hparams.lr is 0.01 and config.lr is 0.04: map one of them by its full name" in str(result)
    result = imported(tmp_path, columns={"width": "d_model", "lr": "config.lr"}, loss_metric="val/loss")
    assert list(result.frame["lr"]) == [0.02]


def test_a_tensorboard_run_that_ends_before_its_cells_longest_is_not_finished(tmp_path: Path) -> None:
    events(tmp_path / "w64_lr0.01_s0")
    events(tmp_path / "w64_lr0.02_s0", steps=10)
    events(tmp_path / "w128_lr0.02_s0", steps=10)
    events(tmp_path / "w64_lr0.04_s0", steps=10, value=math.nan)
    result = imported(tmp_path, NAME)
    assert dict(zip(result.frame["run_id"], result.frame["status"], strict=True)) == {
        "w128_lr0.02_s0": "complete",
        "w64_lr0.01_s0": "complete",
        "w64_lr0.04_s0": "diverged",
    }
    assert "1 not finished: ends before step 19" in str(result)


@pytest.mark.parametrize("kind", ["torn", "damaged", "garbage"])
def test_a_broken_event_file_is_told(tmp_path: Path, kind: str) -> None:
    events(tmp_path / "w64_lr0.01_s0", steps=40)
    file = events(tmp_path / "w64_lr0.02_s0", steps=40)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 255
    file.write_bytes({"torn": file.read_bytes()[:-5], "damaged": bytes(content), "garbage": b"garbage" * 30}[kind])
    result = imported(tmp_path, NAME)
    assert f"{file.name} is torn or damaged after" in str(result)
    assert ("w64_lr0.02_s0" in set(result.frame["run_id"])) == (kind == "torn"), (
        "what is left reaches the end only where it is torn there"
    )


def test_options_of_tensorboard(tmp_path: Path) -> None:
    events(tmp_path / "a")
    for pattern, words in (("w(", "is not a regular expression"), ("w", "has no named group")):
        with pytest.raises(DataError, match=words):
            read_source(str(tmp_path), name_pattern=pattern)
    with pytest.raises(DataError, match="beside its events"):
        imported(tmp_path, config_file="config.toml")
    (tmp_path / "t.csv").write_text("width,lr,loss\n1,2,3\n")
    with pytest.raises(DataError, match="is for TensorBoard's folders"):
        read_source(str(tmp_path / "t.csv"), name_pattern=NAME)
