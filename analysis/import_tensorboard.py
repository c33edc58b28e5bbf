"""Runs from TensorBoard event files: every folder that holds some is a run; read through the tensorboard package.

A run's config comes from its HParams data, from a YAML or JSON file beside its events, and from its folder's name by a regular expression;
the three are the parts hparams., config. and name. of its names. Event files do not say how a run ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from analysis.import_runs import Curve, ForeignRun, Source, flatten
from scaling.errors import DataError, Fault, MissingExtra

EVENTS = "*tfevents*"
CONFIG_FILES = (
    "config.yaml",
    "config.yml",
    "config.json",
    "hparams.yaml",
    "hparams.yml",
    "hparams.json",
    "params.json",
    "args.json",
    ".hydra/config.yaml",
)
"""Looked for beside the events, the first that is there; Lightning, Hydra and many scripts write one of them."""
HPARAMS = "_hparams_/session_start_info"


def event_folders(place: Path) -> list[Path]:
    """Folders at or under `place` that hold event files."""
    return sorted({path.parent for path in place.rglob(EVENTS) if path.is_file()})


def name_pattern(text: str) -> re.Pattern[str]:
    """The regular expression of a folder's name. Raises DataError for one that is wrong or names nothing."""
    where, cure = f"--name-pattern {text}", "name what it finds: 'w(?P<width>[0-9]+)_lr(?P<lr>[^_]+)_s(?P<seed>[0-9]+)'"
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise DataError(Fault(where, f"is not a regular expression: {error}", cure)) from None
    if not pattern.groupindex:
        raise DataError(Fault(where, "has no named group", cure))
    return pattern


def read_tensorboard(place: Path, pattern: re.Pattern[str] | None = None, config_file: str | None = None) -> Source:
    """Every folder of event files under `place` as a run. Raises MissingExtra, or DataError when there is none."""
    folders = event_folders(place)
    if not folders:
        raise DataError(
            Fault(
                str(place), "holds no event file of TensorBoard (*tfevents*)", "give the folder that TensorBoard's --logdir names"
            )
        )
    try:
        from tensorboard.backend.event_processing import event_accumulator
    except ImportError:
        raise MissingExtra("tensorboard", "tracking", "reading event files") from None
    runs: list[ForeignRun] = []
    unreadable: list[tuple[str, str]] = []
    notes: list[str] = []
    unmatched: list[str] = []
    read = {folder: _accumulate(event_accumulator, folder) for folder in folders}
    children = _hparams_of_parents(read)
    for folder, events in read.items():
        if folder in children.values():
            continue
        name = str(folder.relative_to(place)) if folder != place else folder.name
        curves = _curves(events)
        child = read.get(children[folder]) if folder in children else None
        if child is not None:
            curves = _curves(child) | curves
        torn = _torn(folder)
        notes += [f"{name}: {torn}"] if torn else []
        config = _hparams(child if child is not None else events)
        try:
            config |= _config_beside(folder, place, config_file)
        except (ValueError, OSError, yaml.YAMLError) as error:
            unreadable.append((name, f"its config file: {str(error).splitlines()[0]}"))
            continue
        if not curves and not config:
            unreadable.append((name, torn or "its event files hold no scalar"))
            continue
        found = pattern.search(name) if pattern else None
        if found is not None:
            config |= {f"name.{key}": value for key, value in found.groupdict().items() if value is not None}
        elif pattern is not None:
            unmatched.append(name)
        runs.append(_run(name, config, curves))
    if unmatched:
        notes.append(f"--name-pattern matches no part of {len(unmatched)} names: {', '.join(unmatched[:3])}")
    return Source(str(place), "TensorBoard event files", tuple(runs), tuple(unreadable), tuple(notes))


def _accumulate(module: Any, folder: Path) -> Any:
    """Everything in a folder's event files, no point left out. What a restart wrote again replaces what it had written."""
    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        events = module.EventAccumulator(
            str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 1, "audio": 1, "histograms": 1}
        )
        events.Reload()
    finally:
        logger.setLevel(level)
    return events


def _curves(events: Any) -> dict[str, Curve]:
    """Tag -> (step, value) of every scalar, in either of the two ways in which TensorBoard has stored them."""
    from tensorboard.util import tensor_util

    tags = events.Tags()
    curves: dict[str, Curve] = {
        tag: [(float(item.step), float(item.value)) for item in events.Scalars(tag)] for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            curves[tag] = [
                (float(item.step), float(tensor_util.make_ndarray(item.tensor_proto).item())) for item in events.Tensors(tag)
            ]
    return curves


def _hparams_of_parents(read: Mapping[Path, Any]) -> dict[Path, Path]:
    """Folder -> the one folder in it that only holds its HParams data: torch's `add_hparams` writes them into a folder of their own."""
    found: dict[Path, list[Path]] = {}
    for folder, events in read.items():
        parent = folder.parent
        if parent in read and _hparams(events) and not _hparams(read[parent]):
            found.setdefault(parent, []).append(folder)
    return {parent: folders[0] for parent, folders in found.items() if len(folders) == 1}


def _hparams(events: Any) -> dict[str, object]:
    """The HParams data in event files, as hparams.NAME; numbers are doubles there."""
    from tensorboard.plugins.hparams import metadata

    try:
        content = events.SummaryMetadata(HPARAMS).plugin_data.content
    except KeyError:
        return {}
    start = metadata.parse_session_start_info_plugin_data(content)
    values: dict[str, object] = {}
    for key, value in start.hparams.items():
        kind = value.WhichOneof("kind")
        values[f"hparams.{key}"] = None if kind in (None, "null_value") else getattr(value, kind)
    return values


def _config_beside(folder: Path, place: Path, config_file: str | None) -> dict[str, object]:
    """The config file of a run: in its folder, or in one above it up to `place`, where it lies above one run alone.

    Raises ValueError for one that is no mapping, or, where it was named, for its absence.
    """
    names = CONFIG_FILES if config_file is None else (config_file,)
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None and config_file is not None:
        above = [parent / config_file for parent in folder.parents if parent.is_relative_to(place) and parent != place]
        path = next((item for item in above if item.is_file()), None)
        if path is None:
            raise ValueError(f"no {config_file} beside its events")
    if path is None:
        return {}
    text = path.read_text(encoding="utf-8")
    document = json.loads(text) if path.suffix == ".json" else yaml.load(text, _PlainLoader)
    if not isinstance(document, Mapping):
        raise ValueError(f"{path.name} is no mapping of names to values")
    return flatten({str(key): value for key, value in document.items()}, "config.")


class _PlainLoader(yaml.SafeLoader):
    """YAML without running anything: a tag of Python's (Lightning writes some) is its text."""


def _as_text(_loader: yaml.SafeLoader, _suffix: str, node: yaml.Node) -> object:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else None


_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", _as_text)
_PlainLoader.add_multi_constructor("!", _as_text)


def _run(name: str, config: Mapping[str, object], curves: Mapping[str, Curve]) -> ForeignRun:
    def curve(metric: str) -> Curve:
        return curves.get(metric.removeprefix("scalars."), ())

    metrics = {f"scalars.{tag}": points[-1][1] for tag, points in curves.items() if points}
    steps = [points[-1][0] for points in curves.values() if points]
    info: dict[str, object] = {"last_step": max(steps)} if steps else {}
    return ForeignRun(name, config, metrics, None, "", info, curve)


def _torn(folder: Path) -> str:
    """What of a folder's event files could not be read, in words: the reader itself stops at a torn record and says nothing."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    words = []
    for path in sorted(folder.glob(EVENTS)):
        whole = _frames(path)
        with contextlib.suppress(OSError):
            read = sum(1 for _ in RawEventFileLoader(str(path)).Load())
            if whole is None or read < whole:
                words.append(f"{path.name} is torn or damaged after {read} events; what stands before is used")
    return "; ".join(words)


def _frames(path: Path) -> int | None:
    """Records of an event file by their lengths alone; None when the last one is not whole."""
    size, count = path.stat().st_size, 0
    with path.open("rb") as file:
        while head := file.read(8):
            # Checksums of four bytes follow the length and the record.
            rest = struct.unpack("<Q", head)[0] + 8 if len(head) == 8 else size
            if rest > size - file.tell():
                return None
            file.seek(rest, 1)
            count += 1
    return count
