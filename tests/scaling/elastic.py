"""One run under a real torchrun whose ranks are killed with SIGKILL: how it is started, who its ranks are, and what is compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from scaling.config import RunConfig
from scaling.records import read_metrics

ROOT = Path(__file__).parents[2]


def write_run(path: Path, run: RunConfig) -> Path:
    """`run` as YAML, its layout left to the command."""
    runtime = run.runtime.model_dump(mode="json", exclude={"parallel", "processes"})
    values = run.model_dump(mode="json", exclude={"runtime"}, exclude_none=True) | {"runtime": runtime}
    path.write_text(yaml.safe_dump(values))
    return path


ONE_AGENT = ("--standalone", "--nproc-per-node", "2")


def torchrun(
    config: Path,
    out: Path,
    parallel: str,
    log: Path,
    restarts: int = 3,
    deaths: str | None = None,
    how: Sequence[str] = ONE_AGENT,
) -> subprocess.Popen[bytes]:
    """`mutransfer train` under an elastic agent of torchrun's; what it says goes to `log`.

    deaths: which rank kills itself where, for each attempt (tests.scaling.dying). how: the agent's options.
    """
    program = ["sweeps.cli"] if deaths is None else ["tests.scaling.dying", deaths]
    agent = ["-m", "torch.distributed.run", *how, "--max-restarts", str(restarts)]
    command = [*agent, "-m", *program, "train", str(config), "--parallel", parallel, "--out", str(out)]
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def ranks_of(agent: int) -> dict[int, int]:
    """Process id of each rank that an agent has started and that lives."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != agent or fields[0] == "Z":
                continue
            words = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
        if ranks:
            found[ranks[0]] = int(entry.name)
    return found


def wait_for(ready: Callable[[], bool], agent: subprocess.Popen[bytes], within_s: float = 60) -> bool:
    """Whether `ready` came true before the agent ended."""
    deadline = time.monotonic() + within_s
    while not ready():
        if agent.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def kill(agent: int, rank: int) -> int | None:
    """SIGKILL a rank; its process id, or None where it has ended by itself."""
    pid = ranks_of(agent).get(rank)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid


def steps_logged(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def curve(directory: Path) -> list[dict[str, object]]:
    """All that metrics.jsonl says of a run, exactly."""
    return [dict(row) for row in read_metrics(directory / "metrics.jsonl")]
