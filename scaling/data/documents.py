"""Which files a source has, and the documents in them: the standard library, text files, JSON lines, Parquet.

A document is a stable name and UTF-8 text. Names are relative, so that the same corpus in another folder is the same corpus.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scaling.config import DataConfig
from scaling.data.rows import Document, read_jsonl, read_parquet
from scaling.errors import DataError, Fault, raise_all

NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


class SourceFile(NamedTuple):
    """A file of the corpus: its name within the corpus, where it lies, and what tells that it changed."""

    name: str
    path: Path
    size: int
    """Bytes."""
    mtime_ns: int


def absolute(text: str, config_dir: Path | None) -> str:
    """A path or glob of a config, relative ones taken from `config_dir` or the current folder, without symlinks resolved."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # A user that this machine does not have: the file is then reported as absent.
        path = Path(text)
    return os.path.normpath(Path.cwd() / (config_dir or "") / path)


def source_files(config: DataConfig, config_dir: Path | None = None) -> list[SourceFile]:
    """Every file of the source, sorted by name. Raises DataError with all the paths that are not there."""
    if config.source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = list(_python_files(root))
    else:
        paths = _matches(config, config_dir)
        root = Path(os.path.commonpath([path.parent for path in paths]))
    faults: list[Fault] = []
    files = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            faults.append(unreadable(path, error))
        else:
            files.append(SourceFile(path.relative_to(root).as_posix(), path, stat.st_size, stat.st_mtime_ns))
    raise_all(faults, DataError)
    return sorted(files)


def read_documents(config: DataConfig, files: list[SourceFile]) -> list[Document]:
    """Every document that is not empty, all of them in memory, in the order of the files.

    Raises DataError with the faults of all files, and MissingExtra for Parquet without pyarrow.
    """
    documents: list[Document] = []
    faults: list[Fault] = []
    for file in files:
        try:
            if config.source == "jsonl":
                documents += read_jsonl(file.name, file.path, config.field, faults)
            elif config.source == "parquet":
                documents += read_parquet(file.name, file.path, config.field, faults)
            else:
                documents += _read_whole(file.name, file.path, faults, utf8=config.source == "text")
        except OSError as error:
            faults.append(unreadable(file.path, error))
    raise_all(faults, DataError)
    return documents


def unreadable(path: Path, error: OSError) -> Fault:
    """The fault of a file that the operating system does not give us."""
    return Fault(str(path), f"cannot be read: {error.strerror or error}", "check that the file is there, whole and readable")


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _matches(config: DataConfig, config_dir: Path | None) -> list[Path]:
    suffix = {"text": "txt"}.get(config.source, config.source)
    if not config.paths:
        raise DataError(Fault("data.paths", f"is empty, and source {config.source} reads files", f"paths: [corpus/*.{suffix}]"))
    found: set[str] = set()
    faults = []
    for text in config.paths:
        pattern = absolute(text, config_dir)
        try:
            files, fault = _match(text, pattern, suffix)
        except OSError as error:
            fault = unreadable(Path(pattern), error)
        else:
            found.update(files)
        faults += [fault] if fault else []
    raise_all(faults, DataError)
    return [Path(path) for path in found]


def _match(text: str, pattern: str, suffix: str) -> tuple[list[str], Fault | None]:
    """The files that `pattern` stands for, or the fault of the path that the config wrote as `text`."""
    # A file whose name holds a wildcard is meant literally.
    matches = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)  # noqa: PTH207
    files = [match for match in matches if Path(match).is_file()]
    if files:
        return files, None
    if any(Path(match).is_dir() for match in matches):
        example = f"{text.rstrip('/')}/**/*.{suffix}"
        return [], Fault("data.paths", f"{text}: is a folder", f"give files or a glob, for example {example}")
    what = "no file matches" if glob.has_magic(pattern) else "no such file"
    return [], Fault("data.paths", f"{text}: {what}", f"correct the path; it was taken as {pattern}")


def _read_whole(name: str, path: Path, faults: list[Fault], *, utf8: bool) -> Iterator[Document]:
    text = path.read_bytes()
    try:
        if utf8:
            text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        what = f"byte 0x{text[error.start]:02x} is not UTF-8"
        faults.append(Fault(f"{path}:{line}", what, "convert the file to UTF-8 (iconv -t UTF-8), or leave it out of data.paths"))
    else:
        if text:
            yield Document(name, text)
