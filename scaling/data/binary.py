"""Source bin: files of nothing but tokens, as nanoGPT writes them.

Their type and vocabulary are taken from the config and then checked against every token. The tokens stay in the user's files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scaling.config import DataConfig
from scaling.data.cache import chunks
from scaling.data.documents import SourceFile, absolute, unreadable
from scaling.errors import DataError, Fault, raise_all

KEYS = ("train_bin", "validation_bin")
_OTHER_DTYPE = "set data.dtype to the type that the file was written with"


def bin_files(config: DataConfig, vocab_size: int | None, config_dir: Path | None) -> list[SourceFile]:
    """The training file and the validation file. Raises DataError with everything that can be told without reading them."""
    faults = []
    largest = int(np.iinfo(config.dtype).max)
    if vocab_size is None:
        faults.append(
            Fault("model.vocab_size", "is needed with data.source bin: .bin files do not say their vocabulary", "add it")
        )
    elif vocab_size - 1 > largest:
        what = f"{vocab_size} tokens do not fit in data.dtype {config.dtype}, which holds {largest + 1}"
        faults.append(Fault("model.vocab_size", what, _OTHER_DTYPE))
    found = [_file(key, getattr(config, key), config.dtype, config_dir) for key in KEYS]
    raise_all([*faults, *(file for file in found if isinstance(file, Fault))], DataError)
    return [file for file in found if isinstance(file, SourceFile)]


def _file(key: str, text: str | None, dtype: str, config_dir: Path | None) -> SourceFile | Fault:
    where = f"data.{key}"
    if text is None:
        return Fault(where, "is needed with data.source bin", f"{key}: path/to/file.bin")
    path = Path(absolute(text, config_dir))
    try:
        stat = path.stat()
    except OSError as error:
        return Fault(where, f"{text}: {error.strerror or error}", f"correct the path; it was taken as {path}")
    if not path.is_file():
        return Fault(where, f"{text}: is not a file", f"correct the path; it was taken as {path}")
    if stat.st_size == 0:
        return Fault(where, f"{text}: is empty", "write the tokens again")
    if stat.st_size % np.dtype(dtype).itemsize:
        what = f"{text}: {stat.st_size} bytes are no whole number of {dtype} tokens"
        return Fault(where, what, f"{_OTHER_DTYPE}, or write the file again")
    return SourceFile(key, path, stat.st_size, stat.st_mtime_ns)


def map_bin(files: list[SourceFile], dtype: str) -> list[np.ndarray]:
    """Memory-mapped tokens of each file. Raises DataError for files that cannot be read."""
    faults: list[Fault] = []
    arrays: list[np.ndarray] = []
    for file in files:
        try:
            arrays.append(np.memmap(file.path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r"))
        except OSError as error:
            faults.append(unreadable(file.path, error))
    raise_all(faults, DataError)
    return arrays


def check_tokens(files: list[SourceFile], arrays: list[np.ndarray], vocab_size: int) -> None:
    """Read every token. Raises DataError when one is not in the vocabulary."""
    faults = []
    for file, array in zip(files, arrays, strict=True):
        top = max(int(chunk.max()) for chunk in chunks(array))
        if top >= vocab_size:
            what = f"{file.path} holds token id {top}; a vocabulary of {vocab_size} ends at {vocab_size - 1}"
            cure = f"set model.vocab_size to at least {top + 1}, or {_OTHER_DTYPE}"
            faults.append(Fault(f"data.{file.name}", what, cure))
    raise_all(faults, DataError)
