"""File locks that the kernel releases when their holder dies, however it dies. Torch-free."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Busy(Exception):
    """Another process holds the lock."""


@contextmanager
def file_lock(path: Path, *, blocking: bool = True) -> Iterator[None]:
    """Hold an exclusive flock on `path`. Raises Busy when it is held elsewhere and `blocking` is false."""
    file = acquire(path, blocking=blocking)
    try:
        yield
    finally:
        file.close()


def acquire(path: Path, *, blocking: bool = True) -> IO[str]:
    """Take the lock; closing the returned file gives it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise Busy(str(path)) from None
    except BaseException:
        file.close()
        raise
    return file
