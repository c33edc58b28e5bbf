"""The cache of tokenized corpora on disk: folders that are complete or absent.

An entry is built aside, synced, and renamed into place, so that neither a kill nor a power cut nor two processes that build
at once leave half an entry. An entry that was damaged later is told by its sizes and built again.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scaling.config_base import Frozen
from scaling.errors import DataError, Fault

_META = "meta.json"
_BUILDING = ".building-"
_ABANDONED_S = 7 * 86_400
_CHUNK = 1 << 22
CURE = "set MUTRANSFER_CACHE to a folder with free space that you may write to"


class StoredArray(Frozen):
    """Type and number of the tokens in a file of raw little-endian tokens."""

    dtype: str
    tokens: int


class Meta(Frozen):
    """What an entry says about its corpus."""

    vocab_size: int
    sha256: str
    description: str
    arrays: dict[str, StoredArray]
    """By file name; none when the tokens stay where the user has them."""


class Entry(NamedTuple):
    """A complete entry, its tokens memory-mapped and read-only."""

    meta: Meta
    arrays: Mapping[str, np.ndarray]


def default_cache() -> Path:
    """$MUTRANSFER_CACHE, else mutransfer/ in $XDG_CACHE_HOME or ~/.cache. Raises DataError for a user without a home."""
    if os.environ.get("MUTRANSFER_CACHE"):
        return Path(os.environ["MUTRANSFER_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"], "mutransfer")
    try:
        return Path.home() / ".cache" / "mutransfer"
    except RuntimeError:
        raise DataError(Fault("", "the token cache has no place: the home folder is unknown", CURE)) from None


def write_tokens(path: Path, pieces: Iterable[np.ndarray], dtype: np.dtype[Any]) -> StoredArray:
    """Write `pieces` end to end, durably. Raises OSError when the disk is full."""
    tokens = 0
    stored = dtype.newbyteorder("<")
    with path.open("wb") as file:
        for piece in pieces:
            file.write(np.ascontiguousarray(piece, dtype=stored).data)
            tokens += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return StoredArray(dtype=stored.str, tokens=tokens)


def map_tokens(folder: Path, stored: Mapping[str, StoredArray]) -> dict[str, np.ndarray]:
    """The tokens of each file in `folder`, memory-mapped and read-only."""
    return {name: np.memmap(folder / name, dtype=array.dtype, mode="r") for name, array in stored.items()}


def chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Consecutive views of a few million tokens."""
    for first in range(0, len(array), _CHUNK):
        yield array[first : first + _CHUNK]


def load(entry: Path) -> Entry | None:
    """The entry, or None when it is absent, incomplete or damaged."""
    try:
        meta = Meta.model_validate_json((entry / _META).read_bytes())
        arrays = map_tokens(entry, meta.arrays)
        whole = all(len(arrays[name]) == array.tokens for name, array in meta.arrays.items())
    except (OSError, ValueError, TypeError):
        return None
    return Entry(meta, arrays) if whole else None


def find_or_build(cache: Path, key: str, build: Callable[[Path], Meta]) -> Entry:
    """The entry `key`, made by `build(folder)` when it is not there.

    Raises DataError with a cure when the cache cannot be written, and whatever `build` raises but OSError.
    """
    entry = load(cache / key)
    if entry is not None:
        return entry
    building = cache / f"{_BUILDING}{uuid.uuid4().hex}"
    try:
        building.mkdir(parents=True)
        _remove_abandoned(cache)
        meta = build(building)
        _write_durably(building / _META, meta.model_dump_json().encode())
        built = Entry(meta, map_tokens(building, meta.arrays))
        _publish(building, cache / key)
    except OSError as error:
        raise DataError(Fault(str(cache), f"the token cache cannot be written: {error.strerror or error}", CURE)) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    # Another process may be replacing the entry at this moment; what was built here stays mapped whatever happens to its files.
    return load(cache / key) or built


def _publish(building: Path, entry: Path) -> None:
    """Rename the finished entry into place; a whole one that another process put there meanwhile is as good."""
    while True:
        try:
            building.rename(entry)
            return
        except OSError:
            if not entry.exists():
                raise
        if load(entry) is not None:
            return
        _move_away(entry)


def _move_away(damaged: Path) -> None:
    aside = damaged.with_name(f"{_BUILDING}{uuid.uuid4().hex}")
    try:
        damaged.rename(aside)
    except FileNotFoundError:
        return
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()


def _remove_abandoned(cache: Path) -> None:
    """Remove what killed processes were building, once nobody can still be at work on it."""
    for folder in cache.glob(f"{_BUILDING}*"):
        try:
            abandoned = time.time() - folder.stat().st_mtime > _ABANDONED_S
        except FileNotFoundError:
            continue
        if abandoned:
            shutil.rmtree(folder, ignore_errors=True)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
