"""The board: one study's runs in a database, where any number of workers on any number of machines take them from.

Owns the tables and every statement. A run is a row, named by study and run_id, so that it cannot be planned twice; it is taken by an update
that only one worker's succeeds in, kept by heartbeats in the database's own clock (the workers' clocks may be wrong), and finished once,
whoever is first. Small records and metrics are stored with it: the database alone is enough for an analysis.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import IntegrityError, OperationalError

from scaling.config import RunConfig
from scaling.errors import Fault, MissingExtra, StudyError
from scaling.locks import Busy, acquire
from scaling.records import RunRecord
from sweeps.plan import PlannedRun

MAX_ATTEMPTS = 2
MAX_DEATHS = 6
GRACE_S = 60.0
"""A run whose worker has been silent for as long is given to another one."""
CANDIDATES = 16
"""Waiting runs that a worker chooses among, so that many do not all reach for the same one."""
BATCH = 500

_meta = sa.MetaData()
# MySQL's TEXT ends at 64 KB, and its FLOAT knows the time to two minutes.
_LONG = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
_REAL = sa.Float(53)
_studies = sa.Table(
    "mutransfer_studies",
    _meta,
    sa.Column("study", sa.String(200), primary_key=True),
    sa.Column("config", _LONG, nullable=False),
)
_runs = sa.Table(
    "mutransfer_runs",
    _meta,
    sa.Column("study", sa.String(200), primary_key=True),
    sa.Column("run_id", sa.String(64), primary_key=True),
    sa.Column("state", sa.String(10), nullable=False),
    sa.Column("cost", _REAL, nullable=False),
    sa.Column("run", _LONG, nullable=False),
    sa.Column("owner", sa.String(200)),
    sa.Column("heartbeat", _REAL),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("deaths", sa.Integer, nullable=False),
    sa.Column("reason", _LONG),
    sa.Column("record", _LONG),
    sa.Column("metrics", _LONG),
    sa.Column("mirrored", sa.Integer, nullable=False),
    sa.Index("mutransfer_runs_state", "study", "state", "cost"),
)
CLOCKS = {
    "postgresql": "extract(epoch from clock_timestamp())",
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "mysql": "unix_timestamp(now(6))",
    "mariadb": "unix_timestamp(now(6))",
}


@dataclass(frozen=True)
class Claimed:
    """A run taken from the board by one worker."""

    run_id: str
    run: RunConfig


@dataclass(frozen=True)
class Counts:
    """Runs of a study by state."""

    waiting: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0

    @property
    def all(self) -> int:
        return self.waiting + self.running + self.done + self.failed

    @property
    def over(self) -> bool:
        return not self.waiting and not self.running


class Unreachable(StudyError):
    """The database does not answer: its URL is wrong, or it is away."""


class Board:
    """One study in the database at `url`."""

    def __init__(self, url: str, study: str, *, ping: bool = True) -> None:
        """Connect, and make the tables when there are none. Raises StudyError when the database cannot be used.

        ping: see before each use whether a connection outlived the server; a worker, which tries again anyway, saves the time.
        """
        self.url, self.study = url, study
        try:
            self._engine = sa.create_engine(with_driver(url), pool_pre_ping=ping, **_engine_options(url))
            clock = CLOCKS.get(self._engine.dialect.name)
            if clock is None:
                known = ", ".join(CLOCKS)
                raise StudyError(Fault(f"storage: {url}", f"{self._engine.dialect.name} is not supported", f"use one of {known}"))
            self._now = sa.literal_column(clock, sa.Float)
            self._create_tables()
        except ImportError as error:
            if url.startswith("postgres"):
                raise MissingExtra("psycopg[binary]", "postgres", f"storage: {url}") from None
            raise StudyError(Fault(f"storage: {url}", str(error), "install the database's driver")) from None
        except sa.exc.SQLAlchemyError as error:
            cure = "give a URL such as postgresql://user:password@host/name, or leave `storage` out"
            kind = Unreachable if isinstance(error, OperationalError) else StudyError
            raise kind(Fault(f"storage: {url}", f"cannot be opened: {str(error).splitlines()[0]}", cure)) from None

    def _create_tables(self) -> None:
        try:
            _meta.create_all(self._engine)
        except sa.exc.DBAPIError:
            # Another worker makes them at the same moment: then they are there.
            if not {table.name for table in _meta.sorted_tables} <= set(sa.inspect(self._engine).get_table_names()):
                raise

    def close(self) -> None:
        self._engine.dispose()

    # The study

    def names(self) -> list[str]:
        """Studies in this database."""
        with self._engine.begin() as connection:
            return list(connection.scalars(sa.select(_studies.c.study).order_by(_studies.c.study)))

    def config(self) -> dict[str, Any] | None:
        """The study's config as it was put on the board, or None."""
        with self._engine.begin() as connection:
            text = connection.scalar(sa.select(_studies.c.config).where(_studies.c.study == self.study))
        return None if text is None else dict(json.loads(text))

    def put_config(self, config: Mapping[str, Any]) -> None:
        """Enter the study, or take over what its config has become."""
        text = json.dumps(config)
        with self._engine.begin() as connection:
            found = connection.execute(sa.update(_studies).where(_studies.c.study == self.study).values(config=text))
        if not found.rowcount:
            try:
                with self._engine.begin() as connection:
                    connection.execute(sa.insert(_studies).values(study=self.study, config=text))
            except IntegrityError:
                self.put_config(config)

    # Planning

    @contextmanager
    def planning(self) -> Iterator[bool]:
        """Hold the study's planner lock, if nobody else does; the database lets go of it when its holder dies."""
        key = int.from_bytes(hashlib.sha256(self.study.encode()).digest()[:7], "big")
        if self._engine.dialect.name == "postgresql":
            with self._engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT")
                mine = bool(connection.scalar(sa.select(sa.func.pg_try_advisory_lock(key))))
                try:
                    yield mine
                finally:
                    if mine:
                        connection.execute(sa.select(sa.func.pg_advisory_unlock(key)))
            return
        if self._engine.dialect.name == "sqlite":
            path = Path(f"{self._engine.url.database}.{key:x}.lock")
            try:
                file = acquire(path, blocking=False)
            except Busy:
                yield False
                return
            try:
                yield True
            finally:
                file.close()
            return
        with self._engine.connect() as connection:
            mine = bool(connection.scalar(sa.select(sa.func.get_lock(f"mutransfer {key:x}", 0))))
            try:
                yield mine
            finally:
                if mine:
                    connection.execute(sa.select(sa.func.release_lock(f"mutransfer {key:x}")))

    def add(self, planned: Sequence[PlannedRun]) -> int:
        """Put runs on the board that are not there; return how many were new. Only for who holds the planner lock."""
        with self._engine.begin() as connection:
            there = set(connection.scalars(sa.select(_runs.c.run_id).where(_runs.c.study == self.study)))
            rows = [
                {
                    "study": self.study,
                    "run_id": item.run_id,
                    "state": "waiting",
                    "cost": item.flops,
                    "run": item.run.model_dump_json(),
                }
                | {"attempts": 0, "deaths": 0, "mirrored": 0}
                for item in planned
                if item.run_id not in there
            ]
            for start in range(0, len(rows), BATCH):
                connection.execute(sa.insert(_runs), rows[start : start + BATCH])
        return len(rows)

    def requeue_silent(self, grace_s: float = GRACE_S) -> list[str]:
        """Give the runs of silent workers back; a run that has cost MAX_DEATHS workers fails. Returns their names."""
        silent = sa.and_(
            _runs.c.study == self.study, _runs.c.state == "running", _runs.c.heartbeat < self._now - sa.literal(grace_s, sa.Float)
        )
        with self._engine.begin() as connection:
            run_ids = list(connection.scalars(sa.select(_runs.c.run_id).where(silent)))
        return [run_id for run_id in run_ids if self._cut_off(sa.and_(silent, _runs.c.run_id == run_id))]

    def release_of(self, host: str, pid: int) -> int:
        """Give back the runs of a worker process of this machine that is known to be dead."""
        return self._cut_off(self._held_by(host, pid))

    def _cut_off(self, which: sa.ColumnElement[bool]) -> int:
        worn = _runs.c.deaths + 1 >= MAX_DEATHS
        values = {
            "state": sa.case((worn, "failed"), else_="waiting"),
            "reason": sa.case(
                (worn, f"its worker died {MAX_DEATHS} times (often the kernel's SIGKILL, for memory)"), else_=_runs.c.reason
            ),
            "deaths": _runs.c.deaths + 1,
            "owner": None,
        }
        with self._engine.begin() as connection:
            return int(connection.execute(sa.update(_runs).where(which).values(**values)).rowcount)

    # Working

    def claim(self, owner: str) -> Claimed | None:
        """Take one of the most expensive waiting runs, or None when none waits."""
        while True:
            query = sa.select(_runs.c.run_id).where(_runs.c.study == self.study, _runs.c.state == "waiting")
            with self._engine.begin() as connection:
                waiting = list(connection.scalars(query.order_by(_runs.c.cost.desc(), _runs.c.run_id).limit(CANDIDATES)))
            if not waiting:
                return None
            # All of them are among the most expensive; each worker tries them in an order of its own.
            for run_id in random.sample(waiting, len(waiting)):
                run = self._take(run_id, owner)
                if run is not None:
                    return Claimed(run_id, RunConfig.model_validate_json(run))

    def _take(self, run_id: str, owner: str) -> str | None:
        """The run's config if it could be taken."""
        mine = sa.and_(_runs.c.study == self.study, _runs.c.run_id == run_id, _runs.c.state == "waiting")
        take = sa.update(_runs).where(mine).values(state="running", owner=owner, heartbeat=self._now)
        with self._engine.begin() as connection:
            if self._engine.dialect.update_returning:
                taken: str | None = connection.scalar(take.returning(_runs.c.run))
                return taken
            if not connection.execute(take).rowcount:
                return None
            own = sa.and_(_runs.c.study == self.study, _runs.c.run_id == run_id)
            found: str | None = connection.scalar(sa.select(_runs.c.run).where(own))
            return found

    def beat(self, owner: str) -> int:
        """Say that `owner` is alive; return how many runs it holds."""
        held = sa.and_(_runs.c.study == self.study, _runs.c.owner == owner, _runs.c.state == "running")
        with self._engine.begin() as connection:
            return int(connection.execute(sa.update(_runs).where(held).values(heartbeat=self._now)).rowcount)

    def finish(self, record: RunRecord, metrics: str) -> bool:
        """Store a run's result, once: False when it was there already."""
        open_ = sa.and_(_runs.c.study == self.study, _runs.c.run_id == record.run_id, _runs.c.state != "done")
        values = {"state": "done", "record": record.model_dump_json(), "metrics": metrics, "owner": None, "reason": None}
        with self._engine.begin() as connection:
            return bool(connection.execute(sa.update(_runs).where(open_).values(**values)).rowcount)

    def fail(self, run_id: str, owner: str, reason: str) -> None:
        """A run raised: it is tried again until it has no attempts left."""
        held = sa.and_(_runs.c.study == self.study, _runs.c.run_id == run_id, _runs.c.owner == owner, _runs.c.state == "running")
        last = _runs.c.attempts + 1 >= MAX_ATTEMPTS
        values = {
            "state": sa.case((last, "failed"), else_="waiting"),
            "attempts": _runs.c.attempts + 1,
            "reason": reason,
            "owner": None,
        }
        with self._engine.begin() as connection:
            connection.execute(sa.update(_runs).where(held).values(**values))

    def give_back(self, owner: str) -> None:
        """Return what `owner` holds, unfinished, without counting it against the run."""
        held = sa.and_(_runs.c.study == self.study, _runs.c.owner == owner, _runs.c.state == "running")
        with self._engine.begin() as connection:
            connection.execute(sa.update(_runs).where(held).values(state="waiting", owner=None))

    def give_back_of(self, host: str, pid: int) -> int:
        """Return what a worker process holds that was told to go, without counting it against the runs."""
        with self._engine.begin() as connection:
            returned = sa.update(_runs).where(self._held_by(host, pid)).values(state="waiting", owner=None)
            return int(connection.execute(returned).rowcount)

    def _held_by(self, host: str, pid: int) -> sa.ColumnElement[bool]:
        prefix = f"{host}:{pid}:"
        return sa.and_(_runs.c.study == self.study, _runs.c.state == "running", _runs.c.owner.startswith(prefix, autoescape=True))

    def retry_failed(self) -> int:
        """Put failed runs back, with all their attempts; return how many."""
        failed = sa.and_(_runs.c.study == self.study, _runs.c.state == "failed")
        with self._engine.begin() as connection:
            values = {"state": "waiting", "attempts": 0, "deaths": 0}
            return int(connection.execute(sa.update(_runs).where(failed).values(**values)).rowcount)

    # Reading

    def counts(self) -> Counts:
        query = sa.select(_runs.c.state, sa.func.count()).where(_runs.c.study == self.study).group_by(_runs.c.state)
        with self._engine.begin() as connection:
            return Counts(**{row[0]: row[1] for row in connection.execute(query)})

    def states(self) -> dict[str, str]:
        """run_id -> state."""
        query = sa.select(_runs.c.run_id, _runs.c.state).where(_runs.c.study == self.study)
        with self._engine.begin() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def failures(self) -> dict[str, str]:
        """run_id -> reason of runs that have failed for good."""
        query = sa.select(_runs.c.run_id, _runs.c.reason).where(_runs.c.study == self.study, _runs.c.state == "failed")
        with self._engine.begin() as connection:
            return {run_id: reason or "" for run_id, reason in connection.execute(query)}

    def results(self, known: Iterable[str] = ()) -> dict[str, tuple[RunRecord, str]]:
        """run_id -> record and metrics (JSON lines) of finished runs that are not `known`."""
        have = set(known)
        missing = [run_id for run_id, state in self.states().items() if state == "done" and run_id not in have]
        found: dict[str, tuple[RunRecord, str]] = {}
        for start in range(0, len(missing), BATCH):
            query = sa.select(_runs.c.run_id, _runs.c.record, _runs.c.metrics).where(
                _runs.c.study == self.study, _runs.c.run_id.in_(missing[start : start + BATCH]), _runs.c.state == "done"
            )
            with self._engine.begin() as connection:
                for run_id, record, metrics in connection.execute(query):
                    found[run_id] = RunRecord.model_validate_json(record), metrics or ""
        return found

    def metrics(self, run_ids: Sequence[str]) -> dict[str, str]:
        """run_id -> metrics (JSON lines) of finished runs."""
        found: dict[str, str] = {}
        for start in range(0, len(run_ids), BATCH):
            some = _runs.c.run_id.in_(run_ids[start : start + BATCH])
            query = sa.select(_runs.c.run_id, _runs.c.metrics).where(_runs.c.study == self.study, some, _runs.c.state == "done")
            with self._engine.begin() as connection:
                found |= {run_id: metrics or "" for run_id, metrics in connection.execute(query)}
        return found

    def unmirrored(self) -> list[RunRecord]:
        """Finished runs that are not in the Optuna study beside the board."""
        query = sa.select(_runs.c.record).where(_runs.c.study == self.study, _runs.c.state == "done", _runs.c.mirrored == 0)
        with self._engine.begin() as connection:
            return [RunRecord.model_validate_json(record) for record in connection.scalars(query)]

    def mark_mirrored(self, run_ids: Sequence[str]) -> None:
        with self._engine.begin() as connection:
            for start in range(0, len(run_ids), BATCH):
                some = _runs.c.run_id.in_(run_ids[start : start + BATCH])
                connection.execute(sa.update(_runs).where(_runs.c.study == self.study, some).values(mirrored=1))


def with_driver(url: str) -> str:
    """A PostgreSQL URL without a driver gets psycopg (3) where it is installed."""
    if url.startswith(("postgresql://", "postgres://")) and find_spec("psycopg") is not None:
        return f"postgresql+psycopg://{url.split('://', 1)[1]}"
    return url


def _engine_options(url: str) -> dict[str, Any]:
    """A worker needs a connection for itself, one for its heartbeat and one for the planner lock."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": 60}}
    return {"pool_size": 3, "max_overflow": 1}


__all__ = ["Board", "Claimed", "Counts", "Unreachable"]
