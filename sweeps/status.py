"""How a study stands: per cell, runs expected, complete, diverged, pruned, failed and missing, and the exact next command."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scaling.errors import program
from scaling.locks import Busy, file_lock
from scaling.records import RunRecord, read_records
from sweeps import journal
from sweeps.axes import describe
from sweeps.plan import PlannedRun, make_plan, memory_of, searched_cells
from sweeps.plan_table import render
from sweeps.progress import TIME_EXPONENT, duration
from sweeps.study_dir import Study

if TYPE_CHECKING:
    from sweeps.search_memory import SearchMemory

_CellKey = tuple[str, int, str]
"""Parametrization, width, and PlannedRun.place."""


def status_document(study: Study) -> dict[str, Any]:
    """Counts a cell and in all. Running runs are counted only while a driver holds the study."""
    if study.config.storage is not None:
        from sweeps.fleet import pull

        pull(study)
    results = {record.run_id: record for record in read_records(study.directory)}
    memory = memory_of(study.config, study.directory)
    plan = make_plan(study.config, results, memory)
    active = _driver_is_alive(study)
    gone: list[str] = []
    if study.config.storage is not None:
        active, failures, running = _on_board(study)
    else:
        failures, running, gone = _in_journal(study, results)
        running = running if active else set()
    cells: dict[_CellKey, list[PlannedRun]] = {}
    for planned in sorted(plan, key=lambda planned: (planned.parametrization, planned.width, planned.place)):
        cells.setdefault((planned.parametrization, planned.width, planned.place), []).append(planned)
    searched = _searched(study, results, memory)
    rows = [
        _cell_row(kind, width, runs, results, failures, running) | {"axis": place, "search": searched.get((kind, width, place))}
        for (kind, width, place), runs in cells.items()
    ]
    failed = [
        {"run_id": planned.run_id, "parametrization": planned.parametrization, "width": planned.width}
        | {"axis": describe(planned.at)}
        | {"log2_lr": planned.log2_lr, "seed": planned.seed, "reason": failures[planned.run_id]}
        | {"log": _last_lines(study, planned.run_id)}
        for planned in plan
        if planned.run_id in failures
    ]
    missing = sum(row["missing"] for row in rows)
    return {
        "study": str(study.directory),
        "driver_running": active,
        "cells": rows,
        "total": len(plan),
        "done": sum(row["complete"] + row["diverged"] + row["pruned"] for row in rows),
        "flops_spent": sum(_spent(planned, results[planned.run_id]) for planned in plan if planned.run_id in results),
        "flops_left": sum(planned.flops for planned in plan if planned.run_id not in results and planned.run_id not in failures),
        "wall_s_left": _wall_s_left(plan, results, failures),
        "failed": failed,
        "record_gone": [planned.run_id for planned in plan if planned.run_id in gone],
        "missing": missing,
        "finished": not missing and not failed,
        "next": _next_command(study, active, missing, bool(failed)),
    }


def _searched(study: Study, results: Mapping[str, RunRecord], memory: SearchMemory | None) -> dict[_CellKey, dict[str, Any]]:
    """Cell -> how its search stands: why it is done, or that it is not, and half the 90 % interval it ended with."""
    found: dict[_CellKey, dict[str, Any]] = {}
    for kind in study.config.parametrizations:
        for cell in searched_cells(study.config, kind, results, memory):
            done = cell.done
            half_width = None if done is None or done.half_width != done.half_width else done.half_width
            place = f"{cell.line} line" if cell.line else describe(cell.at)
            found[kind, cell.width, place] = {"stop": None if done is None else done.stop, "half_width": half_width}
    return found


def _spent(planned: PlannedRun, record: RunRecord) -> float:
    """FLOPs of a finished run, those of the steps that it made."""
    return planned.flops * record.steps_done / record.steps


def _last_lines(study: Study, run_id: str, lines: int = 3) -> list[str]:
    """The end of a failed run's traceback, where it was written here."""
    path = study.directory / "runs" / run_id / "error.txt"
    return path.read_text(encoding="utf-8").splitlines()[-lines:] if path.is_file() else []


def _wall_s_left(plan: list[PlannedRun], results: Mapping[str, RunRecord], failures: Mapping[str, str]) -> float | None:
    """Seconds of training left on one worker, from the runs of each cost that are done; None before any is."""
    times: dict[float, list[float]] = {}
    for planned in plan:
        record = results.get(planned.run_id)
        if record is not None and record.status == "complete":
            times.setdefault(planned.flops, []).append(record.wall_s)
    left = [planned.flops for planned in plan if planned.run_id not in results and planned.run_id not in failures]
    if not times:
        return None if left else 0.0

    def seconds(flops: float) -> float:
        near = min(times, key=lambda known: abs(math.log(known / flops)))
        growth: float = (flops / near) ** TIME_EXPONENT
        return sum(times[near]) / len(times[near]) * growth

    return sum(map(seconds, left))


def _on_board(study: Study) -> tuple[bool, dict[str, str], set[str]]:
    """Whether workers are at it, failures, and running runs of a study in a database."""
    from sweeps.fleet import board_of

    board = board_of(study)
    running = {run_id for run_id, state in board.states().items() if state == "running"}
    failures = board.failures()
    board.close()
    return bool(running), failures, running


def _in_journal(study: Study, results: Mapping[str, RunRecord]) -> tuple[dict[str, str], set[str], list[str]]:
    """Failures, runs that a driver took, and runs that have lost their record, of a study on this machine; nothing is written."""
    try:
        trials = journal.read_journal(study.directory / journal.JOURNAL_NAME)
        return journal.failures(trials, results), journal.running(trials), journal.without_record(trials, results)
    except (ValueError, KeyError, IsADirectoryError):
        # Damaged, or written by an Optuna whose journal is another one: Optuna knows which.
        from sweeps.queue import Queue

        queue = Queue(study.directory, study.config)
        return queue.failures(results), queue.running(), queue.without_record(results)
    except PermissionError:  # Somebody else's study: the records say what is finished.
        return {}, set(), []


def _next_command(study: Study, active: bool, missing: int, failed: bool) -> str | None:
    if active:
        return f"{program()} status {study.directory}   (a driver is at work)"
    if missing or failed:
        return f"{program()} {'study' if missing else 'retry'} {study.directory}"
    report = study.directory / "report.html"
    if report.exists() and report.stat().st_mtime_ns >= _last_record_ns(study):
        return None
    return f"{program()} report {study.directory}"


def _last_record_ns(study: Study) -> int:
    runs = study.directory / "runs"
    return max(map(_modified_ns, runs.iterdir()), default=0) if runs.is_dir() else 0


def _modified_ns(run: Path) -> int:
    try:
        return (run / "record.json").stat().st_mtime_ns
    except OSError:  # A run that is not finished.
        return 0


def _cell_row(
    kind: str,
    width: int,
    runs: list[PlannedRun],
    results: Mapping[str, RunRecord],
    failures: Mapping[str, str],
    running: set[str],
) -> dict[str, Any]:
    records = [results[planned.run_id] for planned in runs if planned.run_id in results]
    complete = [record for record in records if record.loss is not None]
    best = min(complete, key=lambda record: record.loss or 0.0, default=None)
    failed = sum(planned.run_id in failures for planned in runs)
    return {
        "parametrization": kind,
        "width": width,
        "expected": len(runs),
        "complete": len(complete),
        "diverged": sum(record.status == "diverged" for record in records),
        "pruned": sum(record.status == "pruned" for record in records),
        "running": sum(planned.run_id in running for planned in runs),
        "failed": failed,
        "missing": len(runs) - len(records) - failed,
        "best_log2_lr": best.log2_lr if best else None,
        "best_loss": best.loss if best else None,
    }


def _driver_is_alive(study: Study) -> bool:
    try:
        with file_lock(study.directory / ".driver.lock", blocking=False):
            return False
    except Busy:
        return True
    except OSError:
        return False


def status_text(document: Mapping[str, Any]) -> str:
    names = ("expected", "complete", "diverged", "pruned", "running", "failed", "missing")
    searched = any(row["search"] is not None for row in document["cells"])
    varied = any(row["axis"] for row in document["cells"])
    head = (
        "param.",
        "width",
        *(["axis"] if varied else []),
        *names,
        "best log2 LR",
        "best loss",
        *(["search"] if searched else []),
    )
    table = Table(*head, box=None, header_style="bold", pad_edge=False)
    for row in document["cells"]:
        best = ("", "") if row["best_loss"] is None else (f"{row['best_log2_lr']:g}", f"{row['best_loss']:.4f}")
        search = [_search_text(row["search"])] if searched else []
        axis = [row["axis"]] if varied else []
        table.add_row(row["parametrization"], str(row["width"]), *axis, *(str(row[name]) for name in names), *best, *search)
    done = f"{document['done']} of {document['total']} runs done, {document['flops_spent']:.3g} FLOPs spent"
    if document["missing"]:
        left = document["wall_s_left"]
        done += f", {document['flops_left']:.3g} left" + (f": about {duration(left)} on one worker" if left is not None else "")
    lines = [render(table, 160 if varied else 130), "", f"{done}."]
    for row in document["failed"]:
        lines += [f"failed {row['run_id']}: {row['reason']}", *(f"    {line}" for line in row["log"])]
    if document["record_gone"]:
        gone = ", ".join(document["record_gone"][:5])
        lines.append(f"made before, and without a record now (deleted?), to be made again: {gone}")
    report = f"nothing is left to do; the report: {document['study']}/report.html"
    if searched and document["missing"] == 0 and any(row["search"]["stop"] is None for row in document["cells"]):
        lines.append("more runs will be planned from the results so far")
    return "\n".join([*lines, f"next: {document['next']}" if document["next"] else report])


def _search_text(search: Mapping[str, Any] | None) -> str:
    if search is None or search["stop"] is None:
        return "under way"
    return search["stop"] if search["half_width"] is None else f"{search['stop']}, +-{search['half_width']:.2f} octaves"
