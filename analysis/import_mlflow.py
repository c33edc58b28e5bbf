"""Runs from MLflow: a folder of its file store (`mlruns`) or the URL of its database, read through the mlflow package.

Names keep MLflow's parts: params.NAME, metrics.NAME, tags.NAME. Deleted runs are not read, and counted. Nothing is written: a database that
is not MLflow's is refused before MLflow, which would make its tables in it, is asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from analysis.import_runs import Curve, ForeignRun, Source, number
from scaling.errors import DataError, Fault, MissingExtra

PAGE = 1000
ALLOW = "MLFLOW_ALLOW_FILE_STORE"
"""MLflow 3.6 and later refuse a file store without it."""


def is_file_store(place: Path) -> bool:
    """Whether a folder is MLflow's: experiments in it, each with a meta.yaml."""
    return any(path.parent.parent == place for path in place.glob("*/meta.yaml"))


def read_mlflow(place: str) -> Source:
    """Every run that is not deleted, of every experiment. Raises MissingExtra, or DataError in MLflow's words."""
    database = place.startswith("sqlite:")
    if database:
        _require_mlflow_tables(place)
    where = re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", place)
    uri = place if "://" in place else Path(place).resolve().as_uri()
    with _quiet():
        try:
            from mlflow.entities import ViewType
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise MissingExtra("mlflow-skinny", "tracking", f"reading {place}") from None
        runs: list[ForeignRun] = []
        deleted = 0
        try:
            client = MlflowClient(tracking_uri=uri)
            for experiment in _pages(client.search_experiments, view_type=ViewType.ALL):
                ids = [experiment.experiment_id]
                for run in _pages(client.search_runs, experiment_ids=ids, run_view_type=ViewType.ALL):
                    if run.info.lifecycle_stage == "deleted" or experiment.lifecycle_stage == "deleted":
                        deleted += 1
                    else:
                        runs.append(_run(client, run, experiment.name))
        except (MlflowException, OSError, ValueError) as error:
            cure = "give a folder that MLflow wrote (mlruns), or the URL of its database; an old database: mlflow db upgrade URL"
            raise DataError(Fault(where, f"MLflow cannot read it: {str(error).splitlines()[0]}", cure)) from None
    notes = (f"{deleted} deleted runs are not read",) if deleted else ()
    return Source(where, "MLflow database" if "://" in place else "MLflow file store", tuple(runs), (), notes)


def _pages(search: Any, **arguments: Any) -> Iterator[Any]:
    """Every result of a paged search."""
    token = None
    while True:
        page = search(max_results=PAGE, page_token=token, **arguments)
        yield from page
        token = page.token
        if not token:
            return


def _run(client: Any, run: Any, experiment: str) -> ForeignRun:
    run_id = run.info.run_id

    def curve(name: str) -> Curve:
        key = name.removeprefix("metrics.")
        if key not in run.data.metrics:
            return []
        with _quiet():
            history = client.get_metric_history(run_id, key)
        return [
            (number(point.step), number(point.value))
            for point in sorted(history, key=lambda point: (point.step, point.timestamp))
        ]

    config = {f"params.{key}": value for key, value in run.data.params.items()}
    metrics = {f"metrics.{key}": value for key, value in run.data.metrics.items()}
    info = {f"tags.{key}": value for key, value in run.data.tags.items()} | {"experiment": experiment}
    return ForeignRun(run_id, config, metrics, run.info.status, run.info.run_name or "", info, curve)


def _require_mlflow_tables(url: str) -> None:
    """Raise DataError for a SQLite file that is absent or another program's."""
    path = Path(unquote(url.partition(":///")[2]))
    cure = "give the URL of MLflow's database: sqlite:///relative/path.db or sqlite:////absolute/path.db"
    if not path.is_file():
        raise DataError(Fault(url, f"{path}: no such file", cure))
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        with contextlib.closing(connection):
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise DataError(Fault(url, f"is no SQLite database: {error}", cure)) from None
    if not {"runs", "params", "latest_metrics"} <= tables:
        raise DataError(Fault(url, "is not MLflow's database: it has no tables runs, params and latest_metrics", cure))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """MLflow without its log lines and warnings about itself, and willing to read a file store."""
    before = os.environ.get(ALLOW)
    os.environ[ALLOW] = "true"
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            os.environ.pop(ALLOW, None)
        else:
            os.environ[ALLOW] = before
