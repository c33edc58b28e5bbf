"""Early stopping on real runs: what each rule of `pruning.kind` saves, whom it ends wrongly, and what it does to the optimum.

A grid of the quickstart's model is trained once, each run to its end, and replayed: two workers take its runs in the plan's order, the
rule sees what was finished by then and the curve so far, as in a study.
"""

from __future__ import annotations

import heapq
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pandas as pd
import yaml

from analysis.optimum import CellOptimum, cell_optima
from analysis.table import load_table
from scaling.config import RunConfig
from scaling.records import Pruned, RunRecord, read_metrics, read_records, run_directory
from scaling.train import BLOWN_UP
from sweeps.driver import drive
from sweeps.plan import make_plan
from sweeps.progress import Watcher
from sweeps.pruning import Curve, curve_of, siblings, watch_for
from sweeps.study import PruningConfig
from sweeps.study_dir import open_study

QUICKSTART = Path(__file__).parents[2] / "configs" / "studies" / "quickstart.yaml"
LOG2_LR = {"low": -12, "high": -4, "step": 1}
EDGE = {"low": -3, "high": 0, "step": 1}
"""Learning rates at which losses blow up."""
PLATEAUS = (0.0025, 0.02)
WORKERS = 2
STRESS = 200
RULES = {
    "safe": PruningConfig(kind="safe"),
    "median": PruningConfig(kind="median"),
    "hyperband": PruningConfig(kind="hyperband"),
    "asha": PruningConfig(kind="asha"),
}


@dataclass(frozen=True)
class Made:
    """A run of the grid."""

    run: RunConfig
    record: RunRecord
    rows: Sequence[Mapping[str, float]]

    @property
    def curve(self) -> Curve:
        return curve_of(self.record, self.rows)


def report(folder: Path | None) -> None:
    """Train the grid in `folder` (kept; None: in a temporary one), replay every rule on it, print one line each."""
    with tempfile.TemporaryDirectory() as temporary:
        cells = grid(folder or Path(temporary), LOG2_LR)
        edge = [made for cell in grid(folder or Path(temporary), EDGE) for made in cell]
    runs = sum(map(len, cells))
    print(
        f"\nearly stopping, {runs} runs in {len(cells)} cells, replayed by {WORKERS} workers; quickstart's model, LRs 2^-12 to 2^-4"
    )
    print("  wrongly: ended, and would have come within 0.25 % / 2 % of its cell's best loss; broken: ended below its bound")
    print("  moved: the optimum / an end of its interval, at most, octaves; lost: optima that are not found any more")
    print("  rule       ended  steps saved  wrongly    broken  moved          lost")
    for name, pruning in RULES.items():
        print(f"  {name:10} {_line(cells, pruning)}", flush=True)
    print(_stress_line(cells))
    print(_edge_line(edge))


def grid(folder: Path, log2_lr: Mapping[str, int]) -> list[list[Made]]:
    """The cells over these learning rates; what of them is missing in `folder` is trained."""
    config = yaml.safe_load(QUICKSTART.read_text()) | {
        "name": "pruning", "widths": [16, 32, 64], "log2_lr": dict(log2_lr), "follow_up": {"margin_points": 0}, "target": None,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pruning.yaml").write_text(yaml.safe_dump(config))
    study = open_study(folder / "pruning.yaml", folder / "study")
    drive(study.directory, study.config, WORKERS, Watcher(WORKERS), study.data_arguments(), "the bench")
    records = {record.run_id: record for record in read_records(study.directory)}
    cells: dict[tuple[str, int], list[Made]] = {}
    pruned = study.config.model_copy(update={"pruning": RULES["safe"]})
    for planned in make_plan(pruned, records):
        rows = read_metrics(run_directory(study.directory, planned.run_id) / "metrics.jsonl")
        cells.setdefault((planned.parametrization, planned.width), []).append(Made(planned.run, records[planned.run_id], rows))
    return list(cells.values())


def replay(cell: Sequence[Made], pruning: PruningConfig, workers: int = WORKERS) -> list[RunRecord]:
    """The records that a study with this rule would have left, in the order in which the runs started."""
    free = [0.0] * workers
    finished: list[tuple[float, RunRecord, Curve]] = []
    for made in cell:
        now = heapq.heappop(free)
        looked_at = {
            record.run_id for record in siblings(pruning, made.run, [record for end, record, _ in finished if end <= now])
        }
        seen = [curve for _, record, curve in finished if record.run_id in looked_at]
        watch, ended, shown = watch_for(pruning, made.run, seen), None, list[Mapping[str, float]]()
        for row in made.rows:
            shown.append(row)
            if watch is not None and row["step"] + 1 < made.record.steps and (ended := watch(row)) is not None:
                break
        record = made.record if ended is None else as_pruned(made.record, ended)
        end = now + record.steps_done
        finished.append((end, record, curve_of(record, shown)))
        heapq.heappush(free, end)
    return [record for _, record, _ in finished]


def as_pruned(record: RunRecord, ended: Pruned) -> RunRecord:
    return record.model_copy(update={"status": "pruned", "pruned": ended, "loss": None, "steps_done": ended.step})


def optima_of(cells: Sequence[Sequence[RunRecord]]) -> list[CellOptimum]:
    """The optima as the report finds them."""
    rows = [
        record.model_dump(include={"parametrization", "width", "depth", "tokens", "lr", "log2_lr", "loss", "seed", "status"})
        | {"batch_tokens": record.batch_tokens, "bound": record.pruned.bound if record.pruned else None}
        for cell in cells
        for record in cell
    ]
    return cell_optima(load_table(pd.DataFrame(rows)))


def _line(cells: Sequence[Sequence[Made]], pruning: PruningConfig) -> str:
    replayed = [replay(cell, pruning) for cell in cells]
    losses = {made.record.run_id: _loss(made.record) for cell in cells for made in cell}
    ended = [(record, _best(cell)) for cell, records in zip(cells, replayed, strict=True) for record in records if record.pruned]
    total = sum(made.record.steps_done for cell in cells for made in cell)
    saved = 1 - sum(record.steps_done for records in replayed for record in records) / total
    wrong = [sum(losses[record.run_id] <= (1 + near) * best for record, best in ended) for near in PLATEAUS]
    bounds = [(losses[record.run_id], record.pruned.bound) for record, _ in ended if record.pruned and record.pruned.bound]
    broken = str(sum(loss < bound for loss, bound in bounds)) if bounds else "-"
    before, after = optima_of([[made.record for made in cell] for cell in cells]), optima_of(replayed)
    pairs = list(zip(before, after, strict=True))
    lost = sum(one.censored is None and two.censored is not None for one, two in pairs)
    found = [(one, two) for one, two in pairs if one.censored is None and two.censored is None]
    moved = max((abs(one.log2_lr - two.log2_lr) for one, two in found), default=math.nan)
    ends = max((_apart(one.interval, two.interval) for one, two in found), default=math.nan)
    return f"{len(ended):5}  {saved:11.1%}  {wrong[0]:3} / {wrong[1]:<3} {broken:>7}  {moved:.3f} / {ends:.3f}  {lost:4}"


def _stress_line(cells: Sequence[Sequence[Made]]) -> str:
    """`safe` where it is hardest: some learning rates of a cell only, in any order, one run after the other."""
    random, runs, ended, broken, started = Random(0), 0, 0, 0, time.perf_counter()
    for cell in cells:
        losses = {made.record.run_id: _loss(made.record) for made in cell}
        for _ in range(STRESS):
            chosen = random.sample(cell, random.randint(5, len(cell)))
            for record in replay(chosen, RULES["safe"], workers=1):
                runs += 1
                if record.pruned is not None and record.pruned.bound is not None:
                    ended, broken = ended + 1, broken + (losses[record.run_id] < record.pruned.bound)
    cost_s, run_s = (
        (time.perf_counter() - started) / runs,
        sum(made.record.wall_s for cell in cells for made in cell) / sum(map(len, cells)),
    )
    return (
        f"  safe on {STRESS} random selections and orders of each cell: {ended} of {runs} runs ended, {broken} bounds broken;"
        f" {1e3 * cost_s:.2f} ms a run, {cost_s / run_s:.3%} of its training"
    )


def _edge_line(runs: Sequence[Made]) -> str:
    """How far a loss may blow up and come back: whether a threshold could end a run as diverged."""
    peaks = {made.record.run_id: max(made.curve.training.values()) / (made.record.initial_loss or math.nan) for made in runs}
    above = [made.record for made in runs if peaks[made.record.run_id] > BLOWN_UP]
    back = [record for record in above if _loss(record) < (record.initial_loss or math.nan)]
    top = max(back, key=lambda record: peaks[record.run_id])
    peak = peaks[top.run_id] * (top.initial_loss or math.nan)
    where = f"2^{EDGE['low']} to 2^{EDGE['high']}"
    return (
        f"  blown up: of {len(runs)} runs at {where}, {len(above)} passed {BLOWN_UP} times their first loss, {len(back)} came back below;"
        f"\n  the highest of these, {top.parametrization} at width {top.width} and 2^{top.log2_lr:g}: {top.initial_loss:.2f} at first,"
        f" up to {peak:.1f}, {_loss(top):.2f} at the end"
    )


def _loss(record: RunRecord) -> float:
    return math.inf if record.loss is None else record.loss


def _best(cell: Sequence[Made]) -> float:
    return min(_loss(made.record) for made in cell)


def _apart(one: tuple[float, float], two: tuple[float, float]) -> float:
    return max(0.0 if a == b else abs(a - b) for a, b in zip(one, two, strict=True))
