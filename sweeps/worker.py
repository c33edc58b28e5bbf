"""One worker process of the pool: alive across runs, one thread each, trains what the driver sends.

The driver talks to Optuna; a worker only trains and answers over its pipe. It ends when the driver does, however that died.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scaling.config import RunConfig
from scaling.errors import Fault, Interrupted, UserError
from scaling.locks import file_lock
from scaling.records import RunRecord, run_directory, write_atomic
from sweeps.pruning import curves_in, watch_for
from sweeps.study import PruningConfig

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write that freeing space, or a larger limit, cures."""


@dataclass(frozen=True)
class Task:
    """A run for a worker, with what may end it early."""

    run: RunConfig
    pruning: PruningConfig
    finished: tuple[RunRecord, ...]
    """Finished runs of its cell (`sweeps.pruning.siblings`); their curves are in the study's directory."""


@dataclass(frozen=True)
class Started:
    """A worker is up and waits for runs."""


@dataclass(frozen=True)
class Finished:
    record: RunRecord
    overhead_s: float
    """Time between receiving the run and answering that was not spent in its training."""


@dataclass(frozen=True)
class Failed:
    run_id: str
    reason: str


@dataclass(frozen=True)
class Fatal:
    """No run can go on: disk full, corpus gone."""

    error: UserError


def worker_main(connection: Connection, study_dir: Path, data: dict[str, Any]) -> None:
    """Entry point of the process. `data` holds the arguments of scaling.data.prepare."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides.
    threading.Thread(target=_die_with_driver, daemon=True).start()
    try:
        # Imported here: the driver must have set the thread count before torch is loaded.
        from scaling.data import prepare
        from scaling.ranks import Team
        from scaling.train import train_run

        corpus, team = prepare(**data), Team()
        connection.send(Started())
        while True:
            task: Task | None = connection.recv()
            if task is None:
                team.end()
                return
            started, run = time.perf_counter(), task.run
            directory = run_directory(study_dir, run.run_id)
            try:
                # A worker of a driver killed a moment ago may still be in this run; wait for its end and take its record.
                with file_lock(directory / ".lock"):
                    watch = watch_for(task.pruning, run, curves_in(study_dir, task.finished))
                    record = train_run(run, directory, corpus, lambda progress: connection.send(progress), watch, team)
                wall_s = record.wall_s if record.resumed_from_step == 0 else 0.0
                connection.send(Finished(record, time.perf_counter() - started - wall_s))
            except UserError as error:
                connection.send(Fatal(error))
            except (EOFError, ConnectionError):
                raise  # The driver is gone.
            except Exception as error:
                if isinstance(error, OSError) and error.errno in NO_SPACE:
                    connection.send(Fatal(disk_full(directory)))
                    continue
                with contextlib.suppress(OSError):
                    write_atomic(directory / "error.txt", traceback.format_exc())
                connection.send(Failed(run.run_id, f"{type(error).__name__}: {error}"))
    except (EOFError, ConnectionError):
        return
    except UserError as error:
        connection.send(Fatal(error))


def disk_full(path: Path) -> Interrupted:
    cure = "free some space and type the same command again: finished runs are kept"
    return Interrupted(Fault(str(path), "no space left on the disk", cure))


def _die_with_driver() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
