"""`mutransfer train` whose ranks end with SIGKILL at named places, one in each of torchrun's attempts until none is left.

    torchrun --max-restarts 2 -m tests.scaling.dying 1@meeting,0@writing train RUN.yaml ...

Attempts are told apart by torchrun's own count of restarts.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from sweeps.cli import main


def die_before(owner: Any, name: str, call: int) -> None:
    """SIGKILL of this process where `owner.name` is called for the `call`-th time."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def dying(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(owner, name, dying)


def arm(place: str) -> None:
    if place == "meeting":
        die_before(dist, "init_process_group", 1)  # the ranks have agreed on a name, and connect next
    else:
        assert place == "writing"
        die_before(FileSystemWriter, "finish", 2)  # the second checkpoint's tensors are on disk, its list of them is not


if __name__ == "__main__":
    deaths = [death.partition("@") for death in sys.argv.pop(1).split(",")]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(deaths) and deaths[attempt][0] == os.environ["RANK"]:
        arm(deaths[attempt][2])
    main()
