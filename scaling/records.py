"""What a run leaves behind: `record.json`, `config.yaml`, `metrics.jsonl` in `runs/<run_id>/`. Torch-free.

Owns the record's schema and every write of these files. Writes are atomic: a file is complete or absent, whatever is killed when.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from scaling.config import RunConfig
from scaling.config_base import Frozen
from scaling.errors import Fault, StudyError, raise_all
from scaling.parallel import Layout

SCHEMA_VERSION = 1


class Pruned(Frozen):
    """Why a run was ended before its last step, and what is known of the loss that it would have ended with."""

    rule: str
    """`pruning.kind` of the study."""
    step: int
    """Updates done when it was ended."""
    smoothed_loss: float
    """Mean training loss over the last logged steps, nats per token."""
    reference: str | None = None
    """run_id of the finished run that it was compared with, over the same steps on the same batches; null for Optuna's rules."""
    reference_loss: float | None = None
    """Mean training loss of the reference over the same steps."""
    bound: float | None = None
    """The final loss is at least this; null where the rule bounds nothing, and then nothing is known of it."""


Watch = Callable[[Mapping[str, Any]], Pruned | None]
"""Is shown every row of a run's metrics, in order; what it returns ends the run. After a resume it is shown the earlier rows again."""


class RunRecord(Frozen):
    """One finished run. Losses in nats per token; `loss` is null for a run that diverged (a result) or was pruned (see `pruned`)."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    status: Literal["complete", "diverged", "pruned"]
    parametrization: str
    width: int
    depth: int
    head_dim: int
    batch_tokens: int
    tokens: int
    """Tokens planned; a run that diverged or was pruned saw fewer."""
    steps: int
    steps_done: int
    lr: float
    """Peak LR at the base shape: the number that is swept."""
    log2_lr: float
    seed: int
    data_seed: int
    precision: str
    loss: float | None
    """Validation loss at the end."""
    initial_loss: float | None
    """Loss of the first batch, before the first update."""
    last_finite_loss: float | None
    """Last finite training loss."""
    params: dict[str, int]
    """Counts under every convention of `scaling.accounting.ParameterCounts`."""
    flops: float
    wall_s: float
    process_s: float
    data_sha256: str
    versions: dict[str, str]
    host: str
    started_at: str
    """UTC, ISO 8601."""
    resumed_from_step: int = 0
    processes: int = 1
    """That the run was spread over, as it ended."""
    parallel: Layout | None = None
    """How it was laid over them (runtime.parallel)."""
    hyperparameters: dict[str, float] = Field(default_factory=dict)
    """scaling.hyperparameters by name; empty in records older than they are."""
    pruned: Pruned | None = None
    """Present for status "pruned" alone."""

    @model_validator(mode="after")
    def _pruned_says_why(self) -> Self:
        if (self.status == "pruned") != (self.pruned is not None):
            raise ValueError('status "pruned" and the key `pruned` go together')
        return self


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either what it held before or all of `text`, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def run_directory(study_dir: Path, run_id: str) -> Path:
    return study_dir / "runs" / run_id


def write_config(directory: Path, run: RunConfig) -> None:
    write_atomic(directory / "config.yaml", yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))


def write_record(directory: Path, record: RunRecord) -> None:
    write_atomic(directory / "record.json", record.model_dump_json(indent=1) + "\n")


def read_record(directory: Path) -> RunRecord | None:
    """The record in a run directory, or None while the run is not finished."""
    path = directory / "record.json"
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError):
        cure = f"delete {path.parent} and run the study again: only that run is repeated"
        raise StudyError(Fault(str(path), f"is not a run record of schema {SCHEMA_VERSION}", cure)) from None


def read_records(study_dir: Path) -> Iterator[RunRecord]:
    """Records of all finished runs, ordered by run_id. Raises StudyError naming every record that is damaged or misplaced."""
    faults: list[Fault] = []
    runs = study_dir / "runs"
    for directory in sorted(runs.iterdir(), key=attrgetter("name")) if runs.is_dir() else ():
        try:
            record = read_record(directory)
        except StudyError as error:
            faults += error.faults
            continue
        if record is not None and record.run_id != directory.name:
            what = f"is the record of run {record.run_id}"
            faults.append(Fault(str(directory / "record.json"), what, f"delete {directory}: the run is made again"))
        elif record is not None:
            yield record
    raise_all(faults, StudyError)


class MetricsLog:
    """Appends one JSON object a line to `metrics.jsonl`, whole lines only."""

    def __init__(self, directory: Path, resume_at_step: int) -> None:
        """Keep the lines before `resume_at_step` of an interrupted run, drop a torn last line and anything later."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["step"] < resume_at_step] if resume_at_step else []
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; a last line torn by a kill is not a row."""
    return metrics_rows(path.read_text(encoding="utf-8")) if path.exists() else []


def metrics_rows(text: str) -> list[dict[str, Any]]:
    """Rows of a metrics file's text; a last line torn by a kill is not a row."""
    rows = []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
