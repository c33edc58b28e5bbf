"""Tables of runs: what is read, mapped, defaulted, counted and refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.table import load_table
from scaling.errors import DataError, StudyError
from scaling.records import RunRecord, run_directory, write_record


def frame(**extra: object) -> pd.DataFrame:
    data = {"width": [64, 64, 128, 128], "lr": [2.0**-8, 2.0**-7, 2.0**-8, 2.0**-7], "loss": [1.8, 1.7, 1.6, 1.65]}
    return pd.DataFrame({**data, **extra})


def test_defaults_are_stated() -> None:
    table = load_table(frame())
    notes = "\n".join(table.notes)
    assert set(table.frame["parametrization"]) == {"unknown"}
    assert set(table.frame["seed"]) == {"0"}
    assert all(word in notes for word in ("4 runs read", "unknown", "seed 0", "depth, batch_tokens, tokens"))
    assert [cell.width for cell, _ in table.cells()] == [64, 128]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_and_mapped_columns_give_the_same_table(tmp_path: Path, suffix: str) -> None:
    source = frame(parametrization="mup", seed=3).rename(columns={"lr": "base_lr", "loss": "val"})
    path = tmp_path / f"runs.{suffix}"
    source.to_csv(path, index=False) if suffix == "csv" else source.to_parquet(path)
    columns = {"lr": "base_lr", "loss": "val"}
    pd.testing.assert_frame_equal(load_table(path, columns).frame, load_table(source, columns).frame)
    assert list(load_table(path, columns).frame["log2_lr"]) == [-8, -7, -8, -7]


def test_a_mapped_column_replaces_one_of_that_name() -> None:
    table = load_table(frame(val_loss=[1.0, 2.0, 3.0, 4.0]), {"loss": "val_loss"})
    assert list(table.frame["loss"]) == [1, 2, 3, 4]


def test_divergences_unfinished_runs_and_repeats_are_counted() -> None:
    status = ["complete", "diverged", "complete", "running", "complete", "complete"]
    rows = pd.concat([frame(), frame()[:2]], ignore_index=True).assign(status=status, seed=[0, 0, 0, 0, 0, 1])
    rows.loc[2, "loss"] = np.nan
    table = load_table(rows)
    notes = "\n".join(table.notes)
    assert "1 diverged runs kept as divergences" in notes
    assert "1 rows with a loss that is NaN" in notes
    assert "1 rows that are not finished runs (status running) dropped" in notes
    assert "1 rows that repeat another one" in notes
    assert len(table) == 4
    assert list(table.frame["diverged"]) == [False, True, True, False]
    assert table.frame["loss"][table.frame["diverged"]].isna().all()


def test_a_loss_written_as_a_word_is_a_divergence() -> None:
    table = load_table(frame().assign(loss=["1.8", "nan", "inf", "diverged"]))
    assert list(table.frame["diverged"]) == [False, True, True, True]


def test_all_faults_at_once_with_the_nearest_names() -> None:
    with pytest.raises(DataError) as error:
        load_table(frame().rename(columns={"lr": "learning_rate", "loss": "val_loss"}), {"sede": "seed"})
    text = str(error.value)
    assert len(error.value.faults) == 2
    assert "'sede'" in text
    assert "nearest: seed" in text
    with pytest.raises(DataError) as error:
        load_table(frame().rename(columns={"lr": "learning_rate", "loss": "val_loss", "width": "d_width"}))
    text = str(error.value)
    assert len(error.value.faults) == 3
    assert "nearest: val_loss" in text
    assert "--column loss=NAME" in text
    with pytest.raises(DataError) as error:
        load_table(frame().assign(lr=["a", 1.0, -1.0, 2.0], width=[64, "wide", 128, 128]))
    text = str(error.value)
    assert len(error.value.faults) == 3
    assert "'wide' in row 2" in text
    assert "not positive" in text


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_table(tmp_path / "absent.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match="cannot be read"):
        load_table(tmp_path / "empty.csv")
    (tmp_path / "runs").mkdir()
    with pytest.raises(StudyError, match="no finished run"):
        load_table(tmp_path)


def test_numbers_are_floats_so_that_compute_does_not_overflow() -> None:
    table = load_table(frame(params=10**9, tokens=10**11))
    compute = 6 * table.frame["params"] * table.frame["tokens"]
    assert float(compute.iloc[0]) == pytest.approx(6e20)


def test_a_study_directory(tmp_path: Path) -> None:
    for index, loss in enumerate([1.5, None]):
        record = RunRecord(
            run_id=f"run{index}", status="complete" if loss else "diverged", parametrization="sp", width=64, depth=2, head_dim=16,
            batch_tokens=2048, tokens=819200, steps=400, steps_done=400, lr=2.0 ** -(8 - index), log2_lr=-8.0 + index, seed=0,
            data_seed=0, precision="fp32", loss=loss, initial_loss=5.5, last_finite_loss=1.5, params={"total": 1000},
            flops=1e15, wall_s=1.0, process_s=1.0, data_sha256="x", versions={}, host="h", started_at="2026-01-01T00:00:00Z",
        )  # fmt: skip
        write_record(run_directory(tmp_path, record.run_id), record)
    table = load_table(tmp_path)
    assert list(table.frame["run_id"]) == ["run0", "run1"]
    assert list(table.frame["params"]) == [1000, 1000]
    assert list(table.frame["diverged"]) == [False, True]
    assert [(cell.parametrization, cell.width, cell.depth, cell.tokens) for cell, _ in table.cells()] == [("sp", 64, 2, 819200)]


def test_importing_the_analysis_is_cheap() -> None:
    modules = "analysis.table, analysis.optimum, analysis.transfer, analysis.plots, analysis.simulation"
    heavy = "torch optuna pandas scipy matplotlib"
    code = f"import sys, {modules}; print([name for name in '{heavy}'.split() if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_rows_that_differ_in_a_column_that_is_not_used_are_refused() -> None:
    rows = pd.concat([frame().assign(weight_decay=0.0), frame().assign(weight_decay=0.1, loss=lambda rows: rows["loss"] + 0.3)])
    with pytest.raises(DataError, match="differ in weight_decay"):
        load_table(rows)
    replicates = load_table(rows.drop(columns="weight_decay"))
    assert len(replicates) == 2 * len(frame())
    assert "taken as replicates" in "\n".join(replicates.notes)
    shuffled = load_table(rows.drop(columns="weight_decay")[::-1])
    assert sorted(shuffled.frame["loss"]) == sorted(replicates.frame["loss"])


def test_learning_rates_in_the_wrong_unit_are_refused() -> None:
    with pytest.raises(DataError, match="contradicts column 'lr'"):
        load_table(frame().assign(log2_lr=lambda rows: np.log2(rows["lr"]) + 3))
    with pytest.raises(DataError, match="log2 of the LR"):
        load_table(frame().drop(columns="lr").assign(log2_lr=5000.0))


def test_spellings_of_a_parametrization_are_one() -> None:
    rows = frame().assign(parametrization=["muP", "MUP", "mup", "\u03bcP"])
    assert load_table(rows).parametrizations == ["mup"]
