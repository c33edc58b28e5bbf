"""Answers of the search that are on disk: a replay of a study's hundreds of rounds takes seconds, and is the same every time.

Owns `SearchMemory`, a file beside the study's config that may be deleted at any time. An answer is kept under a hash of all that it was
found from: the runs and their losses, the smaller cells, the settings. Other code, or another version of a library, knows none of them,
and a file that is not whole is not read.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from analysis.search import Ask, Done
from scaling.records import write_atomic

MEMORY_FILE = ".search-memory.json"
LIBRARIES = ("numpy", "scipy", "optuna", "torch")


class SearchMemory:
    """What the search has answered in one study; without a directory, only for as long as the object lives."""

    def __init__(self, study_dir: Path | None = None) -> None:
        self._path = None if study_dir is None else study_dir / MEMORY_FILE
        self._answers: dict[str, Any] = {} if self._path is None else _read(self._path)
        self._saved = len(self._answers)

    def recall(self, question: object, find: Callable[[], list[Ask] | Done]) -> list[Ask] | Done:
        """The answer to `question` (everything that it follows from: numbers, text, dataclasses and tuples of them), found if need be."""
        key = sha256(json.dumps(question, default=_fields).encode()).hexdigest()[:32]
        known = self._answers.get(key)
        if known is None:
            found = find()
            self._answers[key] = asdict(found) if isinstance(found, Done) else [asdict(ask) for ask in found]
            return found
        return (
            Done(**known) if isinstance(known, dict) else [Ask(**{name: _frozen(v) for name, v in ask.items()}) for ask in known]
        )

    def save(self) -> None:
        """Write what is new. A directory that cannot be written costs the next reader its time, and nothing else."""
        if self._path is None or len(self._answers) == self._saved or not self._path.parent.is_dir():
            return
        text = json.dumps(self._answers)
        with contextlib.suppress(OSError):
            write_atomic(
                self._path, json.dumps({"code": code_version(), "sha256": sha256(text.encode()).hexdigest()}) + "\n" + text
            )
        self._saved = len(self._answers)


def _read(path: Path) -> dict[str, Any]:
    try:
        head, _, text = path.read_text(encoding="utf-8").partition("\n")
        if json.loads(head) == {"code": code_version(), "sha256": sha256(text.encode()).hexdigest()}:
            return dict(json.loads(text))
    except (OSError, ValueError):
        pass
    return {}


@cache
def code_version() -> str:
    """Hash of the source that answers follow from, and of the versions of the libraries under it."""
    import analysis

    here = Path(__file__).parent
    own = [here / name for name in ("search.py", "optuna_search.py", "search_memory.py")]
    digest = sha256(repr([platform.machine(), platform.python_version(), *map(_version, LIBRARIES)]).encode())
    for path in [*sorted(Path(analysis.__file__).parent.glob("*.py")), *own]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _fields(value: object) -> dict[str, object]:
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no exact text")
    return vars(value)


def _frozen(value: Any) -> Any:
    """JSON has no tuples, and an answer is hashable."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
