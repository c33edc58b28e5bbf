"""Runs from Weights & Biases' own directories (`wandb/run-*`, `wandb/offline-run-*`), synced or never synced.

A run's log (`run-ID.wandb`) holds its config, its whole history and its exit code; older or synced directories have config.yaml and
wandb-summary.json beside it. The log is read here, record by record, since the `wandb` package no longer brings a reader; what a record
means is `wandb.proto`'s. Its framing is LevelDB's log format (blocks of 32 KiB, records in fragments) with a CRC-32 and a head of its own.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from analysis.import_files import unwrapped
from analysis.import_runs import Curve, ForeignRun, Source, flatten, number
from scaling.errors import DataError, Fault, MissingExtra

HEAD = b":W&B"
HEAD_BYTES = 7
BLOCK_BYTES = 32768
FRAGMENT = struct.Struct("<IHB")
"""CRC-32 of type and data, length of the data, type."""
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class _Log:
    """What a run's directories say, read in the order of their dates."""

    run_id: str = ""
    name: str = ""
    project: str = ""
    exit_code: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    has_log: bool = False


def run_directories(place: Path) -> list[Path]:
    """The run directories at `place`: itself, those in it, or those in its folder `wandb`; the latest-run link is not another run."""
    if _is_run(place):
        return [place]
    for folder in (place, place / "wandb"):
        found = sorted(path for path in folder.glob("*run-*") if path.is_dir() and not path.is_symlink() and _is_run(path))
        if found:
            return sorted(found, key=lambda path: path.name.partition("run-")[2])
    return []


def _is_run(path: Path) -> bool:
    return any(path.glob("run-*.wandb")) or (path / "files" / "wandb-summary.json").is_file()


def read_wandb(place: Path) -> Source:
    """Every run under `place`; directories of one run that was resumed are one run. Raises MissingExtra when logs need the package."""
    directories = run_directories(place)
    if not directories:
        raise DataError(Fault(str(place), "holds no run of Weights & Biases", "give a folder that holds run-* or offline-run-*"))
    logs: dict[str, _Log] = {}
    unreadable, notes = [], []
    resumed = 0
    for directory in directories:
        run_id = directory.name.rpartition("-")[2]
        log = logs.get(run_id, _Log(run_id))
        try:
            note = _read(directory, log)
        except (ValueError, OSError, yaml.YAMLError) as error:
            unreadable.append((directory.name, str(error).splitlines()[0]))
            continue
        resumed += run_id in logs
        logs[run_id] = log
        notes += [f"{directory.name}: {note}"] if note else []
    if resumed:
        notes.append(f"{resumed} directories are the continuation of a run that is there already")
    return Source(
        str(place), "Weights & Biases run directories", tuple(map(_run, logs.values())), tuple(unreadable), tuple(notes)
    )


def _read(directory: Path, log: _Log) -> str:
    """Add what a directory says to `log`; return what is torn. Raises ValueError for one that says nothing."""
    config, summary = directory / "files" / "config.yaml", directory / "files" / "wandb-summary.json"
    found = False
    if config.is_file():
        document = yaml.safe_load(config.read_text(encoding="utf-8"))
        if not isinstance(document, Mapping):
            raise ValueError("files/config.yaml is not a config")
        log.config |= unwrapped({key: value for key, value in document.items() if key != "wandb_version"})
        found = True
    if summary.is_file():
        document = json.loads(summary.read_text(encoding="utf-8"))
        if not isinstance(document, Mapping):
            raise ValueError("files/wandb-summary.json is not a summary")
        log.summary |= document
        found = True
    file = next(iter(sorted(directory.glob("run-*.wandb"))), None)
    if file is None:
        return ""
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        if not found:
            raise MissingExtra("wandb", "tracking", "reading an offline run of Weights & Biases") from None
        return "its log is not read (the package wandb is not installed), so that its state is not known"
    messages: Any = wandb_internal_pb2
    log.exit_code = None
    whole, count = True, 0
    for content in _records(file.read_bytes()):
        if content is None:
            whole = False
            break
        record = messages.Record()
        try:
            record.ParseFromString(content)
        except DecodeError:
            raise ValueError(f"{file.name} holds a record that this wandb does not know: install a newer one") from None
        _take(record, log)
        count += 1
    if not log.config and not log.summary:
        raise ValueError(f"{file.name} holds no record of a run (it was killed before anything was written)")
    log.has_log = True
    return "" if whole else f"its log is torn after {count} records; what stands before is used"


def _records(content: bytes) -> Iterator[bytes | None]:
    """The records of a log; None, at the end, for one that is torn. Raises ValueError when it is no log."""
    if content[: len(HEAD)] != HEAD:
        raise ValueError("is not a log of Weights & Biases")
    at, parts = HEAD_BYTES, b""
    while at < len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < FRAGMENT.size:
            at += left
            continue
        if at + FRAGMENT.size > len(content):
            yield None
            return
        checksum, length, kind = FRAGMENT.unpack_from(content, at)
        data = content[at + FRAGMENT.size : at + FRAGMENT.size + length]
        if len(data) < length or zlib.crc32(bytes([kind]) + data) != checksum:
            yield None
            return
        at += FRAGMENT.size + length
        parts = data if kind in (WHOLE, FIRST) else parts + data
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
    if parts:
        yield None


def _take(record: Any, log: _Log) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        log.run_id, log.name, log.project = (
            record.run.run_id or log.run_id,
            record.run.display_name or log.name,
            record.run.project,
        )
        _update(log.config, record.run.config.update)
        _update(log.summary, record.run.summary.update)
    elif kind == "config":
        _update(log.config, record.config.update)
    elif kind == "summary":
        _update(log.summary, record.summary.update)
    elif kind == "history":
        row: dict[str, Any] = {}
        _update(row, record.history.item)
        log.history.append({"_step": record.history.step.num} | row)
    elif kind == "exit":
        log.exit_code = record.exit.exit_code


def _update(values: dict[str, Any], items: Any) -> None:
    """Enter protobuf items: a key, or a path of keys, with a value in JSON."""
    for item in items:
        path = list(item.nested_key) or [item.key]
        if path[0] == "_wandb":
            continue
        target = values
        for key in path[:-1]:
            inner = target.get(key)
            target[key] = target = inner if isinstance(inner, dict) else {}
        target[path[-1]] = json.loads(item.value_json)


def _run(log: _Log) -> ForeignRun:
    state = None
    if log.has_log:
        state = "running" if log.exit_code is None else "finished" if log.exit_code == 0 else "failed"

    def curve(name: str) -> Curve:
        key = name.partition(".")[2]
        found: list[tuple[float, float]] = []
        for row in log.history:
            value = flatten(row, "").get(key)
            if value is not None:
                found.append((number(row.get("_step", len(found))), number(value)))
        return found

    info = {"project": log.project} if log.project else {}
    config = flatten({key: value for key, value in log.config.items() if key != "_wandb"}, "config.")
    summary = flatten({key: value for key, value in log.summary.items() if key != "_wandb"}, "summary.")
    return ForeignRun(log.run_id, config, summary, state, log.name, info, curve if log.history else None)
