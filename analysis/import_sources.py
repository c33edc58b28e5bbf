"""What lies at a place, and its reader: files of runs, W&B directories, MLflow stores, TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from analysis.import_runs import Source
from scaling.errors import DataError, Fault, program

Format = Literal["table", "wandb", "mlflow", "tensorboard"]
FORMATS: tuple[Format, ...] = get_args(Format)


def detect(place: str) -> Format:
    """The format of what lies at `place`. Raises DataError when nothing does, or none of ours."""
    if "://" in place:
        return "mlflow"
    path = Path(place)
    if path.is_file():
        return "tensorboard" if "tfevents" in path.name else "table"
    cure = "give a CSV, Parquet or JSON file, a wandb or mlruns folder, a folder of TensorBoard runs, or MLflow's database URL"
    if not path.is_dir():
        raise DataError(Fault(place, "no such file or folder", cure))
    from analysis.import_mlflow import is_file_store
    from analysis.import_tensorboard import event_folders
    from analysis.import_wandb import run_directories

    if (path / "study.yaml").is_file():
        cure = f"`{program()} transfer {place}` reads it as it is; to take its runs into another study: --into STUDY"
        raise DataError(Fault(place, "is a study's directory", cure))
    if is_file_store(path):
        return "mlflow"
    if run_directories(path):
        return "wandb"
    if event_folders(path):
        return "tensorboard"
    if is_file_store(path / "mlruns"):
        raise DataError(Fault(place, "holds an MLflow store in mlruns", f"give that: {path / 'mlruns'}"))
    raise DataError(Fault(place, "holds no runs that are known here", cure))


def read_source(
    place: str, form: Format | None = None, name_pattern: str | None = None, config_file: str | None = None
) -> Source:
    """Every run at `place`. form: default what is detected; name_pattern and config_file: TensorBoard alone.

    Raises DataError with what is wrong and what to give instead, MissingExtra when a tracker's package is needed.
    """
    chosen = form or detect(place)
    wrong = [
        Fault(option, f"is for TensorBoard's folders, and {place} is read as {chosen}", "leave it out")
        for option, value in (("--name-pattern", name_pattern), ("--config-file", config_file))
        if value is not None and chosen != "tensorboard"
    ]
    if wrong:
        raise DataError(*wrong)
    path = Path(place)
    if "://" not in place and not path.exists():
        raise DataError(Fault(place, "no such file or folder"))
    if chosen != "mlflow" and "://" in place:
        raise DataError(Fault(place, f"is a URL, and --format {chosen} reads files", "give a file or folder"))
    if chosen == "table" and path.is_dir():
        raise DataError(Fault(place, "is a folder, and --format table reads a file", "give a CSV, Parquet or JSON file"))
    if chosen == "table":
        from analysis.import_files import read_file

        return read_file(path)
    if chosen == "wandb":
        from analysis.import_wandb import read_wandb

        return read_wandb(path)
    if chosen == "mlflow":
        from analysis.import_mlflow import read_mlflow

        return read_mlflow(place)
    from analysis.import_tensorboard import name_pattern as compiled
    from analysis.import_tensorboard import read_tensorboard

    return read_tensorboard(
        path.parent if path.is_file() else path, compiled(name_pattern) if name_pattern else None, config_file
    )
