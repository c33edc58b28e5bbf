"""The driver of a local pool: plan -> queue -> workers -> records, until nothing is left to do.

Owns the study's life on one machine. Killed at any moment, the next driver finds finished runs in their records and goes on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaling.errors import Fault, Interrupted, StudyError
from scaling.locks import driver_lock
from scaling.records import RunRecord, read_records
from sweeps.pinning import places, topology
from sweeps.plan import PlannedRun, make_plan, memory_of
from sweeps.pruning import siblings
from sweeps.study import StudyConfig
from sweeps.worker import NO_SPACE, Failed, Fatal, Finished, Started, Task, disk_full, worker_main

if TYPE_CHECKING:
    from scaling.train import Progress
    from sweeps.progress import Watcher
    from sweeps.queue import Claim, Queue

MAX_ATTEMPTS = 2
MAX_DEATHS = 6


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    place: int
    """Index of its cores and GPUs among those of the pool."""
    claim: Claim | None = None
    ready: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a study stands after the driver."""

    planned: int
    made: int
    """Runs finished by this driver."""
    complete: int
    diverged: int
    pruned: int
    """Runs ended before their last step."""
    failed: dict[str, str]
    """run_id -> reason, for runs out of attempts."""
    missing: int
    """Runs that are neither made nor failed."""
    wall_s: float
    run_wall_s: float
    """Sum over this driver's runs of the time spent in them."""
    overhead_s: tuple[float, ...] = field(default=(), repr=False)
    """For each run, what a living worker spent on it beyond training."""


class Driver:
    """Runs a study's plan on `jobs` worker processes."""

    def __init__(self, study_dir: Path, study: StudyConfig, jobs: int, watcher: Watcher, data: dict[str, Any]) -> None:
        from sweeps.queue import Queue

        self._dir, self._study, self._jobs, self._watcher, self._data = study_dir, study, jobs, watcher, data
        self._results: dict[str, RunRecord] = {record.run_id: record for record in read_records(study_dir)}
        self._queue: Queue = Queue(study_dir, study)
        self._memory = memory_of(study, study_dir)
        self._places = places(topology(study.runtime), jobs, study.runtime)
        self._workers: list[_Worker] = []
        self._plan: list[PlannedRun] = []
        self._runs: dict[str, PlannedRun] = {}
        self._overheads: list[float] = []
        self._made, self._run_wall_s, self._deaths = 0, 0.0, 0

    def run(self) -> Outcome:
        """Work until the plan is done. Raises Interrupted on Ctrl-C and StudyError when no run can go on."""
        started = time.perf_counter()
        self._queue.recover(self._results)
        self._replan()
        gone = [run_id for run_id in self._queue.without_record(self._results) if run_id in self._runs]
        if gone:
            self._watcher.note(f"made before, and without a record now (deleted?), so made again: {', '.join(gone[:5])}")
        self._queue.adopt(self._plan, self._results)
        try:
            with environment(thread_limits(self._study.runtime.threads)):
                self._work()
        except OSError:
            # The journal may end in half a line, which the next driver drops, with what was running: nothing must be written after it.
            self._stop(tell=False)
            raise
        finally:
            self._stop()
        planned = {planned.run_id for planned in self._plan}
        records = [record for run_id, record in self._results.items() if run_id in planned]
        failures = self._queue.failures(self._results)
        return Outcome(
            planned=len(planned),
            made=self._made,
            complete=sum(record.status == "complete" for record in records),
            diverged=sum(record.status == "diverged" for record in records),
            pruned=sum(record.status == "pruned" for record in records),
            failed={run_id: reason for run_id, reason in failures.items() if run_id in planned},
            missing=len([run_id for run_id in planned if run_id not in self._results and run_id not in failures]),
            wall_s=time.perf_counter() - started,
            run_wall_s=self._run_wall_s,
            overhead_s=tuple(self._overheads),
        )

    def _replan(self) -> None:
        self._plan = make_plan(self._study, self._results, self._memory)
        self._runs = {planned.run_id: planned for planned in self._plan}
        todo = [planned for planned in self._plan if planned.run_id not in self._results]
        self._queue.enqueue(todo, max_attempts=MAX_ATTEMPTS)
        self._watcher.planned(self._plan, self._results)

    def _work(self) -> None:
        order = {planned.run_id: rank for rank, planned in enumerate(self._plan)}
        while True:
            idle = [worker for worker in self._workers if worker.claim is None]
            for worker in idle:
                if worker.ready and not self._give(worker, order):
                    break
            busy = sum(worker.claim is not None for worker in self._workers)
            waiting = self._queue.waiting(order)
            if not waiting and not busy:
                return
            for _ in range(min(self._jobs - len(self._workers), waiting)):
                self._workers.append(self._spawn())
            if self._receive():
                self._replan()
                order = {planned.run_id: rank for rank, planned in enumerate(self._plan)}

    def _give(self, worker: _Worker, order: dict[str, int]) -> bool:
        claim = self._queue.claim(order)
        if claim is None:
            return False
        worker.claim = claim
        planned = self._runs[claim.run_id]
        self._watcher.started(planned)
        # A worker that died a moment ago is found, with its run, where messages are received.
        with contextlib.suppress(ConnectionError):
            pruning, made = self._study.pruning, (self._results[key] for key in self._runs if key in self._results)
            worker.connection.send(Task(planned.run, pruning, tuple(siblings(pruning, planned.run, made))))
        return True

    def _receive(self) -> bool:
        """Handle what workers say, or their death; return whether the plan may have changed."""
        changed = False
        by_handle: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers}
        for handle in wait(list(by_handle), timeout=1.0):
            worker = by_handle[handle]
            try:
                message = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                self._died(worker)
                changed = True
                continue
            changed |= self._handle(worker, message)
        self._watcher.tick()
        return changed

    def _handle(self, worker: _Worker, message: Started | Finished | Failed | Fatal | Progress) -> bool:
        if isinstance(message, Started):
            worker.ready = True
            return False
        if isinstance(message, Fatal):
            raise message.error
        if not isinstance(message, Finished | Failed):
            self._watcher.progress(message)
            return False
        claim = worker.claim
        assert claim is not None, "a worker answers only for the run it was given"
        worker.claim = None
        if isinstance(message, Failed):
            self._queue.fail(claim, message.reason)
            self._watcher.failed(self._runs[claim.run_id], message.reason)
            return True
        self._queue.finish(claim, message.record)
        self._results[claim.run_id] = message.record
        self._made += 1
        self._run_wall_s += message.record.wall_s
        self._overheads.append(message.overhead_s)
        self._watcher.finished(self._runs[claim.run_id], message.record)
        return True

    def _died(self, worker: _Worker) -> None:
        """A worker was killed: its run goes back to the queue, another worker takes its place."""
        worker.process.join(timeout=5)
        self._workers.remove(worker)
        self._deaths += 1
        code = worker.process.exitcode
        if worker.claim is None and self._deaths > 3 * self._jobs:
            raise StudyError(Fault("", f"workers end before they take a run (exit code {code})", "see their messages above"))
        if worker.claim is not None:
            reason = f"worker died (exit code {code}; -9 is SIGKILL, often the kernel's for memory)"
            # A kill is not the run's fault, until it happens to the same run again and again.
            deaths = self._queue.deaths(worker.claim.run_id)
            if deaths < MAX_DEATHS:
                self._queue.give_back(worker.claim)
            else:
                self._queue.fail(worker.claim, reason)
            self._watcher.failed(self._runs[worker.claim.run_id], reason)

    def _spawn(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=worker_main, args=(there, self._dir, self._data), daemon=True)
        taken = {worker.place for worker in self._workers}
        index = next(index for index in range(self._jobs) if index not in taken)
        place = self._places[index]
        with environment(place.environment):
            process.start()
        assert process.pid is not None, "a process that has been started has an id"
        place.bind(process.pid)
        there.close()
        return _Worker(process, here, index)

    def _stop(self, *, tell: bool = True) -> None:
        """End all workers; tell: give their runs back to the queue."""
        for worker in self._workers:
            if worker.claim is None and worker.ready:
                with contextlib.suppress(ConnectionError):
                    worker.connection.send(None)
            else:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(timeout=5)
            if worker.claim is not None and tell:
                self._queue.give_back(worker.claim)
        self._workers.clear()


def drive(study_dir: Path, study: StudyConfig, jobs: int, watcher: Watcher, data: dict[str, Any], command: str) -> Outcome:
    """Lock the study and run its driver; `command` is what to type to continue."""
    lock = driver_lock(study_dir)
    driver = None
    try:
        with watcher:
            driver = Driver(study_dir, study, jobs, watcher, data)
            return driver.run()
    except KeyboardInterrupt:
        finished = {record.run_id for record in read_records(study_dir)}
        plan = driver._plan if driver else []
        done = f"{sum(planned.run_id in finished for planned in plan)} of {len(plan)} runs are done and kept"
        raise Interrupted(Fault("", f"interrupted: {done}", f"to continue, type: {command}")) from None
    except OSError as error:
        if error.errno in NO_SPACE:
            raise disk_full(Path(error.filename or study_dir)) from None
        raise
    finally:
        lock.close()


def thread_limits(threads: int) -> dict[str, str]:
    """Environment of a worker: its math libraries read the number of threads when they are loaded."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """What processes that are started inside inherit."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
