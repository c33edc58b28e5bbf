"""Runs from one file: CSV or Parquet of any naming, the exports of Weights & Biases and MLflow, JSON or JSON lines of runs.

A file of runs has one run a row. Cells that hold whole objects (W&B's documented export script writes `config` and `summary` so) are taken
apart. An empty cell is missing, the word NaN is a value: a loss that is NaN is a divergence.
"""

from __future__ import annotations

import ast
import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from analysis.import_runs import Curve, ForeignRun, Source, flatten, number
from scaling.errors import DataError, Fault, MissingExtra

RUN_IDS = ("run_id", "run id", "id", "runid")
NAMES = ("name", "run_name", "run name", "tags.mlflow.runname", "display_name")
STATES = ("state", "status")
BOOKKEEPING = (
    *RUN_IDS, *NAMES, *STATES,
    "notes", "user", "tags", "created", "runtime", "duration", "hostname", "sweep", "description", "commit", "github",
    "updated", "source", "version", "models", "group", "path", "url", "entity", "project", "username", "experiment_id",
    "artifact_uri", "start_time", "end_time", "created_at", "heartbeat_at", "end time", "start time", "gpu count",
    "gpu type", "source name", "source type", "job type",
)  # fmt: skip
"""Columns of the trackers about a run, not of it; in small letters."""
OBJECTS = ("config", "summary", "history")
CSV_LIMIT = 2**27


def read_file(path: Path) -> Source:
    """Every run of a file, by its suffix. Raises DataError for a file that is none of them, MissingExtra when Parquet needs pyarrow."""
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return _source(path, _parquet_rows(path), "Parquet table", ())
    if suffix in (".json", ".jsonl", ".ndjson"):
        return _source(path, *_json_rows(path))
    rows, notes = _csv_rows(path)
    return _source(path, rows, "CSV table", notes)


def _csv_rows(path: Path) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    csv.field_size_limit(CSV_LIMIT)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            sample = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=sample.count)
            reader = csv.reader(file, delimiter=delimiter)
            head = [name.strip() for name in next(reader, [])]
            body = [row for row in reader if any(cell.strip() for cell in row)]
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise DataError(Fault(str(path), f"cannot be read as a table: {error}", "give a CSV file in UTF-8")) from None
    twice = [name for name, count in Counter(head).items() if count > 1 and name]
    faults = [
        Fault(f"{path}:1: column {name!r}", f"is there {head.count(name)} times", "rename or remove one of them in the file")
        for name in twice
        if len({tuple(row[at : at + 1]) for row in body for at in (0,)}) and not _copies(name, head, body)
    ]
    faults += [
        Fault(
            f"{path}:{at}", f"has {len(row)} cells, and the head has {len(head)}", "correct the row; quote cells that hold commas"
        )
        for at, row in enumerate(body, start=2)
        if len(row) != len(head)
    ]
    if faults or len(head) < 2:
        raise DataError(*(faults or [Fault(str(path), "is no table: its first line is no list of columns", "give a CSV file")]))
    return [dict(zip(head, row, strict=True)) for row in body], tuple(
        f"column {name!r} is there twice, with the same values" for name in twice
    )


def _copies(name: str, head: list[str], body: list[list[str]]) -> bool:
    """Whether columns of one name hold the same in every row."""
    places = [at for at, other in enumerate(head) if other == name]
    return all(len({row[at] for at in places if at < len(row)}) < 2 for row in body)


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "reading Parquet") from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(
            Fault(str(path), f"cannot be read as Parquet: {str(error).splitlines()[0]}", "give a whole file")
        ) from None
    return rows


def _json_rows(path: Path) -> tuple[list[dict[str, Any]], str, tuple[str, ...]]:
    """One list of objects, an object that holds one ("runs"), or one object a line; a last line that is torn is told."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(Fault(str(path), f"cannot be read: {error}", "give a JSON file in UTF-8")) from None
    notes: tuple[str, ...] = ()
    kind = "JSON list of runs"
    try:
        document = json.loads(text)
        if isinstance(document, Mapping):
            document = document.get("runs", [document])
    except json.JSONDecodeError as whole:
        lines = [(at, line) for at, line in enumerate(text.splitlines(), start=1) if line.strip()]
        document, kind = [], "JSON lines, a run each"
        for place, (at, line) in enumerate(lines):
            try:
                document.append(json.loads(line))
            except json.JSONDecodeError as error:
                if place == len(lines) - 1 and document:
                    notes = (f"line {at}, the last one, is torn and left out",)
                    continue
                words = whole if not document else error
                raise DataError(
                    Fault(f"{path}:{at}", f"is not JSON: {words}", "give a list of runs, or one run a line")
                ) from None
    if not isinstance(document, list) or not all(isinstance(row, dict) for row in document):
        cure = 'write [{"name": ..., "state": ..., "config": {...}, "summary": {...}}, ...]'
        raise DataError(Fault(str(path), "holds no list of runs", cure))
    return document, kind, notes


def _source(path: Path, rows: list[dict[str, Any]], kind: str, notes: tuple[str, ...]) -> Source:
    runs, unreadable = [], []
    for at, row in enumerate(rows, start=1):
        try:
            runs.append(_run(row, at))
        except ValueError as error:
            unreadable.append((f"row {at}", str(error)))
    names = {str(name) for row in rows[:50] for name in row}
    if {"config", "summary"} <= names or {"State", "Runtime", "Created"} <= names:
        kind += " of Weights & Biases"
    elif any(name.startswith("params.") for name in names):
        kind += " of MLflow"
    return Source(str(path), kind, tuple(runs), tuple(unreadable), notes)


def _run(row: Mapping[str, Any], at: int) -> ForeignRun:
    """A row as a run. Objects in it are parts of it; params., metrics. and tags. are MLflow's; other cells are config and metric in one."""
    config: dict[str, object] = {}
    metrics: dict[str, object] = {}
    info: dict[str, object] = {}
    history: Any = None
    for name, value in row.items():
        if not name:  # The index that pandas writes.
            continue
        lower = str(name).lower()
        if lower in OBJECTS and (parsed := _object(name, value)) is not None:
            if lower == "history":
                history = parsed
            elif not isinstance(parsed, Mapping):
                raise ValueError(f"its {name} is a list, and names with values are wanted")
            elif lower == "config":
                config |= flatten(unwrapped(parsed), "config.")
            else:
                metrics |= flatten(parsed, "summary.")
        elif lower in BOOKKEEPING or lower.startswith("tags."):
            info[name] = value
        elif lower.startswith("metrics."):
            metrics[name] = value
        elif lower.startswith("params."):
            config[name] = value
        else:
            flat = flatten({name: value}, "")
            config |= flat
            metrics |= flat
    words = {key.lower(): value for key, value in row.items() if isinstance(key, str)}

    def first(names: tuple[str, ...]) -> str:
        return next((str(words[name]) for name in names if words.get(name) not in (None, "")), "")

    curve = _curve_of(history) if history is not None else None
    return ForeignRun(
        first(RUN_IDS) or first(NAMES) or f"row {at}", config, metrics, first(STATES) or None, first(NAMES), info, curve
    )


def unwrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """W&B's own files keep each key as {"value": ..., "desc": ...}; `_wandb` is its bookkeeping."""
    return {
        key: value["value"] if isinstance(value, Mapping) and "value" in value and set(value) <= {"value", "desc"} else value
        for key, value in config.items()
        if key != "_wandb"
    }


def _object(name: str, cell: object) -> Any:
    """A cell that holds an object, in JSON or as Python prints it (nan and inf included); None for one that holds nothing.

    Raises ValueError for text that begins as an object and is none.
    """
    if isinstance(cell, dict | list):
        return cell
    text = str(cell or "").strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(_Numbers().visit(ast.parse(text, mode="eval")))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"its {name} is no object, neither in JSON nor in Python") from None


class _Numbers(ast.NodeTransformer):
    """nan and inf, which Python prints and does not read, as numbers."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("nan", "inf") else node


def _curve_of(history: Any) -> Any:
    """The curve of "summary.NAME" from a history: a list of {"_step": ..., NAME: ...}, or {NAME: [...]}."""

    def points(name: str) -> Iterator[tuple[float, float]]:
        key = name.partition(".")[2]
        if isinstance(history, Mapping):
            values = history.get(key) or []
            steps = history.get("_step") or list(range(len(values)))
            if not isinstance(values, list) or not isinstance(steps, list) or len(values) != len(steps):
                raise ValueError(f"its history has no step for each value of {key}")
            yield from zip(map(number, steps), map(_value, values), strict=True)
            return
        for at, row in enumerate(history):
            if isinstance(row, Mapping) and key in row:
                yield number(row.get("_step", at)), _value(row[key])

    def curve(name: str) -> Curve:
        return sorted((point for point in points(name) if point[1] is not None), key=lambda point: point[0])

    return curve


def _value(value: object) -> Any:
    """A point of a history; None where pandas or W&B left a gap: a NaN there says nothing, since rows hold what other metrics logged."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return number(value)
