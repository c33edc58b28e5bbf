"""What every command shares: `--json`, `--set` and dotted options, errors without a traceback, exit codes."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from analysis.results import json_safe
from scaling.errors import ConfigError, Fault, UserError, program

if TYPE_CHECKING:
    from rich.console import Console

OK, NOT_OK, WRONG_USE = 0, 1, 2
SHOWN_FAULTS = 10
"""A message stays within a screen."""
DOTTED = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that take `--a.b value` as short for `--set a.b=value`."""


def messages() -> Console:
    """Console for progress and messages: stderr, so that stdout holds the answer alone."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


def answer(document: dict[str, Any], text: str | Callable[[], str], as_json: bool) -> None:
    """Print the command's answer on stdout: one JSON document, or the text."""
    if as_json:
        print(json.dumps(json_safe(document), indent=1, allow_nan=False))
    else:
        print(text if isinstance(text, str) else text())


def overrides(settings: Sequence[str], extra: Sequence[str]) -> list[str]:
    """`--set a.b=c` values and leftover `--a.b c` options as one list of overrides.

    Raises ConfigError for a leftover that is no dotted option.
    """
    result, faults, rest = list(settings), [], list(extra)
    while rest:
        option = rest.pop(0)
        key, separator, text = option.removeprefix("--").partition("=")
        if not option.startswith("--") or "." not in key:
            faults.append(
                Fault(option, "unknown option or argument", "see --help; config keys are given as --set key.subkey=value")
            )
        elif separator:
            result.append(f"{key}={text}")
        elif rest and not rest[0].startswith("--"):
            result.append(f"{key}={rest.pop(0)}")
        else:
            faults.append(Fault(option, "needs a value", f"{option}=VALUE"))
    if faults:
        raise ConfigError(*faults)
    return result


def report_error(error: UserError) -> int:
    """Print the faults on stderr and return the exit code."""
    console = messages()
    head = f"{len(error.faults)} faults" if len(error.faults) > 1 else "error"
    console.print(f"{head}:" if error.exit_code == WRONG_USE else "stopped:", style="bold red", highlight=False)
    for fault in error.faults[:SHOWN_FAULTS]:
        console.print(f"  {fault}", markup=False, highlight=False)
    if len(error.faults) > SHOWN_FAULTS:
        console.print(f"  ... and {len(error.faults) - SHOWN_FAULTS} more", highlight=False)
    if "--json" in sys.argv[1:]:
        print(json.dumps({"errors": [vars(fault) for fault in error.faults]}, indent=1))
    return error.exit_code


def follow_rank_0() -> NoReturn:
    """A command in a process of torchrun's that is not rank 0: take part in rank 0's runs, make none of its own, and end with them."""
    from scaling.ranks import follow_torchrun

    follow_torchrun()


def stop_on_sigterm() -> None:
    """A polite kill (a scheduler's, `timeout`'s) ends a command as Ctrl-C does."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def command_line() -> str:
    """This command as it was typed."""
    return " ".join([program(), shlex.join(sys.argv[1:])])
