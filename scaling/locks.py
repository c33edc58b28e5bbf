"""File locks that the kernel releases when their holder dies, however it dies. Torch-free."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from scaling.errors import Fault, StudyError, program

LOCK_TRIES = 10


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


def driver_lock(study_dir: Path) -> IO[str]:
    """The lock of the study's one driver; closing the file gives it back. Raises StudyError when another driver holds it."""
    for _ in range(LOCK_TRIES):
        try:
            return acquire(study_dir / ".driver.lock", blocking=False)
        except Busy:
            time.sleep(0.05)  # `status` takes it for a moment, to see whether it is free.
    cure = f"wait for it, or watch it: {program()} status {study_dir}"
    raise StudyError(Fault(str(study_dir), "another driver works on this study", cure))
