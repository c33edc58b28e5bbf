"""What a person sees while a study runs: a live table on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from scaling.records import RunRecord
from sweeps import axes
from sweeps.plan import PlannedRun

if TYPE_CHECKING:
    from scaling import train

# Time grows more slowly than FLOPs at small widths; used only for widths with no finished run yet.
TIME_EXPONENT = 0.6


def duration(seconds: float) -> str:
    """4.2s, 3m05s, 2h10m"""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def describe(planned: PlannedRun) -> str:
    off = f" {axes.describe(planned.at)}" if planned.at else ""
    return f"{planned.parametrization} width {planned.width}{off} lr 2^{planned.log2_lr:g} seed {planned.seed}"


def loss_text(record: RunRecord) -> str:
    if record.pruned is not None:
        return f"ended at step {record.steps_done} of {record.steps} by pruning.kind {record.pruned.rule}"
    return "diverged" if record.loss is None else f"loss {record.loss:.4f}"


class Watcher:
    """Keeps count; prints nothing. Base of the two below, and what tests and `--json` callers without a screen use."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._plan: dict[str, PlannedRun] = {}
        self._done: set[str] = set()
        self._running: dict[str, tuple[PlannedRun, float, train.Progress | None]] = {}
        self._seconds: dict[float, list[float]] = {}
        """Times of finished runs, by their FLOPs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def planned(self, plan: Sequence[PlannedRun], results: Mapping[str, RunRecord]) -> None:
        self._plan = {planned.run_id: planned for planned in plan}
        self._done = {run_id for run_id in self._plan if run_id in results}
        for run_id in self._done:
            self._learn(self._plan[run_id], results[run_id])

    def started(self, planned: PlannedRun) -> None:
        self._running[planned.run_id] = (planned, time.perf_counter(), None)

    def progress(self, progress: train.Progress) -> None:
        if progress.run_id in self._running:
            planned, started, _ = self._running[progress.run_id]
            self._running[progress.run_id] = (planned, started, progress)

    def finished(self, planned: PlannedRun, record: RunRecord) -> None:
        self._running.pop(planned.run_id, None)
        self._done.add(planned.run_id)
        self._learn(planned, record)

    def failed(self, planned: PlannedRun, reason: str) -> None:  # noqa: ARG002 (the base does not print)
        self._running.pop(planned.run_id, None)

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def tick(self) -> None:
        """Called about once a second, and after every message."""

    def _learn(self, planned: PlannedRun, record: RunRecord) -> None:
        if record.status == "complete":
            self._seconds.setdefault(planned.flops, []).append(record.wall_s)

    def eta_s(self) -> float | None:
        """Seconds to go, or None before anything is known."""
        seconds = {flops: sum(times) / len(times) for flops, times in self._seconds.items()}
        now = time.perf_counter()
        for planned, started, progress in self._running.values():
            if planned.flops not in seconds and progress is not None and progress.step > 10:
                seconds[planned.flops] = (now - started) * progress.steps / progress.step
        if not seconds:
            return None
        left = 0.0
        for run_id, planned in self._plan.items():
            if run_id in self._done:
                continue
            nearest = min(seconds, key=lambda flops: abs(math.log(flops / planned.flops)))
            total = seconds[nearest] * (planned.flops / nearest) ** TIME_EXPONENT
            spent = now - self._running[run_id][1] if run_id in self._running else 0.0
            left += max(total - spent, 0.0)
        return left / self._jobs

    def counts(self) -> str:
        eta = self.eta_s()
        return f"{len(self._done)}/{len(self._plan)} runs" + (f", about {duration(eta)} to go" if eta else "")


class PlainWatcher(Watcher):
    """One line for each run that ends: for logs and pipes."""

    def __init__(self, jobs: int, console: Console) -> None:
        super().__init__(jobs)
        self._console = console
        self._announced = 0

    def planned(self, plan: Sequence[PlannedRun], results: Mapping[str, RunRecord]) -> None:
        super().planned(plan, results)
        if not self._announced:
            self._line(f"{len(self._plan)} runs planned, {len(self._done)} of them done; {self._jobs} workers")
        elif len(plan) > self._announced:
            self._line(f"{len(plan) - self._announced} more runs planned from the results so far")
        self._announced = len(plan)

    def finished(self, planned: PlannedRun, record: RunRecord) -> None:
        super().finished(planned, record)
        self._line(f"[{self.counts()}] {describe(planned)}: {loss_text(record)} in {duration(record.wall_s)}")

    def failed(self, planned: PlannedRun, reason: str) -> None:
        super().failed(planned, reason)
        self._line(f"FAILED {describe(planned)}: {reason}")

    def note(self, text: str) -> None:
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveWatcher(PlainWatcher):
    """A bar, the running runs with their current loss, and a line above for each run that ends."""

    def __init__(self, jobs: int, console: Console) -> None:
        super().__init__(jobs, console)
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), console=console)
        self._task: TaskID = self._bar.add_task("study", total=1, note="")
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _render(self) -> Group:
        self._bar.update(self._task, total=max(len(self._plan), 1), completed=len(self._done), note=self.counts())
        table = Table.grid(padding=(0, 2))
        for planned, started, progress in list(self._running.values()):
            where = f"step {progress.step}/{progress.steps}  loss {progress.loss:.3f}" if progress else "starting"
            table.add_row("", describe(planned), where, duration(time.perf_counter() - started))
        return Group(self._bar, table)


def watcher_for(console: Console, jobs: int) -> Watcher:
    """Live on a terminal, plain lines elsewhere."""
    return LiveWatcher(jobs, console) if console.is_terminal else PlainWatcher(jobs, console)
