"""SIGKILL at random moments of a sharded run's ranks under a real torchrun, and what the run was afterwards: one table.

A round is one run on two processes, killed one to three times: a rank, which torchrun's agent notices and starts all again, or the agent
and both ranks, after which the same command is typed again. It must end with every logged row of a run that nobody disturbed, and have gone
on from the last checkpoint that both ranks had written.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from scaling.checkpoint import SHARDS
from scaling.config import OptimizerConfig, RunConfig, RuntimeConfig, TrainingConfig
from scaling.model_config import ModelFamily
from scaling.records import read_record
from tests.conftest import tiny_run
from tests.scaling.elastic import curve, ranks_of, steps_logged, torchrun, wait_for, write_run

Moment = Literal["starting and meeting", "between two checkpoints", "writing a checkpoint"]
Victim = Literal["rank 0", "rank 1", "agent and both ranks"]
MOMENTS: tuple[Moment, ...] = ("starting and meeting", "between two checkpoints", "writing a checkpoint")
VICTIMS: tuple[Victim, ...] = ("rank 0", "rank 1", "agent and both ranks")
KILLS_A_ROUND = 3
END_S = 120.0
"""Longer than any run takes, restarts and all: what has not ended by then hangs."""


@dataclass
class Row:
    """Kills of one victim at one kind of moment."""

    kills: int = 0
    torn: int = 0
    """Kills that left a checkpoint which does not count."""
    rounds_wrong: int = 0
    """Rounds with such a kill that did not end as an undisturbed run."""


def sharded_run(background: bool) -> RunConfig:
    """3 million parameters, two seconds: a checkpoint takes longer to write than a step to compute."""
    family = ModelFamily(depth=4, head_dim=32, context=16, vocab_size=32, norm_gain=True)
    training = TrainingConfig(steps=40, batch_size=8, validation_sequences=8)
    run = tiny_run(256, family=family, optimizer=OptimizerConfig(lr=2.0**-7, clip_norm=0.5), training=training)
    runtime = RuntimeConfig(log_every_steps=1, checkpoint_every_steps=4, checkpoint_async=background)
    return run.model_copy(update={"runtime": runtime})


def counted_step(directory: Path) -> int:
    """Updates in the checkpoint that counts, 0 where none does."""
    path = directory / SHARDS / "state.json"
    return int(json.loads(path.read_text())["state"]["step"]) if path.exists() else 0


def torn(directory: Path) -> bool:
    """Whether a checkpoint is begun that does not count."""
    return any(int(folder.name.rpartition("-")[2]) > counted_step(directory) for folder in (directory / SHARDS).glob("step-*"))


class Victims:
    """One run under torchrun, in a folder of its own."""

    def __init__(self, folder: Path, background: bool) -> None:
        folder.mkdir()
        self.directory, self.log = folder / "run", folder / "log"
        self._config = write_run(folder / "run.yaml", sharded_run(background))
        self.agent = self._typed()

    def _typed(self) -> subprocess.Popen[bytes]:
        return torchrun(self._config, self.directory, "fsdp=2", self.log, restarts=KILLS_A_ROUND)

    def reach(self, moment: Moment, chance: random.Random, start_s: float) -> bool:
        """Wait for such a moment; False where the run ended first. start_s: how long ranks take to their first step."""
        before = steps_logged(self.directory)
        if not wait_for(lambda: len(ranks_of(self.agent.pid)) == 2, self.agent):
            return False
        if moment == "starting and meeting":
            time.sleep(chance.uniform(0, start_s))
            return self.agent.poll() is None
        ready = before + chance.randint(1, 12)
        if not wait_for(lambda: steps_logged(self.directory) >= ready, self.agent):
            return False
        if moment == "writing a checkpoint":
            return wait_for(lambda: torn(self.directory), self.agent)
        time.sleep(chance.uniform(0, 0.05))
        return self.agent.poll() is None

    def kill(self, victim: Victim) -> bool:
        """SIGKILL; returns when all ranks of this attempt are gone. False where the victim had ended by itself."""
        ranks = ranks_of(self.agent.pid)
        if len(ranks) < 2:
            return False
        if victim == "agent and both ranks":
            self.agent.kill()
            self.agent.wait()
        for rank, pid in ranks.items():
            if victim in ("agent and both ranks", f"rank {rank}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_S
        while any(_alive(pid) for pid in ranks.values()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"a rank does not end after {victim} was killed: {self.log}")
            time.sleep(0.005)
        return True

    def go_on(self) -> None:
        """Type the command again where its agent was killed."""
        if self.agent.poll() is not None:
            self.agent = self._typed()

    def end(self) -> int | None:
        """Exit code, None for a run that hangs."""
        try:
            return self.agent.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            for pid in [*ranks_of(self.agent.pid).values(), self.agent.pid]:
                os.kill(pid, signal.SIGKILL)
            return None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def report(seed: int, rounds: int = 24) -> None:
    """Kill the ranks of `rounds` runs, and print what became of them."""
    chance, rows = random.Random(seed), {kind: Row() for kind in product(MOMENTS, VICTIMS)}
    deck = _deck(chance)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start_s, quiet = _quiet(folder)
        exact = kills = went_on = 0
        for number in range(rounds):
            ended = _round(Victims(folder / f"round{number}", background=number % 2 == 1), deck, chance, start_s, quiet, rows)
            exact += ended.exact
            went_on += ended.went_on
            kills += ended.kills
    print(f"\n{rounds} runs under torchrun, KILL_SEED={seed}, every second with runtime.checkpoint_async: SIGKILL {kills} times")
    print(
        "\n| killed | when | kills | left a checkpoint that does not count | in runs that ended otherwise |\n|---|---|---|---|---|"
    )
    for (moment, victim), row in rows.items():
        print(f"| {victim} | {moment} | {row.kills} | {row.torn} | {row.rounds_wrong} |")
    print(f"\n{exact} of {rounds} ended bit by bit as an undisturbed run, {went_on} of them from a checkpoint")


@dataclass
class _Ended:
    kills: int
    exact: bool
    went_on: bool


def report_two_agents() -> None:
    """Kill one of two agents with its rank, start it again, and print what became of the run; the other agent has the meeting place."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, quiet = _quiet(folder)
        config, directory = write_run(folder / "run.yaml", sharded_run(background=False)), folder / "run"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        how = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
        host = torchrun(config, directory, "fsdp=2", folder / "host", how=how)
        time.sleep(2)  # who comes first makes the meeting place
        guest = torchrun(config, directory, "fsdp=2", folder / "guest", how=how)
        wait_for(lambda: steps_logged(directory) >= 10, host)
        for pid in (guest.pid, *ranks_of(guest.pid).values()):
            os.kill(pid, signal.SIGKILL)
        guest.wait()
        guest = torchrun(config, directory, "fsdp=2", folder / "guest", how=how)
        codes, record = (host.wait(END_S), guest.wait(END_S)), read_record(directory)
        resumed = record.resumed_from_step if record is not None else None
        exact = record is not None and curve(directory) == quiet
    share = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    print(f"\none of two agents and its rank killed, TORCH_DISABLE_SHARE_RDZV_TCP_STORE={share}: exit codes {codes}")
    print(f"went on from step {resumed}; every row as in an undisturbed run: {exact}")


def _quiet(folder: Path) -> tuple[float, list[dict[str, object]]]:
    """Seconds from the ranks' start to their first step, and all rows of a run that is left alone."""
    quiet = Victims(folder / "quiet", background=False)
    wait_for(lambda: len(ranks_of(quiet.agent.pid)) == 2, quiet.agent)
    started = time.monotonic()
    wait_for(lambda: steps_logged(quiet.directory) > 0, quiet.agent)
    start_s = time.monotonic() - started
    if quiet.end() != 0:
        raise RuntimeError(f"a run that is left alone does not end: {quiet.log.read_text()}")
    return start_s, curve(quiet.directory)


def _deck(chance: random.Random) -> Iterator[tuple[Moment, Victim]]:
    """All nine kinds of kills in an order of chance, again and again."""
    while True:
        yield from chance.sample(kinds := list(product(MOMENTS, VICTIMS)), len(kinds))


def _round(
    run: Victims,
    deck: Iterator[tuple[Moment, Victim]],
    chance: random.Random,
    start_s: float,
    quiet: list[dict[str, object]],
    rows: dict[tuple[Moment, Victim], Row],
) -> _Ended:
    mine, counted = [], 0
    for _ in range(chance.randint(1, KILLS_A_ROUND)):
        moment, victim = next(deck)
        if not run.reach(moment, chance, start_s) or not run.kill(victim):
            break
        mine.append(rows[moment, victim])
        mine[-1].kills += 1
        mine[-1].torn += torn(run.directory)
        if read_record(run.directory) is None:
            counted = counted_step(run.directory)
        run.go_on()
    code, record = run.end(), read_record(run.directory)
    resumed = record.resumed_from_step if record is not None else None
    exact = code == 0 and curve(run.directory) == quiet and resumed == counted
    if not exact:
        print(f"{run.directory.parent.name}: exit code {code}, went on from {resumed}, counted {counted}\n{run.log.read_text()}")
        for row in mine:
            row.rounds_wrong += 1
    return _Ended(len(mine), exact, exact and counted > 0)
