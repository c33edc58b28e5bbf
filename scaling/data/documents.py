"""Where documents come from: the standard library's sources, text files, JSON lines, Parquet.

A document is (stable name, text as bytes). Names are relative, so that the same corpus in another folder is the same corpus.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from scaling.config import DataConfig
from scaling.errors import DataError, Fault, MissingExtra

NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


def source_files(config: DataConfig) -> list[tuple[str, Path]]:
    """(name, path) of every file of the source, sorted by name. Raises DataError for paths that are not there."""
    if config.source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*.py") if not NOT_STDLIB & set(path.parts)]
        return sorted((path.relative_to(root).as_posix(), path) for path in files)
    if not config.paths:
        raise DataError(Fault("data.paths", f"is empty, and source {config.source} reads files", "paths: [corpus/*.txt]"))
    found: list[Path] = []
    faults = []
    for pattern in config.paths:
        matches = [Path(match) for match in glob.glob(pattern, recursive=True)]  # noqa: PTH207 (patterns may be absolute)
        files = [match for match in matches if match.is_file()]
        if not files:
            what = "is a folder" if any(match.is_dir() for match in matches) else "no file matches"
            faults.append(Fault("data.paths", f"{pattern}: {what}", f"give files or a glob, for example {pattern.rstrip('/')}/**/*.txt"))
        found += files
    if faults:
        raise DataError(*faults)
    files = sorted({path.resolve() for path in found})
    common = Path(os.path.commonpath([path.parent for path in files]))
    return [(path.relative_to(common).as_posix(), path) for path in files]


def read_documents(config: DataConfig) -> Iterator[tuple[str, bytes]]:
    """Every document of the source. Raises DataError naming file and line of what cannot be read."""
    reader = {"jsonl": _jsonl, "parquet": _parquet}.get(config.source, _whole_file)
    for name, path in source_files(config):
        try:
            yield from reader(name, path, config.field)
        except OSError as error:
            raise DataError(Fault(str(path), f"cannot be read: {error.strerror or error}")) from None


def _whole_file(name: str, path: Path, field: str) -> Iterator[tuple[str, bytes]]:
    del field
    text = path.read_bytes()
    if text:
        yield name, text


def _jsonl(name: str, path: Path, field: str) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(Fault(where, f"is not JSON: {error}", "source jsonl wants one JSON object a line")) from None
            if not isinstance(row, dict) or field not in row:
                keys = ", ".join(row) if isinstance(row, dict) else "none, it is no object"
                raise DataError(Fault(where, f"has no key {field!r}; its keys: {keys}", "set data.field to the key of the text"))
            if not isinstance(row[field], str):
                raise DataError(Fault(where, f"{field!r} is not a string", "set data.field to the key of the text"))
            if row[field]:
                yield f"{name}:{number}", row[field].encode()


def _parquet(name: str, path: Path, field: str) -> Iterator[tuple[str, bytes]]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "data.source parquet") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.lib.ArrowInvalid as error:
        raise DataError(Fault(str(path), f"is not Parquet: {error}")) from None
    with file:
        columns = file.schema_arrow.names
        if field not in columns:
            cure = "set data.field to the column of the text"
            raise DataError(Fault(str(path), f"has no column {field!r}; its columns: {', '.join(columns)}", cure))
        number = 0
        for batch in file.iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                number += 1
                if text:
                    yield f"{name}:{number}", text.encode() if isinstance(text, str) else bytes(text)
