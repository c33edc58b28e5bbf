"""Workers that share a study through a database: take a run, train it, store it, plan what follows, until nothing is left.

Owns `work`, what one worker process does on any machine, and `run_pool`, several of them on this one. There is no driver: whoever is idle
takes the planner lock, gives back the runs of silent workers, and plans from the results. A database that is away is waited for while
the run goes on; a record is on the worker's disk before it is in the database, and a worker that starts again hands it in.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from scaling.errors import Fault, Interrupted, StudyError, UserError, program
from scaling.locks import file_lock
from scaling.records import RunRecord, Watch, metrics_rows, read_record, read_records, run_directory, write_atomic
from sweeps.board import GRACE_S, Board, Claimed, Unreachable, with_driver
from sweeps.driver import Outcome, thread_limits
from sweeps.pinning import Place, places, topology
from sweeps.plan import make_plan, memory_of
from sweeps.progress import loss_text
from sweeps.pruning import curve_of, siblings, watch_for
from sweeps.study_dir import Study
from sweeps.worker import NO_SPACE, disk_full

if TYPE_CHECKING:
    from scaling.config import RunConfig
    from scaling.data import Corpus
    from scaling.ranks import Team

BEAT_S = 10.0
POLL_S = 0.5
TEND_S = 30.0
"""A worker that always finds a run tends to the board as often."""
PATIENCE_S = 900.0
"""How long a database may be away before a worker gives up."""
START_S = 60.0
"""The same before a worker has begun, when it may be the URL that is wrong."""
RESPAWNS = 20
"""Worker processes of a pool that may die one after the other before it gives up."""
Value = TypeVar("Value")
Say = Callable[[str], None]


@dataclass
class Worker:
    """One worker's place in the fleet."""

    study: Study
    board: Board
    say: Say
    owner: str = field(default_factory=lambda: f"{platform.node()}:{os.getpid()}:{uuid.uuid4().hex[:8]}")
    made: int = 0
    results: dict[str, RunRecord] = field(default_factory=dict)
    grace_s: float = GRACE_S
    planned_from: int = -1
    """Number of results that the plan was last made from."""
    tended: float = field(default_factory=time.monotonic)

    def patiently(self, action: Callable[[], Value]) -> Value:
        """Do it, waiting for a database that is away. Raises StudyError after PATIENCE_S."""
        started, pause = time.monotonic(), 0.2
        while True:
            try:
                return action()
            except SQLAlchemyError as error:
                if time.monotonic() - started > PATIENCE_S:
                    what = f"the database has been away for {PATIENCE_S / 60:.0f} minutes: {str(error).splitlines()[0]}"
                    cure = "type the same command again once it is back: finished runs are kept"
                    raise StudyError(Fault(f"storage: {self.board.url}", what, cure)) from None
                if pause == 0.2:
                    self.say(f"the database does not answer, trying again: {str(error).splitlines()[0]}")
                time.sleep(pause)
                pause = min(2 * pause, 10.0)


def once_there(action: Callable[[], Value], say: Say) -> Value:
    """Do what opens a board, waiting START_S for a database that does not answer: a worker may start while it starts again, too."""
    started, said = time.monotonic(), False
    while True:
        try:
            return action()
        except Unreachable as error:
            if time.monotonic() - started > START_S:
                raise
            if not said:
                say(f"the database does not answer, trying again for {START_S:.0f} s: {error.faults[0].what}")
            said = True
            time.sleep(POLL_S)


def work(study: Study, say: Say, *, grace_s: float = GRACE_S) -> int:
    """Make runs of `study` until none is left anywhere; return how many this worker made.

    Raises StudyError when no run can go on here (disk full, wrong corpus, database gone).
    """
    from scaling.data import prepare
    from scaling.ranks import Team

    worker = Worker(study, once_there(lambda: board_of(study, ping=False), say), say, grace_s=grace_s)
    corpus = prepare(**study.data_arguments())
    worker.patiently(lambda: enter(study, worker.board))
    _hand_in(worker)
    with _heartbeat(worker), Team() as team:
        try:
            _loop(worker, corpus, team)
        except BaseException:
            with contextlib.suppress(SQLAlchemyError):
                worker.board.give_back(worker.owner)
            raise
    worker.board.close()
    return worker.made


def require_database(study: Study) -> str:
    """The URL of the study's database. Raises StudyError when it has none."""
    if study.config.storage is None:
        cure = "give the study a database: --set storage=postgresql://user@host/name; or `mutransfer run` for this machine alone"
        raise StudyError(Fault(str(study.directory), "has no database that workers could share", cure))
    return study.config.storage


def board_of(study: Study, *, ping: bool = True) -> Board:
    return Board(require_database(study), study.config.name, ping=ping)


def left_text(study: Study) -> str:
    """What is left of a study whose workers have ended: nothing, or failed runs and what to type."""
    board = board_of(study)
    failed = board.counts().failed
    board.close()
    if failed:
        where = study.directory
        return f"{failed} runs failed; why: {program()} status {where}; to make them again: {program()} retry {where}"
    return f"nothing is left to do in {study.directory}"


def enter(study: Study, board: Board) -> None:
    """Put the study on the board. Raises StudyError when the board has another study of that name."""
    from sweeps.study import StudyConfig
    from sweeps.study_dir import flatten

    stored, config = board.config(), study.config.model_dump(mode="json")
    if stored is not None:
        theirs, ours = flatten(StudyConfig.model_validate(stored).identity()), flatten(study.config.identity())
        different = [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]
        if different:
            shown = "; ".join(f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in different[:3])
            what = f"holds another study named {study.config.name!r} ({shown})"
            raise StudyError(Fault(f"storage: {board.url}", what, "give this study another `name`, or a database of its own"))
    if stored != config:
        board.put_config(config)


def _loop(worker: Worker, corpus: Corpus, team: Team) -> None:
    _tend(worker)
    while True:
        claimed = worker.patiently(lambda: worker.board.claim(worker.owner))
        if claimed is not None:
            _make(worker, claimed, corpus, team)
            if time.monotonic() - worker.tended > TEND_S:
                _tend(worker)
        elif _tend(worker):
            return
        else:
            time.sleep(POLL_S)


def _tend(worker: Worker) -> bool:
    """What whoever has time does for all, if nobody else is at it; returns whether the study is over.

    Silent workers' runs go back, results lead to further runs, finished runs go into the Optuna study.
    """

    def once() -> bool:
        worker.tended = time.monotonic()
        with worker.board.planning() as mine:
            if not mine:
                return False
            for run_id in worker.board.requeue_silent(worker.grace_s):
                worker.say(f"run {run_id}: its worker has been silent for {worker.grace_s:.0f} s; it is made again")
            # Counted before the results are read: a run that ends in between may lead to others.
            counts = worker.board.counts()
            worker.results |= {run_id: record for run_id, (record, _) in worker.board.results(worker.results).items()}
            new = 0
            if len(worker.results) != worker.planned_from:
                memory = memory_of(worker.study.config, worker.study.directory)
                new = worker.board.add(make_plan(worker.study.config, worker.results, memory))
                worker.planned_from = len(worker.results)
            if new:
                worker.say(f"{new} runs planned")
            mirror(worker.board)
            return counts.over and not new

    return worker.patiently(once)


def _make(worker: Worker, claimed: Claimed, corpus: Corpus, team: Team) -> None:
    """Train one run here and store it."""
    from scaling.train import train_run

    directory = run_directory(worker.study.directory, claimed.run_id)
    # Threads, device and checkpoints are this machine's.
    run = claimed.run.model_copy(update={"runtime": worker.study.config.runtime})
    try:
        with file_lock(directory / ".lock"):
            record = train_run(run, directory, corpus, watch=_watch(worker, run), team=team)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise disk_full(directory) from None
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            write_atomic(directory / "error.txt", traceback.format_exc())
        worker.patiently(lambda: worker.board.fail(claimed.run_id, worker.owner, reason))
        worker.say(f"FAILED {claimed.run_id}: {reason}")
        return
    _store(worker, record)
    worker.made += 1
    worker.say(
        f"{record.parametrization} width {record.width} lr 2^{record.log2_lr:g} seed {record.seed}: "
        f"{loss_text(record)} in {record.wall_s:.1f}s"
    )


def _watch(worker: Worker, run: RunConfig) -> Watch | None:
    """What may end the run early, by the curves of its cell's runs that the board has by now."""
    pruning = worker.study.config.pruning
    if pruning.kind == "none":
        return None
    found = worker.patiently(lambda: worker.board.results(worker.results))
    worker.results |= {run_id: record for run_id, (record, _) in found.items()}
    mine = siblings(pruning, run, worker.results.values())
    metrics = worker.patiently(lambda: worker.board.metrics([record.run_id for record in mine]))
    return watch_for(pruning, run, [curve_of(record, metrics_rows(metrics[record.run_id])) for record in mine])


def _store(worker: Worker, record: RunRecord) -> None:
    metrics = run_directory(worker.study.directory, record.run_id) / "metrics.jsonl"
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    worker.patiently(lambda: worker.board.finish(record, text))
    worker.results[record.run_id] = record


def _hand_in(worker: Worker) -> None:
    """Store records that are on this disk and not on the board: their worker was killed between the two, or the board is younger."""
    local = {record.run_id: record for record in read_records(worker.study.directory)}
    if not local:
        return
    states = worker.patiently(worker.board.states)
    late = [item for item in make_plan(worker.study.config, local) if item.run_id in local and item.run_id not in states]
    while late:
        with worker.board.planning() as mine:
            if mine:
                worker.board.add(late)
                states |= dict.fromkeys((item.run_id for item in late), "waiting")
                break
        time.sleep(0.1)
    for run_id, record in local.items():
        if states.get(run_id, "done") != "done":
            _store(worker, record)


def hand_in(study: Study, say: Say) -> None:
    """Store the finished runs of the study's directory on its board, as a worker that starts does."""
    worker = Worker(study, board_of(study), say)
    worker.patiently(lambda: enter(study, worker.board))
    _hand_in(worker)
    worker.board.close()


def mirror(board: Board) -> int:
    """Enter finished runs as trials of the Optuna study of the same name, for optuna-dashboard; each once. Under the planner lock."""
    import optuna

    from sweeps.queue import optuna_trial

    pending = board.unmirrored()
    if not pending:
        return 0
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(with_driver(board.url), engine_kwargs={"pool_pre_ping": True})
    try:
        study = optuna.create_study(study_name=board.study, storage=storage, direction="minimize", load_if_exists=True)
        there = {trial.user_attrs.get("run_id") for trial in study.get_trials(deepcopy=False)}
        for record in pending:
            if record.run_id not in there:
                study.add_trial(optuna_trial(record))
    finally:
        storage.remove_session()
        storage.engine.dispose()
    board.mark_mirrored([record.run_id for record in pending])
    return len(pending)


@contextmanager
def _heartbeat(worker: Worker) -> Iterator[None]:
    """Say every few seconds that this worker is alive, from a thread of its own."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(min(BEAT_S, worker.grace_s / 4)):
            # A database that is away is waited for by the worker itself.
            with contextlib.suppress(SQLAlchemyError):
                worker.board.beat(worker.owner)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def pull(study: Study) -> int:
    """Bring the board's records and metrics into the study's directory, so that all commands read them there; return how many were new."""
    board = board_of(study)
    try:
        known = {path.parent.name for path in (study.directory / "runs").glob("*/record.json")}
        found = board.results(known)
        for run_id, (record, metrics) in found.items():
            directory = run_directory(study.directory, run_id)
            if read_record(directory) is None:
                write_atomic(directory / "metrics.jsonl", metrics)
                write_atomic(directory / "record.json", record.model_dump_json(indent=1) + "\n")
        return len(found)
    finally:
        board.close()


def run_pool(study: Study, jobs: int, say: Say, command: str) -> int:
    """`jobs` workers on this machine; one that is killed is replaced, its run given back at once. Returns 0, or 1 if runs failed."""
    board = board_of(study)
    enter(study, board)
    deaths = 0
    workers: dict[subprocess.Popen[bytes], Place] = {}
    try:
        # A worker loads torch before it sees that nothing is left.
        over = _tend(Worker(study, board, say))
        for place in [] if over else places(topology(study.config.runtime), jobs, study.config.runtime):
            workers[_spawn(study, place)] = place
        while workers:
            time.sleep(0.2)
            for process in [item for item in workers if item.poll() is not None]:
                place = workers.pop(process)
                if process.returncode > 0:
                    # A full disk is nobody's wrong use: the worker's exit code is the pool's.
                    kind = Interrupted if process.returncode == Interrupted.exit_code else StudyError
                    raise kind(Fault(str(study.directory), "a worker gave up", "see its message above"))
                if process.returncode == 0:
                    continue
                deaths += 1
                say(f"a worker died (signal {-process.returncode}); another one takes its place")
                with contextlib.suppress(SQLAlchemyError):
                    board.release_of(platform.node(), process.pid)
                if deaths > RESPAWNS:
                    raise StudyError(Fault(str(study.directory), f"{deaths} workers died", "see their messages above"))
                workers[_spawn(study, place)] = place
    except KeyboardInterrupt:
        done = "what is done is kept"
        with contextlib.suppress(SQLAlchemyError):
            counts = board.counts()
            done = f"{counts.done} of {counts.all} runs are done and kept"
        raise Interrupted(Fault("", f"interrupted: {done}", f"to continue, type: {command}")) from None
    finally:
        for process in workers:
            process.terminate()
        for process in workers:
            process.wait(timeout=30)
        with contextlib.suppress(SQLAlchemyError):
            for process in workers:
                board.release_of(platform.node(), process.pid)
    failed = board.failures()
    board.close()
    return 1 if failed else 0


def drive_shared(study: Study, jobs: int, say: Say, command: str) -> Outcome:
    """What `run` does for a study in a database: a pool of workers here, then all results brought here."""
    started = time.perf_counter()
    board = board_of(study)
    enter(study, board)
    before = board.counts().done
    run_pool(study, jobs, say, command)
    pull(study)
    results = {record.run_id: record for record in read_records(study.directory)}
    plan = make_plan(study.config, results, memory_of(study.config, study.directory))
    records = [results[item.run_id] for item in plan if item.run_id in results]
    made, failures = board.counts().done - before, board.failures()
    board.close()
    return Outcome(
        planned=len(plan),
        made=made,
        complete=sum(record.status == "complete" for record in records),
        diverged=sum(record.status == "diverged" for record in records),
        pruned=sum(record.status == "pruned" for record in records),
        failed={item.run_id: failures[item.run_id] for item in plan if item.run_id in failures},
        missing=sum(item.run_id not in results and item.run_id not in failures for item in plan),
        wall_s=time.perf_counter() - started,
        run_wall_s=sum(record.wall_s for record in records),
    )


def _spawn(study: Study, place: Place) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", "sweeps.cli", "worker", str(study.directory)]
    variables = os.environ | thread_limits(study.config.runtime.threads) | place.environment
    process = subprocess.Popen(arguments, env=variables, stdin=subprocess.DEVNULL)
    place.bind(process.pid)
    return process


def study_at(url: str, name: str | None, out: Path | None) -> Study:
    """A study that another machine put into the database at `url`; its directory here is made. Raises StudyError when there is none."""
    from sweeps.study import StudyConfig
    from sweeps.study_dir import STUDIES, write_study

    board = Board(url, name or "")
    names = board.names()
    chosen = name or (names[0] if len(names) == 1 else None)
    if chosen is None or chosen not in names:
        has = f"holds {', '.join(names)}" if names else "holds no study"
        raise StudyError(
            Fault(f"storage: {url}", has, "give one of them: --name NAME" if names else "start one with `mutransfer run`")
        )
    board.study = chosen
    stored = board.config()
    board.close()
    assert stored is not None, "a study on the board has its config there"
    config = StudyConfig.model_validate(stored | {"storage": url})
    directory = out or STUDIES / chosen
    return write_study(directory, config)
