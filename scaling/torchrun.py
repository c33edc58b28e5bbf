"""What torchrun tells a process about itself, by environment variables, and how a process that was in a group ends. Torch-free."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import NoReturn


def started_by_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that torchrun, or a launcher that does as it does, started together."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in environment for name in names) and world_size(environment) > 1


def world_size(environment: Mapping[str, str]) -> int:
    return int(environment["WORLD_SIZE"])


def follows(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of torchrun's that rank 0 leads."""
    return started_by_torchrun(environment) and environment["RANK"] != "0"


_groups_met: list[int] = []
"""Sizes of the groups that this process was in."""


def note_group(size: int) -> None:
    """This process is in a group from now on, and had better `leave` when it ends."""
    _groups_met.append(size)


def was_in_group() -> bool:
    return bool(_groups_met)


def leave(code: int) -> NoReturn:
    """End this process with `code`, its work being done.

    An interpreter that tears itself down beside gloo's threads aborts now and then (torch 2.13), which torchrun takes for a failure of
    the whole run.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a pipe that nobody reads any more
            stream.flush()
    os._exit(code)
