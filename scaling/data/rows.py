"""Documents that are rows: of JSON lines and of Parquet. Null and empty texts are no documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scaling.errors import Fault, MissingExtra

# A wrong field is wrong in every row: more faults of one file would say nothing new.
MOST_FAULTS = 5


class Document(NamedTuple):
    """A text of the corpus and its name within it."""

    name: str
    text: bytes
    """UTF-8, but for some files of the standard library."""


def read_jsonl(name: str, path: Path, field: str, faults: list[Fault]) -> Iterator[Document]:
    """A document a line. Faults are appended with file and line; a file with too many is not read to its end."""
    most = len(faults) + MOST_FAULTS
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            text = _json_text(line, field, f"{path}:{number}")
            if isinstance(text, Fault):
                faults.append(text)
                if len(faults) >= most:
                    return
            elif text:
                yield Document(f"{name}:{number}", text)


def _json_text(line: bytes, field: str, where: str) -> bytes | Fault:
    """The text in the key `field` of one line, or what is wrong with it."""
    cure = "set data.field to the key of the text"
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return Fault(where, f"byte 0x{error.object[error.start]:02x} is not UTF-8", "convert the file to UTF-8 (iconv -t UTF-8)")
    except (ValueError, RecursionError) as error:
        return Fault(where, f"is not JSON: {error}", "source jsonl wants one JSON object a line")
    if not isinstance(row, dict):
        return Fault(where, "is not a JSON object", "source jsonl wants one JSON object a line")
    if field not in row:
        return Fault(where, f"has no key {field!r}; its keys: {', '.join(row) or 'none'}", cure)
    text = row[field]
    if text is not None and not isinstance(text, str):
        return Fault(where, f"{field!r} is {type(text).__name__}, not a string", cure)
    try:
        return (text or "").encode()
    except UnicodeEncodeError:
        return Fault(where, f"{field!r} holds half a surrogate pair, which is no text", "repair or remove the line")


def read_parquet(name: str, path: Path, field: str, faults: list[Fault]) -> Iterator[Document]:
    """A document a row. Raises MissingExtra without pyarrow; faults are appended with file and row."""
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "data.source parquet") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            fault = _column_fault(file.schema_arrow, field, str(path))
            if fault:
                faults.append(fault)
                return
            yield from _parquet_rows(file, name, path, field, faults)
    except pyarrow.lib.ArrowException as error:
        faults.append(
            Fault(str(path), f"is not a readable Parquet file: {error}", "write it again, or leave it out of data.paths")
        )


def _column_fault(schema: Any, field: str, where: str) -> Fault | None:
    cure = "set data.field to the column of the text"
    if field not in schema.names:
        return Fault(where, f"has no column {field!r}; its columns: {', '.join(schema.names)}", cure)
    kind = schema.field(field).type
    value = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    if str(value).removeprefix("large_").removesuffix("_view") not in ("string", "binary"):
        return Fault(where, f"column {field!r} holds {kind}, not text", cure)
    return None


def _parquet_rows(file: Any, name: str, path: Path, field: str, faults: list[Fault]) -> Iterator[Document]:
    import pyarrow

    most, number = len(faults) + MOST_FAULTS, 0
    for batch in file.iter_batches(columns=[field]):
        # pyarrow does not check that strings are UTF-8, and reading a wrong one as str would raise.
        for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
            number += 1
            text = value or b""
            try:
                text.decode()
            except UnicodeDecodeError as error:
                what = f"row {number}: byte 0x{text[error.start]:02x} is not UTF-8"
                faults.append(Fault(str(path), what, "repair or remove the row"))
                if len(faults) >= most:
                    return
            else:
                if text:
                    yield Document(f"{name}:{number}", text)
