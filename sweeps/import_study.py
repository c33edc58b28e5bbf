"""Finished runs of another study directory, or of a study in a database, taken over into a study here.

Owns which of them belong here, and why others do not. A run's metrics and config are in place before its record is: an import that is
cut off leaves no half run, and typing it again goes on. What is here already is never replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from scaling.config import RunConfig
from scaling.errors import Fault, StudyError, UserError
from scaling.locks import driver_lock
from scaling.records import RunRecord, read_record, read_records, run_directory, write_atomic, write_record
from sweeps.study import StudyConfig
from sweeps.study_dir import Study, flatten

MACHINE = ("runtime.", "data.paths", "data.train_bin", "data.validation_bin", "data.sha256")
"""Keys of a run's config that may differ between machines."""
SHOWN_KEYS = 3


@dataclass(frozen=True)
class Found:
    """A finished run elsewhere, with the text of its metrics and, where it was kept, of its config."""

    record: RunRecord
    metrics: str
    config: str | None


@dataclass
class TakenOver:
    """What became of the runs of another place."""

    taken: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    """Here already, with the same loss."""
    other_loss: list[tuple[str, float | None, float | None]] = field(default_factory=list)
    """(run_id, loss here, loss there): here already with another loss; ours is kept."""
    strangers: dict[str, str] = field(default_factory=dict)
    """run_id -> why it is no run of this study."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Directory -> what is wrong with its record."""


def take_over(place: str, study: Study, name: str | None = None) -> TakenOver:
    """Copy the finished runs at `place` (a directory, or a database's URL) that belong to `study` into its directory.

    name: of the study in the database; default this study's. Raises StudyError when nothing is there or a driver works on `study`.
    """
    result = TakenOver()
    found = list(_on_board(place, name or study.config.name) if "://" in place else _in_directory(place, study, result))
    lock = driver_lock(study.directory)
    try:
        ours = {record.run_id: record for record in read_records(study.directory)}
        for run in found:
            _take(run, study, ours, result)
    finally:
        lock.close()
    return result


def _take(run: Found, study: Study, ours: dict[str, RunRecord], result: TakenOver) -> None:
    record = run.record
    here = ours.get(record.run_id)
    if here is not None:
        if (here.status, here.loss) == (record.status, record.loss):
            result.known.append(record.run_id)
        else:
            result.other_loss.append((record.run_id, here.loss, record.loss))
        return
    if not study.config.owns(record):
        result.strangers[record.run_id] = _why_not(study.config, record, _config_of(run))
        return
    directory = run_directory(study.directory, record.run_id)
    write_atomic(directory / "metrics.jsonl", run.metrics)
    if run.config is not None:
        write_atomic(directory / "config.yaml", run.config)
    write_record(directory, record)
    ours[record.run_id] = record
    result.taken.append(record.run_id)


def _in_directory(place: str, study: Study, result: TakenOver) -> Iterator[Found]:
    """The finished runs under `place`/runs, or in `place` where that is such a folder; damaged records are noted in `result`."""
    folder = Path(place)
    if not folder.is_dir():
        cure = "give another study's directory, or the URL of its database"
        raise StudyError(Fault(place, "is no directory", cure))
    if folder.resolve() in (study.directory.resolve(), (study.directory / "runs").resolve()):
        raise StudyError(Fault(place, "is this study itself", "give the directory of the other one"))
    runs = folder / "runs" if (folder / "runs").is_dir() else folder
    directories = sorted(path.parent for path in runs.glob("*/record.json"))
    if not directories:
        raise StudyError(Fault(place, "holds no finished run (runs/*/record.json)", "give a study's directory"))
    for directory in directories:
        try:
            record = read_record(directory)
        except StudyError as error:
            result.damaged[str(directory)] = error.faults[0].what
            continue
        if record is not None:
            yield Found(record, _text(directory / "metrics.jsonl") or "", _text(directory / "config.yaml"))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _on_board(url: str, name: str) -> Iterator[Found]:
    """The finished runs of the study `name` in a database. Raises StudyError when it holds none of that name."""
    import sqlalchemy as sa

    from sweeps.board import Board, with_driver

    if url.startswith("sqlite:") and not Path(url.partition(":///")[2]).is_file():
        raise StudyError(Fault(url, "no such file", "give the URL of a study's database"))
    try:
        engine = sa.create_engine(with_driver(url))
        there = sa.inspect(engine).has_table("mutransfer_runs")
        engine.dispose()
    except (sa.exc.SQLAlchemyError, ImportError) as error:
        cure = "give a URL such as postgresql://user:password@host/name"
        raise StudyError(Fault(_without_password(url), f"cannot be opened: {str(error).splitlines()[0]}", cure)) from None
    if not there:
        raise StudyError(Fault(_without_password(url), "holds no study of mutransfer", "give the URL of a study's database"))
    board = Board(url, name)
    try:
        names = board.names()
        if name not in names:
            cure = f"name one of them: --name {names[0]}" if names else "give the URL of a study's database"
            raise StudyError(
                Fault(_without_password(url), f"holds no study {name!r}; it holds: {', '.join(names) or 'none'}", cure)
            )
        for record, metrics in board.results().values():
            yield Found(record, metrics, None)
    finally:
        board.close()


def _without_password(url: str) -> str:
    import sqlalchemy as sa

    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return url


def _config_of(run: Found) -> RunConfig | None:
    """The run's config where it can be read: it serves only to say what differs."""
    import yaml

    if run.config is None:
        return None
    try:
        return RunConfig.model_validate(yaml.safe_load(run.config))
    except (ValidationError, ValueError, yaml.YAMLError):
        return None


def _why_not(config: StudyConfig, record: RunRecord, theirs: RunConfig | None) -> str:
    """Why `config.owns(record)` is false, in words."""
    kind = next((kind for kind in config.parametrizations if kind == record.parametrization), None)
    if kind is None:
        return f"parametrization {record.parametrization}; this study has {', '.join(config.parametrizations)}"
    if record.seed != record.data_seed:
        return f"seed {record.seed} with data_seed {record.data_seed}; this study's are one"
    reason = config.model.check_width(record.width)
    if reason:
        return reason
    if config.data.sha256 not in (None, record.data_sha256):
        return "another corpus (its SHA-256 differs)"
    try:
        ours = config.run(kind, record.width, record.log2_lr, record.seed)
    except (ValidationError, UserError):
        return "its settings cannot be those of a run of this study"
    if theirs is None:
        return "other settings (its config.yaml is not there, so that they cannot be named)"
    here, there = flatten(ours.model_dump(mode="json")), flatten(theirs.model_dump(mode="json"))
    differ = [
        f"{key} {there.get(key)!r}, here {here.get(key)!r}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key) and not key.startswith(MACHINE) and key != "optimizer.lr"
    ]
    more = f", and {len(differ) - SHOWN_KEYS} more" if len(differ) > SHOWN_KEYS else ""
    return "; ".join(differ[:SHOWN_KEYS]) + more if differ else "its record does not fit its config"
