"""How a study stands: per cell, runs expected, complete, diverged, failed and missing, and the exact next command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from scaling.errors import program
from scaling.locks import Busy, file_lock
from scaling.records import RunRecord, read_records
from sweeps.plan import PlannedRun, make_plan
from sweeps.plan_table import render
from sweeps.study_dir import Study


def status_document(study: Study) -> dict[str, Any]:
    """Counts a cell and in all. Running runs are counted only while a driver holds the study."""
    from sweeps.queue import Queue

    if study.config.storage is not None:
        from sweeps.fleet import pull

        pull(study)
    results = {record.run_id: record for record in read_records(study.directory)}
    plan = make_plan(study.config, results)
    active = _driver_is_alive(study)
    try:
        if study.config.storage is not None:
            active, failures, running = _on_board(study)
        else:
            queue = Queue(study.directory, study.config)
            failures, running = queue.failures(results), queue.running() if active else set()
    except PermissionError:  # Somebody else's study, read only: the records say what is finished.
        failures, running = {}, set()
    cells: dict[tuple[str, int], list[PlannedRun]] = {}
    for planned in sorted(plan, key=lambda planned: (planned.parametrization, planned.width)):
        cells.setdefault((planned.parametrization, planned.width), []).append(planned)
    rows = [_cell_row(kind, width, runs, results, failures, running) for (kind, width), runs in cells.items()]
    failed = [
        {"run_id": planned.run_id, "parametrization": planned.parametrization, "width": planned.width}
        | {"log2_lr": planned.log2_lr, "seed": planned.seed, "reason": failures[planned.run_id]}
        for planned in plan
        if planned.run_id in failures
    ]
    missing = sum(row["missing"] for row in rows)
    return {
        "study": str(study.directory),
        "driver_running": active,
        "cells": rows,
        "total": len(plan),
        "done": sum(row["complete"] + row["diverged"] for row in rows),
        "failed": failed,
        "missing": missing,
        "finished": not missing and not failed,
        "next": _next_command(study, active, missing, bool(failed)),
    }


def _on_board(study: Study) -> tuple[bool, dict[str, str], set[str]]:
    """Whether workers are at it, failures, and running runs of a study in a database."""
    from sweeps.fleet import board_of

    board = board_of(study)
    running = {run_id for run_id, state in board.states().items() if state == "running"}
    failures = board.failures()
    board.close()
    return bool(running), failures, running


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
    return max((path.stat().st_mtime_ns for path in (study.directory / "runs").glob("*/record.json")), default=0)


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
        "diverged": len(records) - len(complete),
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
    names = ("expected", "complete", "diverged", "running", "failed", "missing")
    table = Table("param.", "width", *names, "best log2 LR", "best loss", box=None, header_style="bold", pad_edge=False)
    for row in document["cells"]:
        best = ("", "") if row["best_loss"] is None else (f"{row['best_log2_lr']:g}", f"{row['best_loss']:.4f}")
        table.add_row(row["parametrization"], str(row["width"]), *(str(row[name]) for name in names), *best)
    lines = [render(table), "", f"{document['done']} of {document['total']} runs done."]
    lines += [f"failed {row['run_id']}: {row['reason']}" for row in document["failed"]]
    report = f"nothing is left to do; the report: {document['study']}/report.html"
    return "\n".join([*lines, f"next: {document['next']}" if document["next"] else report])
