"""Where a command writes its answer: never over a file that it did not write itself, and never into a folder's place.

Owns `check_out`, which is called before any work is done.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scaling.errors import ConfigError, Fault


def check_out(path: Path | None, ours: Callable[[str], bool], what: str, option: str = "--out", suffix: str = ".yaml") -> None:
    """Raise ConfigError where `path` is a folder, or a file that does not read as this command's.

    ours: whether a text is one that the command writes; what: the command's answer in words.
    """
    if path is None or not path.exists():
        return
    where = f"{option} {path}"
    if path.is_dir():
        raise ConfigError(
            Fault(where, "is a folder", f"the name of a file in it: {option} {path / what.replace(' ', '_')}{suffix}")
        )
    if not path.is_file() or not ours(_head(path)):
        raise ConfigError(Fault(where, f"exists, and is no {what}: it would be lost", "another name, or remove it first"))


def _head(path: Path) -> str:
    """The first characters of a file; empty where it is no text."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(4096)
    except (OSError, UnicodeDecodeError):
        return ""
