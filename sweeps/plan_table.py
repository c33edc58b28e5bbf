"""What `mutransfer plan` shows: every run with its size and cost, the cells' totals, and an estimate of the time."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from scaling.accounting import parameter_counts
from scaling.records import RunRecord, read_records
from sweeps.axes import LEVELS, describe
from sweeps.plan import PlannedRun, make_plan, memory_of
from sweeps.progress import duration

if TYPE_CHECKING:
    from scaling.ranks import Team
    from sweeps.study_dir import Study

TIMED_STEPS = 3
TIMING_BUDGET_S = 30.0


def plan_document(study: Study, jobs: int, timing: bool) -> dict[str, Any]:
    """The plan given the results so far; `seconds` is the estimated time of a run on one worker, null without timing."""
    results = {record.run_id: record for record in read_records(study.directory)}
    plan = make_plan(study.config, results, memory_of(study.config, study.directory))
    seconds = _seconds(study, plan, results, timing)
    rows: list[dict[str, Any]] = []
    for planned in plan:
        counts = parameter_counts(planned.run.model)
        rows.append(
            {
                "run_id": planned.run_id,
                "parametrization": planned.parametrization,
                "width": planned.width,
                "axis": describe(planned.at),
                "depth": planned.run.model.depth,
                "log2_lr": planned.log2_lr,
                "lr": planned.run.optimizer.lr,
                "seed": planned.seed,
                "reason": planned.reason,
                "params": counts.total,
                "params_non_embedding": counts.non_embedding,
                "tokens": planned.run.tokens,
                "batch_tokens": planned.run.batch_tokens,
                "steps": planned.run.training.steps,
                "flops": planned.flops,
                "seconds": seconds.get(planned.flops),
                "done": planned.run_id in results,
            }
        )
    todo = [row for row in rows if not row["done"]]
    known = [row["seconds"] for row in todo if row["seconds"] is not None]
    return {
        "study": str(study.directory),
        "runs": rows,
        "total": len(rows),
        "done": len(rows) - len(todo),
        "flops_left": sum(row["flops"] for row in todo),
        "jobs": jobs,
        "wall_s_left": sum(known) / jobs if len(known) == len(todo) else None,
        "may_grow": _growth(study),
    }


def _growth(study: Study) -> str:
    """In words, which runs the results may add."""
    follow_up, search = study.config.follow_up, study.config.search
    if search.kind != "grid":
        # Imported here: `status` renders its table with this module, and a grid needs no numpy.
        from sweeps.search import run_limit

        limits = ", ".join(f"{run_limit(study.config, width)} at width {width}" for width in study.config.widths)
        until = f"until half its interval is {search.precision:g} octaves, " if search.kind == "adaptive" else ""
        words = f"{search.kind} search: each cell gets {search.batch} runs at a time, {until}at most {limits}; widths one after the other"
        others = [f"then {name}" for name in study.config.axes]
        return ", ".join([words, *others])
    parts = [f"{name}: a line through the best LR at each width" for name in study.config.axes if name not in LEVELS]
    if follow_up.margin_points:
        parts.append(
            f"a cell whose best LR has fewer than {follow_up.margin_points} runs on one side gets up to "
            f"{follow_up.max_extensions} more LRs there"
        )
    for kind, settings in study.config.parametrizations.items():
        if (seeds := settings.near_seeds(follow_up)) > study.config.seeds:
            parts.append(f"{kind}: LRs within {follow_up.near_octaves:g} octaves of a cell's best get {seeds} seeds")
    return "; ".join(parts)


def _seconds(study: Study, plan: Sequence[PlannedRun], results: dict[str, RunRecord], timing: bool) -> dict[float, float]:
    """Seconds a run, by its FLOPs: measured on finished runs, else by timing a few real steps of a model of that size."""
    finished: dict[float, list[float]] = {}
    for planned in plan:
        record = results.get(planned.run_id)
        if record is not None and record.status == "complete":
            finished.setdefault(planned.flops, []).append(record.wall_s)
    seconds = {flops: sum(times) / len(times) for flops, times in finished.items()}
    return _timed(study, plan, seconds) if timing else seconds


def _timed(study: Study, plan: Sequence[PlannedRun], known: dict[float, float]) -> dict[float, float]:
    """`known` seconds by FLOPs, and those of all other runs; on the study's processes, whose start is not counted."""
    found, started = dict(known), time.perf_counter()
    unknown = {planned.flops: planned for planned in plan if planned.flops not in known}
    if not unknown:
        return found
    from scaling.ranks import Team

    with Team() as team:
        for flops, planned in reversed(unknown.items()):
            if time.perf_counter() - started > TIMING_BUDGET_S:
                nearest = max(found)
                found[flops] = found[nearest] * flops / nearest
            else:
                found[flops] = _time_steps(study, planned, team)
    return found


def _time_steps(study: Study, planned: PlannedRun, team: Team) -> float:
    """Time of the whole run from the fastest of a few real steps; validation is counted at a third of training."""
    from scaling.data import prepare
    from scaling.train import Trainer

    times = []
    with team.run(planned.run) as group:
        trainer = Trainer(planned.run, prepare(**study.data_arguments()), group)
        for step in range(TIMED_STEPS + 1):
            started = time.perf_counter()
            trainer.step(step)
            times.append(time.perf_counter() - started)
    training = planned.run.training
    validations = 1 + (training.steps - 1) // training.validate_every_steps if training.validate_every_steps else 1
    return min(times[1:]) * (training.steps + validations * training.validation_sequences / training.batch_size / 3)


def plan_text(document: dict[str, Any]) -> str:
    """The document as a table, with the totals under it."""
    columns = ("run", "param.", "width", "log2 LR", "seed", "why", "params", "tokens", "FLOPs", "time", "state")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in document["runs"]:
        time_text = "?" if row["seconds"] is None else duration(row["seconds"])
        table.add_row(
            row["run_id"],
            row["parametrization"],
            str(row["width"]),
            f"{row['log2_lr']:g}",
            str(row["seed"]),
            " ".join([row["reason"], row["axis"]]).strip(),
            f"{row['params']:,}",
            f"{row['tokens']:,}",
            f"{row['flops']:.2e}",
            time_text,
            "done" if row["done"] else "to do",
        )
    lines = [render(table), ""]
    left = document["total"] - document["done"]
    lines.append(f"{document['total']} runs, {document['done']} done, {left} to do: {document['flops_left']:.2e} FLOPs")
    if left and document["wall_s_left"] is not None:
        lines[-1] += f", about {duration(document['wall_s_left'])} on {document['jobs']} workers"
    if document["may_grow"]:
        lines.append(f"The plan may grow: {document['may_grow']}.")
    return "\n".join(lines)


def render(table: Table, width: int = 130) -> str:
    """A rich table as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().split("\n"))  # type: ignore[attr-defined]
