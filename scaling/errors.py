"""Errors meant for the person at the keyboard.

Owns the exceptions that the command line prints without a traceback: what is wrong, where it stands, how to cure it.
Assertions are for our own invariants; everything a user can cause is a `UserError`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    where: "file:line: key" or the option that carried it; what: the fault in words; cure: what to type or change.
    """

    where: str
    what: str
    cure: str = ""

    def __str__(self) -> str:
        text = f"{_short(self.where, 200)}: {_short(self.what)}" if self.where else _short(self.what)
        return f"{text}\n    cure: {_short(self.cure)}" if self.cure else text


def _short(text: str, limit: int = 500) -> str:
    """`text`, its middle left out when it would fill the screen."""
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} [...] {text[-limit // 4 :]}"


def program() -> str:
    """How this program was started, for messages that say what to type: `mutransfer` where the shell finds it, else its path."""
    started = Path(sys.argv[0])
    if started.name != "mutransfer" or shutil.which("mutransfer") == str(started):
        return "mutransfer"
    inside = started.is_absolute() and started.is_relative_to(Path.cwd())
    return str(started.relative_to(Path.cwd()) if inside else started)


class UserError(Exception):
    """A wrong config, option, file or target; all its faults at once. The process ends with `exit_code`."""

    exit_code = 2

    def __init__(self, *faults: Fault) -> None:
        assert faults, "a UserError names at least one fault"
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))

    def __reduce__(self) -> tuple[type[UserError], tuple[Fault, ...]]:
        return type(self), self.faults


class ConfigError(UserError):
    """A config file, a `--set` override or a value built from them is wrong."""


class DataError(UserError):
    """The corpus cannot be read, is empty, or does not fit the model that should be trained on it."""


class StudyError(UserError):
    """A study directory is in a state that the command cannot work with."""


class MissingExtra(UserError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        cure = f"{sys.executable} -m pip install {package}   (the extra {extra!r} of mutransfer)"
        super().__init__(Fault("", f"{purpose} needs the package {package!r}", cure))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), (self.package, self.extra, self.purpose)


class Interrupted(UserError):
    """Stopped by Ctrl-C, SIGTERM or a full disk: nothing was used wrongly, and what was finished is kept."""

    exit_code = 1


def raise_all(faults: Sequence[Fault], kind: type[UserError] = ConfigError) -> None:
    """Raise one error that carries all `faults`, or return when there is none."""
    if faults:
        raise kind(*faults)
