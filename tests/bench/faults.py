"""Faults done to real studies in real processes, and what was left of them: one table.

Each fault is done to small studies, in the journal of one machine and on the board of a real PostgreSQL. Afterwards the study is made to
its end by the command that its message names, and counted: finished runs kept, planned runs made once, losses those of a quiet study.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sweeps.databases import Postgres, postgres
from tests.sweeps.faulty import Audit, Victim, children_of, heed_ctrl_c, quiet_losses, wait_for

Losses = Mapping[str, float | None]
KILLS_A_STUDY = 5
DAY_S = 86_400.0


@dataclass
class Row:
    """One line of the table; sums over the studies of one fault."""

    fault: str
    where: str
    message: str
    """What must have been said."""
    rounds: int = 0
    planned: int = 0
    kept: int = 0
    finished: int = 0
    twice: int = 0
    lost: int = 0
    wrong: int = 0
    said: bool = True

    def add(self, victim: Victim, audit: Audit, rounds: int = 1) -> None:
        self.rounds += rounds
        self.planned += audit.planned
        self.kept += audit.kept
        self.finished += len(victim.seen)
        self.twice += audit.twice
        self.lost += audit.lost
        self.wrong += audit.wrong
        self.said &= self.message in victim.said

    def text(self) -> str:
        cells = (self.fault, self.where, self.rounds, self.planned, f"{self.kept} of {self.finished}", self.twice, self.lost)
        said = f"`{self.message}`" if self.said else f"NOT SAID: `{self.message}`"
        return "| " + " | ".join(map(str, (*cells, self.wrong, said))) + " |"


HEAD = """
| fault | study in | rounds | runs planned | finished at the fault, kept | made twice | lost | wrong losses | it said |
|---|---|---|---|---|---|---|---|---|"""


class Bench:
    """The faults, with what they share: a quiet study's losses, a server, and chance."""

    def __init__(self, folder: Path, server: Postgres, seed: int) -> None:
        self.folder, self.server, self.chance = folder, server, random.Random(seed)
        self.quiet: Losses = quiet_losses(folder / "quiet")
        self._studies = 0

    def victim(self, where: str, **changes: Any) -> Victim:
        self._studies += 1
        name = f"study{self._studies}"
        url = self.server.new_database(name) if where == "board" else None
        return Victim(self.folder / name, url=url, changes=changes)

    def finish(self, victim: Victim, row: Row, rounds: int = 1, quiet: Losses | None = None) -> None:
        """Make the study to its end by the command that began it."""
        done = victim.call(*victim.run())
        if done.returncode:
            raise RuntimeError(f"{row.fault}: the study does not end: {done.stdout}{done.stderr}")
        row.add(victim, victim.audit(self.quiet if quiet is None else quiet), rounds)

    def under_way(self, victim: Victim, *, jobs: int = 2) -> subprocess.Popen[str]:
        """A pool of which some run has begun since it was started."""
        before = len(list((victim.directory / "runs").glob("*/metrics.jsonl")))
        pool = victim.start(*victim.run("--jobs", str(jobs)))
        wait_for(lambda: pool.poll() is not None or len(list((victim.directory / "runs").glob("*/metrics.jsonl"))) > before)
        return pool

    # Kills

    def killed_pools(self, where: str, rounds: int) -> Row:
        """SIGKILL of the command that the user typed, its driver."""
        row = Row("driver killed", where, "of them done" if where == "journal" else "nothing is left to do in")
        while row.rounds < rounds:
            victim, kills = self.victim(where), 0
            while kills < KILLS_A_STUDY and row.rounds + kills < rounds:
                pool = self.under_way(victim)
                time.sleep(self.chance.uniform(0, 1.0))
                if pool.poll() is not None:
                    break
                victim.remember()
                orphans = children_of(pool.pid) if where == "board" else []
                pool.kill()
                # A board's workers need no driver and would make the rest; most are killed too, so that there is a next round.
                for orphan in orphans if self.chance.random() < 0.8 else []:
                    _kill(orphan)
                kills += 1
                victim.end(pool)
            self._give_back(victim)
            self.finish(victim, row, kills)
        return row

    def killed_workers(self, where: str, rounds: int) -> Row:
        """SIGKILL of one worker of a pool that goes on."""
        row = Row("worker killed", where, "worker died")
        while row.rounds < rounds:
            victim, kills = self.victim(where), 0
            pool = self.under_way(victim)
            while kills < KILLS_A_STUDY and row.rounds + kills < rounds and pool.poll() is None:
                workers = children_of(pool.pid)
                if workers:
                    victim.remember()
                    kills += _kill(self.chance.choice(workers))
                time.sleep(self.chance.uniform(0.5, 4.0))
            victim.end(pool)
            self.finish(victim, row, kills)
        return row

    def killed_servers(self, rounds: int) -> Row:
        """SIGKILL of PostgreSQL and its helpers, which starts again a second later."""
        row = Row("database killed", "board", "the database does not answer, trying again")
        while row.rounds < rounds:
            victim, kills = self.victim("board"), 0
            pool = self.under_way(victim)
            while kills < 2 and row.rounds + kills < rounds and pool.poll() is None:
                victim.remember()
                self.server.kill()
                time.sleep(self.chance.uniform(0.5, 2.0))
                self.server.start()
                kills += 1
                time.sleep(self.chance.uniform(0, 2.0))
            victim.end(pool)
            self.finish(victim, row, kills)
        return row

    def _give_back(self, victim: Victim) -> None:
        """What a board's killed workers held is given back by whoever sees their silence: waited for here in a second, not a minute."""
        if victim.url is not None:
            victim.end(victim.start("worker", victim.url, "--out", victim.directory, "--grace", "4"))

    # The rest

    def ctrl_c(self, where: str) -> Row:
        row = Row("Ctrl-C", where, "to continue, type: mutransfer run")
        victim = self.victim(where)
        pool = self.under_way(victim)
        _next_result(victim, pool)
        victim.remember()
        for process in (*(children_of(pool.pid) if where == "board" else []), pool.pid):  # A terminal tells the whole group.
            os.kill(process, signal.SIGINT)
        victim.end(pool)
        self.finish(victim, row)
        return row

    def two_drivers(self, where: str) -> Row:
        row = Row("two drivers at once", where, "another driver works" if where == "journal" else "nothing is left to do in")
        victim = self.victim(where)
        for pool in [victim.start(*victim.run("--jobs", "1")) for _ in range(2)]:
            victim.end(pool)
        victim.remember()
        self.finish(victim, row)
        return row

    def full_disk_of_runs(self, where: str) -> Row:
        row = Row("disk of the runs full", where, "no space left on the disk")
        victim = self.victim(where)
        victim.directory.mkdir()
        with small_disk(victim.directory, "48k") as grow:
            victim.call(*victim.run())
            victim.remember()
            grow()
            self.finish(victim, row)
        return row

    def full_journal(self) -> Row:
        """The journal may not grow beyond 8 KB: so does a quota, or a full disk, stop the driver in the middle of a line."""
        row = Row("journal cannot grow", "journal", "no space left on the disk")
        victim = self.victim("journal")
        victim.end(victim.start(*victim.run(), prepare=small_files))
        victim.remember()
        self.finish(victim, row)
        return row

    def full_database(self) -> Row:
        """The server's own disk is full for some seconds while workers store their results."""
        row = Row("disk of the database full", "board", "trying again")
        disk = self.folder / "database"
        disk.mkdir()
        with small_disk(disk, "180m"):
            disk.chmod(0o755)
            with postgres(disk) as server:
                url = server.new_database("full")
                victim = Victim(self.folder / "full", url=url)
                pool = self.under_way(victim)
                ballast = disk / "ballast"
                _fill(ballast)
                time.sleep(6.0)
                victim.remember()
                ballast.unlink()
                server.start()
                victim.end(pool)
                self.finish(victim, row)
        return row

    def torn_metrics(self, where: str) -> Row:
        row = Row("torn last line of metrics.jsonl", where, "0 failed of 6 runs")
        victim = self.victim(where)
        pool = self.under_way(victim)
        _next_result(victim, pool)
        pool.kill()
        victim.end(pool)
        victim.remember()
        for metrics in (victim.directory / "runs").glob("*/metrics.jsonl"):
            metrics.write_bytes(metrics.read_bytes()[:-9])
        self._give_back(victim)
        self.finish(victim, row)
        return row

    def wrong_clocks(self, where: str) -> Row:
        """Workers two days before and behind, at once on a board, one after the other in a journal."""
        row = Row("clocks two days apart", where, "0 failed of 6 runs")
        victim = self.victim(where)
        if where == "board":
            pools = [
                victim.start("worker", victim.config, "--out", self.folder / f"clock{off:+}", clock_off_s=off * DAY_S)
                for off in (-2, 2, 0)
            ]
            for pool in pools:
                victim.end(pool)
            victim.call("fetch", str(victim.url), "--out", victim.directory)
        else:
            for off in (2, -2):
                pool = victim.start(*victim.run(), clock_off_s=off * DAY_S)
                _next_result(victim, pool)
                victim.remember()
                pool.kill()
                victim.end(pool)
        victim.remember()
        self.finish(victim, row)
        return row

    def moved(self, where: str) -> Row:
        row = Row("study moved between two commands", where, "0 failed of 6 runs")
        victim = self.victim(where)
        pool = self.under_way(victim)
        _next_result(victim, pool)
        pool.send_signal(signal.SIGINT)
        victim.end(pool)
        victim.remember()
        victim.directory = victim.directory.rename(victim.folder / "elsewhere")
        self.finish(victim, row)
        return row

    def deleted(self, where: str) -> Row:
        row = Row("run directory deleted by hand", where, "made again" if where == "journal" else "Nothing left to do")
        victim = self.victim(where)
        victim.call(*victim.run())
        shutil.rmtree(victim.directory / "runs" / min(victim.records()))
        victim.remember()
        if where == "journal":
            victim.call("status", victim.directory)
        self.finish(victim, row)
        return row

    def nan_at_once(self, where: str) -> Row:
        row = Row("NaN at step 0", where, "diverged")
        changes = {"parametrizations": {"sp": {"init": {"hidden_std": 1e30}}}}
        victim = self.victim(where, **changes)
        victim.call(*victim.run())
        victim.remember()
        self.finish(victim, row, quiet=dict.fromkeys(victim.seen))
        return row

    def exception(self, where: str) -> Row:
        """Training raises, as user code may, until its cause is away."""
        row = Row("exception in a run", where, "mutransfer retry")
        victim = self.victim(where)
        cause = victim.directory / "runs" / min(self.quiet) / "metrics.jsonl"
        cause.mkdir(parents=True)
        victim.call(*victim.run())
        victim.remember()
        cause.rmdir()
        victim.call("retry", victim.directory)
        self.finish(victim, row)
        return row


def small_files() -> None:
    heed_ctrl_c()
    # CPython ignores SIGXFSZ: a write beyond the limit is an error like that of a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[], object]]:
    """A file system of `size` at `folder`; the callable makes it large. Needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def _next_result(victim: Victim, pool: subprocess.Popen[str]) -> None:
    """Wait until one more run is finished, or all are."""
    had = len(victim.records())
    wait_for(lambda: len(victim.records()) > had or pool.poll() is not None)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            return


def _kill(process: int) -> bool:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def report(rounds: int = 10, seed: int = 0) -> None:
    """Print the table, a line as soon as it is known. rounds: kills of each kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user than root.
        os.environ["MUTRANSFER_CACHE"] = str(folder / "cache")
        with postgres(folder) as server:
            bench, rows = Bench(folder, server, seed), []
            for fault in _faults(bench, rounds):
                rows.append(fault().text())
                print(rows[-1], flush=True)
    # Once more as a whole: a killed server's log stands between the lines above.
    print(HEAD, *rows, sep="\n")


def _faults(bench: Bench, rounds: int) -> Iterator[Callable[[], Row]]:
    both = ("journal", "board")
    for where in both:
        yield lambda where=where: bench.killed_workers(where, rounds)
        yield lambda where=where: bench.killed_pools(where, rounds)
    yield lambda: bench.killed_servers(rounds)
    if os.geteuid() == 0:
        for where in both:
            yield lambda where=where: bench.full_disk_of_runs(where)
        yield bench.full_database
    yield bench.full_journal
    faults = (bench.ctrl_c, bench.two_drivers, bench.torn_metrics, bench.wrong_clocks, bench.moved, bench.deleted)
    for fault in (*faults, bench.nan_at_once, bench.exception):
        for where in both:
            yield lambda fault=fault, where=where: fault(where)
