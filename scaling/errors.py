"""Errors meant for the person at the keyboard.

Owns the exceptions that the command line prints without a traceback: what is wrong, where it stands, how to cure it.
Assertions are for our own invariants; everything a user can cause is a `UserError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    where: "file:line: key" or the option that carried it; what: the fault in words; cure: what to type or change.
    """

    where: str
    what: str
    cure: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n    cure: {self.cure}" if self.cure else text


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
        super().__init__(Fault("", f"{purpose} needs the package {package!r}", f"pip install 'mutransfer[{extra}]'"))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), (self.package, self.extra, self.purpose)


class Interrupted(UserError):
    """Stopped by Ctrl-C or SIGTERM; what was finished is kept."""

    exit_code = 1


def raise_all(faults: Sequence[Fault], kind: type[UserError] = ConfigError) -> None:
    """Raise one error that carries all `faults`, or return when there is none."""
    if faults:
        raise kind(*faults)
