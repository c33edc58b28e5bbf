"""Files of runs as tables: which value becomes which column, what becomes of every run, what is refused."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.import_sources import read_source
from analysis.importers import Imported, ImportOptions, import_runs
from analysis.table import load_table
from scaling.errors import DataError, UserError


def run(run_id: str, **changes: Any) -> dict[str, Any]:
    """A finished run as W&B's API gives it; a key with __ goes into config or summary."""
    result: dict[str, Any] = {
        "id": run_id,
        "name": f"name-{run_id}",
        "state": "finished",
        "config": {"model": {"d_model": 64}, "lr": 2.0**-7, "seed": 0, "batch": 8, "context": 16, "steps": 100},
        "summary": {"val/loss": 2.0, "_step": 99},
    }
    for key, value in changes.items():
        part, _, inside = key.partition("__")
        if inside:
            result[part][inside] = value
        else:
            result[part] = value
    return result


def write(folder: Path, *runs: dict[str, Any]) -> str:
    path = folder / "runs.json"
    path.write_text(json.dumps(list(runs)))
    return str(path)


def imported(place: str, **options: Any) -> Imported:
    return import_runs(read_source(place), ImportOptions(**options))


def refused(place: str, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        imported(place, **options)
    return str(error.value)


def test_a_json_export_gives_a_table_that_the_analysis_reads(tmp_path: Path) -> None:
    place = write(tmp_path, run("a"), run("b", config__lr=2.0**-6, summary__tokens=1e6), run("c", config__lr=2.0**-5))
    result = imported(place)
    assert list(result.frame["run_id"]) == ["a", "b", "c"]
    assert set(result.frame["source"]) == {place}
    assert result.columns["width"].startswith("config.model.d_model   (guessed")
    assert "last value of summary.val/loss, taken as nats per token   (guessed" in result.columns["loss"]
    table = load_table(result.frame)
    assert list(table.frame["log2_lr"]) == [-7, -6, -5]
    assert set(table.frame["width"]) == {64}
    assert "no column parametrization, depth, batch_tokens: taken as one level each" in str(result)


def test_every_run_is_accounted_for(tmp_path: Path) -> None:
    place = write(
        tmp_path,
        run("good"),
        run("nan", summary={"val/loss": "NaN"}),
        run("crashed", state="crashed"),
        run("crashed_at_nan", **{"state": "failed", "summary": {"val/loss": 2.1, "train/loss": "NaN"}}),
        run("running", state="running"),
        run("odd", state="hibernating"),
        run("no_loss", summary={}),
        run("no_lr", config={"model": {"d_model": 64}, "lr": None}),
        run("words", config__lr="fast"),
        run("good"),
    )
    result = imported(place)
    fates = {str(item.run).partition(" ")[0].removeprefix("name-"): item.fate for item in result.placed[:-1]}
    assert fates == {
        "good": "complete",
        "nan": "diverged",
        "crashed": "crashed",
        "crashed_at_nan": "diverged",
        "running": "unfinished",
        "odd": "unusable",
        "no_loss": "unusable",
        "no_lr": "unusable",
        "words": "unusable",
    }
    assert result.placed[-1].fate == "duplicate"
    assert result.incomplete
    assert sum(len(runs) for _, runs in result.reasons()) + len(result.frame) == 10
    text = str(result)
    for words in (
        "10 runs read",
        "3 in the table: 1 complete, 2 diverged",
        "7 not in the table",
        "'fast' is not a number",
        "hibernating",
    ):
        assert words in text
    assert result.frame.loc[result.frame["status"] == "diverged", "loss"].isna().all()


def test_one_run_id_for_two_runs_is_no_run(tmp_path: Path) -> None:
    result = imported(write(tmp_path, run("a"), run("a", summary__loss=1, config__lr=0.5), run("b")))
    assert list(result.frame["run_id"]) == ["b"]
    assert "its run_id stands for runs that differ" in str(result)


def test_a_product_of_columns_and_numbers(tmp_path: Path) -> None:
    place = write(tmp_path, run("a"))
    result = imported(
        place, columns={"batch_tokens": "batch*context", "tokens": "steps*batch_tokens", "flops": "6 * 1e3 * steps"}
    )
    assert list(result.frame[["batch_tokens", "tokens", "flops"]].iloc[0]) == [128, 12_800, 600_000]
    assert result.columns["tokens"] == "config.steps * config.batch * config.context"
    assert "no run has 'stepps'" in refused(place, columns={"tokens": "stepps*batch"})
    assert "__import__" in refused(place, columns={"tokens": "__import__('os')*2"})
    assert "holds words" in refused(place, columns={"seed": "seed*2"})


def test_bits_become_nats(tmp_path: Path) -> None:
    result = imported(write(tmp_path, run("a")), loss_unit="bits")
    assert result.frame["loss"][0] == pytest.approx(2 * math.log(2))
    assert "bits per token, times ln 2" in result.columns["loss"]


def test_the_loss_is_the_last_the_least_or_the_mean_of_the_last_points(tmp_path: Path) -> None:
    history = [{"_step": step, "val/loss": value} for step, value in enumerate([3.0, 1.0, 2.0])] + [{"_step": 3, "other": 1}]
    place = write(tmp_path, run("a", history=history))
    losses = {how: imported(place, loss_from=how).frame["loss"][0] for how in ("last", "min", "mean:2")}
    assert losses == {"last": 2.0, "min": 1.0, "mean:2": 1.5}
    assert "needs 9 points, and summary.val/loss has 3" in refused(place, loss_from="mean:9")
    assert "the source holds the final one alone" in refused(write(tmp_path, run("a")), loss_from="min")


def test_a_run_that_ends_at_a_nan_is_diverged_whatever_the_rule(tmp_path: Path) -> None:
    history = [{"_step": 0, "val/loss": 1.0}, {"_step": 1, "val/loss": "NaN"}]
    result = imported(write(tmp_path, run("a", summary={"val/loss": "NaN"}, history=history)), loss_from="min")
    assert list(result.frame["status"]) == ["diverged"]


def test_all_faults_at_once_with_the_nearest_names(tmp_path: Path) -> None:
    runs = [run("a", config={"model": {"hidden": 64}, "learn_rate": 1.0}, summary={"train/loss": 2.0, "ppl": 9.0})]
    text = refused(write(tmp_path, *runs), where={"sead": "0"}, columns={"dept": "x"})
    for words in (
        "--where sead=0",
        "'dept' is not a column",
        "column 'width'",
        "column 'lr' (or 'log2_lr')",
        "--loss-metric NAME",
        "train/loss",
    ):
        assert words in text
    assert "nearest: config.learn_rate" in text
    assert "nearest: summary.val/loss" in refused(write(tmp_path, run("a")), loss_metric="valloss")


def test_a_choice_is_asked_for_and_not_taken(tmp_path: Path) -> None:
    place = write(
        tmp_path,
        run("a", config__base_lr=0.1, config__max_lr=0.2, summary__eval_loss=3.0, config={"width": 8, "base_lr": 1, "max_lr": 2}),
    )
    text = refused(place)
    assert "may be any of config.base_lr, config.max_lr, which differ" in text
    assert "may be any of summary.val/loss, summary.eval_loss" in text
    result = imported(place, columns={"lr": "max_lr"}, loss_metric="eval_loss")
    assert (result.frame["lr"][0], result.frame["loss"][0]) == (2, 3)


def test_mup_switches_are_parametrizations(tmp_path: Path) -> None:
    result = imported(write(tmp_path, run("a", config__use_mup=True), run("b", config__use_mup=False)))
    assert list(result.frame["parametrization"]) == ["mup", "sp"]
    only = imported(write(tmp_path, run("a", config__use_mup=True), run("b", config__use_mup=False)), where={"use_mup": "true"})
    assert list(only.frame["run_id"]) == ["a"]
    assert "1 left out by --where: use_mup is not true" in str(only)


def test_different_experiments_are_no_replicates(tmp_path: Path) -> None:
    runs = [
        run(f"{decay}{lr}", config__weight_decay=decay, config__lr=lr, config__out=f"/tmp/{decay}/{lr}")
        for decay in (0.0, 0.1)
        for lr in (0.1, 0.2)
    ]
    place = write(tmp_path, *runs)
    text = refused(place)
    assert "4 runs share their cell, learning rate and seed, and differ in config.weight_decay (0.0, 0.1)" in text
    assert "config.out" not in text, "a folder's name, one for each run, tells nothing"
    assert len(imported(place, where={"weight_decay": "0.1"}).frame) == 2
    assert len(imported(place, ignore=("weight_decay",)).frame) == 4
    assert list(imported(place, columns={"seed": "weight_decay"}).frame["seed"]) == ["0", "0", "0.1", "0.1"]


def test_the_exports_of_the_web_pages(tmp_path: Path) -> None:
    path = tmp_path / "wandb.csv"
    path.write_text(
        '"Name","State","Created","Runtime","model.d_model","lr","val/loss"\n"a","finished","2026","1","64","0.1","2.5"\n'
        '"b","finished","2026","1","64","0.2","NaN"\n"c","crashed","2026","1","64","0.3",""\n"d","finished","2026","1","64","0.4",""\n'
    )
    result = imported(str(path))
    assert result.source.kind.endswith("of Weights & Biases")
    assert dict(zip(result.frame["run_id"], result.frame["status"], strict=True)) == {"a": "complete", "b": "diverged"}
    assert (result.count("crashed"), result.count("unusable")) == (1, 1)
    path = tmp_path / "mlflow.csv"
    path.write_text(
        "run_id,status,params.width,params.lr,metrics.val_loss,tags.mlflow.runName\nx,FINISHED,64,0.1,2.5,n\ny,FAILED,64,0.1,2.5,n\n"
    )
    result = imported(str(path))
    assert list(result.frame["run_id"]) == ["x"]
    assert "1 crashed, last loss finite: FAILED: n (y)" in str(result)


def test_objects_in_cells_as_python_prints_them(tmp_path: Path) -> None:
    path = tmp_path / "project.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "summary", "config", "name"])
        writer.writerow([0, "{'val/loss': nan, 'x': None}", "{'width': 64, 'lr': 0.1, 'act': 'nan'}", "a"])
        writer.writerow([1, "{'val/loss': 2.0}", "{'width': 64, 'lr': 0.2}", "b"])
        writer.writerow([2, "{'val/loss': open('x')}", "{'width': 64, 'lr': 0.2}", "c"])
    result = imported(str(path))
    assert list(result.frame["status"]) == ["diverged", "complete"]
    assert "its summary is no object" in str(result)
    assert "cut off cannot be told" in str(result)


def test_parquet_tells_a_missing_loss_from_a_nan(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "runs.parquet"
    columns = {"width": [8, 8, 8], "lr": [0.1, 0.2, 0.3], "loss": [1.0, math.nan, None]}
    parquet.write_table(pa.table(columns), path)
    result = imported(str(path))
    assert [item.fate for item in result.placed] == ["complete", "diverged", "unusable"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "", "is no table"),
        ("a.csv", "width,lr,lr,loss\n1,2,3,4\n", "column 'lr'.*is there 2 times"),
        ("a.csv", "width,lr,loss\n1,2\n", "a.csv:2.*has 2 cells, and the head has 3"),
        ("a.csv", "width,lr,loss\n", "holds no run that can be read"),
        ("a.json", "[1, 2]", "holds no list of runs"),
        ("a.json", "{torn", "is not JSON"),
        ("a.jsonl", '{"width": 1}\n{"torn\n{"width": 1}\n', "a.jsonl:2.*is not JSON"),
        ("a.parquet", "no parquet", "cannot be read as Parquet"),
    ],
)
def test_a_broken_file_is_a_message(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        imported(str(tmp_path / name))


def test_places_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read_source(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="holds no runs that are known here"):
        read_source(str(tmp_path))
    (tmp_path / "study.yaml").write_text("")
    with pytest.raises(DataError, match="--into STUDY"):
        read_source(str(tmp_path))


VALUES = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
RUNS = st.fixed_dictionaries(
    {"id": VALUES, "state": VALUES},
    optional={
        "config": st.dictionaries(st.sampled_from(["width", "lr", "seed", "d_model", "x"]), VALUES) | VALUES,
        "summary": st.dictionaries(st.sampled_from(["val/loss", "loss", "y"]), VALUES) | VALUES,
        "history": st.lists(st.dictionaries(st.sampled_from(["_step", "val/loss"]), VALUES), max_size=3) | VALUES,
    },
)


@settings(max_examples=60, deadline=None)
@given(runs=st.lists(RUNS, max_size=4), how=st.sampled_from(["last", "min", "mean:2"]))
def test_whatever_a_file_holds_the_answer_is_a_table_or_a_message(
    tmp_path_factory: pytest.TempPathFactory, runs: list[Any], how: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "runs.json"
    path.write_text(json.dumps(runs))
    try:
        result = imported(str(path), loss_from=how)
    except UserError:
        return
    assert len(result.placed) + len(result.source.unreadable) == len(runs)
    assert isinstance(result.frame, pd.DataFrame)
    assert result.frame["loss"].map(lambda value: value is None or math.isnan(value) or math.isfinite(value)).all()


def test_the_readers_need_no_tracker_until_they_read() -> None:
    modules = (
        "analysis.importers, analysis.import_sources, analysis.import_wandb, analysis.import_mlflow, analysis.import_tensorboard"
    )
    code = f"import sys, {modules}; print([name for name in ('torch', 'pandas', 'wandb', 'mlflow', 'tensorboard') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
