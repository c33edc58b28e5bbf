"""Runs that another tracker kept, as a table that every analysis command reads: what is kept, what is not, and why.

Owns the choice of a reader, the fate of every run (complete, diverged, or out of the table for a stated reason) and the account of it.
Losses become nats per token. Nothing is dropped without being counted, and every column says where it comes from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from analysis.import_columns import Column, loss_names, resolve
from analysis.import_runs import ForeignRun, Source, lookup, number, same, state_of, unknown_name
from analysis.table import ABSURD_LOSS, CANONICAL, CELL_COLUMNS
from scaling.config_base import Frozen
from scaling.errors import DataError, Fault, raise_all

if TYPE_CHECKING:
    import pandas as pd

SHORT = 0.95
"""Where a tracker does not say how a run ended: the share of the longest run's last step, in its cell, that a finished run reaches."""
SHOWN = 5
Fate = Literal["complete", "diverged", "unfinished", "crashed", "duplicate", "elsewhere", "unusable"]
FATES: Mapping[Fate, str] = {
    "unfinished": "not finished",
    "crashed": "crashed, last loss finite",
    "duplicate": "the same run once more",
    "elsewhere": "left out by --where",
    "unusable": "cannot be used",
}
"""Why a run is not in the table, in words."""


class ImportOptions(Frozen):
    """How a tracker's runs become rows; see docs/import.md."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Column -> name in the source, or product of names and numbers; empty for none."""
    constants: dict[str, str] = Field(default_factory=dict)
    """Column -> one value for all runs."""
    loss_metric: str | None = None
    loss_from: Annotated[str, Field(pattern=r"^(last|min|mean:[1-9][0-9]{0,5})$")] = "last"
    """last: the final value; min: the least; mean:K: the mean of the last K points."""
    loss_unit: Literal["nats", "bits"] = "nats"
    where: dict[str, str] = Field(default_factory=dict)
    """Name in the source -> the value that a run must have."""
    ignore: tuple[str, ...] = ()
    """Names in the source that tell no two experiments apart."""


@dataclass(frozen=True)
class Placed:
    """A run and what became of it. row: its columns, where it is in the table."""

    run: ForeignRun
    fate: Fate
    why: str = ""
    row: Mapping[str, object] | None = None
    last_step: float | None = None


@dataclass(frozen=True)
class Imported:
    """The table of a source and the account of how it came about."""

    frame: pd.DataFrame
    source: Source
    columns: Mapping[str, str]
    """Column -> where it comes from, in words."""
    placed: tuple[Placed, ...]
    notes: tuple[str, ...]

    def count(self, fate: Fate) -> int:
        return sum(placed.fate == fate for placed in self.placed)

    @property
    def incomplete(self) -> bool:
        """Whether some run is missing from the table that another command might bring in."""
        return bool(self.source.unreadable) or self.count("unusable") > 0

    def reasons(self) -> list[tuple[str, list[str]]]:
        """(why, runs) of all that is not in the table, each run once."""
        found: dict[str, list[str]] = {}
        for placed in self.placed:
            if placed.row is None:
                found.setdefault(f"{FATES[placed.fate]}: {placed.why}" if placed.why else FATES[placed.fate], []).append(
                    str(placed.run)
                )
        for what, why in self.source.unreadable:
            found.setdefault(f"cannot be read: {why}", []).append(what)
        return list(found.items())

    def to_dict(self) -> dict[str, object]:
        """The account for other programs."""
        return {
            "source": self.source.where,
            "kind": self.source.kind,
            "read": len(self.placed),
            "unreadable": len(self.source.unreadable),
            "complete": self.count("complete"),
            "diverged": self.count("diverged"),
            **{fate: self.count(fate) for fate in FATES},
            "dropped": [{"why": why, "runs": runs} for why, runs in self.reasons()],
            "columns": dict(self.columns),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        kept = self.count("complete") + self.count("diverged")
        unread = f", {len(self.source.unreadable)} could not be read" if self.source.unreadable else ""
        lines = [f"{len(self.placed)} runs read from {self.source.where} ({self.source.kind}){unread}"]
        lines.append(f"{kept} in the table: {self.count('complete')} complete, {self.count('diverged')} diverged")
        if self.placed and kept < len(self.placed) + len(self.source.unreadable):
            lines.append(f"{len(self.placed) + len(self.source.unreadable) - kept} not in the table:")
        for why, runs in self.reasons():
            shown = ", ".join(runs[:SHOWN]) + (f", and {len(runs) - SHOWN} more" if len(runs) > SHOWN else "")
            lines.append(f"  {len(runs)} {why}: {shown}")
        lines.append("columns:")
        lines += [f"  {name} = {said}" for name, said in self.columns.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def import_runs(source: Source, options: ImportOptions) -> Imported:
    """Place every run of `source`. Raises DataError, with every fault, when a column or the loss cannot be found or no run is left."""
    import pandas as pd

    if not source.runs:
        why = "; ".join(f"{what}: {why}" for what, why in source.unreadable[:3])
        raise DataError(
            Fault(
                source.where, f"holds no run that can be read{f' ({why})' if why else ''}", "give the folder or file of the runs"
            )
        )
    faults = [
        unknown_name(f"--where {name}={value}", name, source.names())
        for name, value in options.where.items()
        if not _names(source, name)
    ]
    faults += [unknown_name(f"--ignore {name}", name, source.names()) for name in options.ignore if not _names(source, name)]
    metric = options.columns.get("loss", options.loss_metric)
    if options.loss_metric not in (None, metric):
        faults.append(
            Fault(f"--loss-metric {options.loss_metric}", f"and --column loss={metric} name two losses", "leave one out")
        )
    columns: dict[str, Column] = {}
    losses: tuple[tuple[str, ...], bool] = ((), False)
    try:
        columns = resolve(source, options.columns, options.constants)
    except DataError as error:
        faults += error.faults
    try:
        losses = loss_names(source, metric)
    except DataError as error:
        faults += error.faults
    raise_all(faults, DataError)
    placed = [_place(run, source, columns, losses[0], options) for run in source.runs]
    placed = _without_short(_without_duplicates(placed))
    _require_one_experiment(source, placed, columns, losses[0], options)
    rows = [dict(item.row) for item in placed if item.row is not None]
    said = _said(columns, losses, options)
    if not rows:
        raise DataError(_nothing_left(source, placed))
    varying = _varying(source, [item.run for item in placed if item.row is not None], columns, losses[0], options)
    for row, item in zip(rows, [item for item in placed if item.row is not None], strict=True):
        row |= {name: item.run.get(name) for name in varying}
    frame = pd.DataFrame(rows)
    order = [name for name in CANONICAL if name in frame.columns]
    frame = frame[[*order, "source", *varying]]
    return Imported(frame, source, said, tuple(placed), (*source.notes, *_notes(source, columns, varying)))


def _names(source: Source, name: str) -> list[str]:
    return lookup(name, source.names())


def _place(
    run: ForeignRun, source: Source, columns: Mapping[str, Column], losses: Sequence[str], options: ImportOptions
) -> Placed:
    """The fate of one run by itself."""
    for name, value in options.where.items():
        held = [run.get(full) for full in _names(source, name)]
        if not any(item is not None and same(item, value) for item in held):
            return Placed(run, "elsewhere", f"{name} is not {value}")
    try:
        word = columns["status"].value(run) if "status" in columns else run.state
        state = state_of(None if word is None else str(word))
        if state == "unknown":
            return Placed(run, "unusable", f"its state {word!r} is not one that is known")
        if state == "unfinished":
            return Placed(run, "unfinished", str(word))
        loss, last_step = _loss(run, losses, options.loss_from)
        lost = state == "diverged" or (loss is not None and not abs(loss) < ABSURD_LOSS)
        if state != "finished" or loss is None:
            # A trainer that stops at a NaN often does so before the next validation.
            lost = lost or _any_loss_is_lost(run)
        if state == "crashed" and not lost:
            return Placed(run, "crashed", str(word))
        if loss is None and not lost:
            return Placed(run, "unusable", f"no value of {' or '.join(losses)}")
        row = {name: column.value(run) for name, column in columns.items() if name != "status"}
        missing = [name for name in ("width", "lr", "log2_lr") if name in columns and row[name] is None]
        if missing:
            return Placed(
                run, "unusable", f"no value of {', '.join(columns[name].said for name in missing)} ({', '.join(missing)})"
            )
    except ValueError as error:
        return Placed(run, "unusable", str(error))
    factor = math.log(2) if options.loss_unit == "bits" else 1.0
    row |= {"loss": None if lost or loss is None else loss * factor, "status": "diverged" if lost else "complete"}
    row |= {"run_id": row.get("run_id") or run.run_id, "source": source.where}
    unsaid = state == "unsaid" and not lost
    return Placed(run, "diverged" if lost else "complete", "", row, last_step if unsaid else None)


def _loss(run: ForeignRun, names: Sequence[str], how: str) -> tuple[float | None, float | None]:
    """The loss of a run by the rule `how`, and the step of its last point where there is a curve.

    NaN when the last point is not finite, whatever the rule. Raises ValueError when the rule needs points and there are none.
    """
    curves = {name: run.curve(name) for name in names} if run.curve is not None else {}
    points = next((curve for curve in curves.values() if len(curve)), ())
    last_step = points[-1][0] if points else None
    held = next((value for name in names if (value := run.get(name)) is not None), None)
    if held is None and not points:
        return None, None
    last = number(held) if held is not None else points[-1][1]
    if how == "last" or not math.isfinite(last):
        return last, last_step
    values = [value for _, value in points]
    if not values:
        raise ValueError(f"--loss-from {how} needs every value of {' or '.join(names)}, and the source holds the final one alone")
    if how == "min":
        return min(value for value in values if not math.isnan(value)), last_step
    count = int(how.partition(":")[2])
    if len(values) < count:
        raise ValueError(f"--loss-from {how} needs {count} points, and {' or '.join(names)} has {len(values)}")
    return math.fsum(values[-count:]) / count, last_step


def _any_loss_is_lost(run: ForeignRun) -> bool:
    """Whether the last value of any metric with "loss" in its name is not finite."""
    for name in run.metrics:
        value = run.get(name)
        if "loss" in name.lower() and value is not None:
            try:
                if not math.isfinite(number(value)):
                    return True
            except ValueError:
                continue
    return False


def _without_duplicates(placed: Sequence[Placed]) -> list[Placed]:
    """Each run_id once. Two different runs of one run_id cannot be told apart, and neither is used."""
    rows: dict[object, Mapping[str, object]] = {}
    torn: set[object] = set()
    for item in placed:
        if item.row is not None:
            first = rows.setdefault(item.row["run_id"], item.row)
            if first != item.row:
                torn.add(item.row["run_id"])
    seen: set[object] = set()
    result = []
    for item in placed:
        if item.row is None:
            result.append(item)
        elif item.row["run_id"] in torn:
            result.append(Placed(item.run, "unusable", "its run_id stands for runs that differ"))
        elif item.row["run_id"] in seen:
            result.append(Placed(item.run, "duplicate"))
        else:
            seen.add(item.row["run_id"])
            result.append(item)
    return result


def _cell(row: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(row.get(name) for name in CELL_COLUMNS)


def _without_short(placed: Sequence[Placed]) -> list[Placed]:
    """Where the tracker does not say how a run ended: one that ends well before the longest of its cell is not finished."""
    longest: dict[tuple[object, ...], float] = {}
    for item in placed:
        if item.row is not None and item.last_step is not None:
            longest[_cell(item.row)] = max(item.last_step, longest.get(_cell(item.row), 0.0))
    result = []
    for item in placed:
        limit = longest.get(_cell(item.row), 0.0) if item.row is not None else 0.0
        if item.last_step is not None and item.last_step < SHORT * limit:
            item = Placed(item.run, "unfinished", f"ends before step {limit:.12g}, which others of its cell reach")
        result.append(item)
    return result


def _varying(
    source: Source, runs: Sequence[ForeignRun], columns: Mapping[str, Column], losses: Sequence[str], options: ImportOptions
) -> list[str]:
    """Config keys that are no column and tell experiments apart: of several values, not one for each run, as names and folders have."""
    used = {name for column in columns.values() for name in column.names} | set(losses)
    used |= {full for name in options.ignore for full in _names(source, name)}
    found = []
    for name in source.names("config"):
        key = name.rpartition(".")[2]
        if name in used or key.startswith("_") or "loss" in key.lower() or "/" in key:
            continue
        values = [str(run.get(name)) for run in runs]
        distinct = len(set(values))
        several = 1 < distinct < len(values) - values.count("None")
        if several and not _same_as_a_column(runs, name, columns):
            found.append(name)
    return found


def _same_as_a_column(runs: Sequence[ForeignRun], name: str, columns: Mapping[str, Column]) -> bool:
    """Whether a key says what a column says already, in other numbers: one value of it for each value of the column."""
    for column in columns.values():
        pairs = set()
        for run in runs:
            try:
                pairs.add((str(run.get(name)), str(column.value(run))))
            except ValueError:
                break
        else:
            # A function of the column: a width's head count, an LR's floor.
            if len(pairs) == len({second for _, second in pairs}):
                return True
    return False


def _require_one_experiment(
    source: Source, placed: Sequence[Placed], columns: Mapping[str, Column], losses: Sequence[str], options: ImportOptions
) -> None:
    """Raise DataError when runs of one cell, LR and seed differ in a config key: they are no replicates."""
    kept = [item for item in placed if item.row is not None]
    groups: dict[tuple[object, ...], list[ForeignRun]] = {}
    for item in kept:
        assert item.row is not None, "kept runs have rows"
        key = (*_cell(item.row), item.row.get("lr"), item.row.get("log2_lr"), item.row.get("seed"))
        groups.setdefault(key, []).append(item.run)
    differing: Counter[str] = Counter()
    values: dict[str, dict[str, None]] = {}
    for name in _varying(source, [item.run for item in kept], columns, losses, options):
        for runs in groups.values():
            found = dict.fromkeys(str(run.get(name)) for run in runs)
            if len(found) > 1:
                differing[name] += len(runs)
                values.setdefault(name, {}).update(found)
    if not differing:
        return
    faults = []
    for name, count in differing.most_common():
        shown = list(values[name])[:SHOWN]
        what = f"{count} runs share their cell, learning rate and seed, and differ in {name} ({', '.join(shown)})"
        cure = f"one of them: --where {name}={shown[0]}; replicates: --column seed={name}; no difference: --ignore {name}"
        faults.append(Fault(source.where, what, cure))
    raise DataError(*faults)


def _said(columns: Mapping[str, Column], losses: tuple[tuple[str, ...], bool], options: ImportOptions) -> dict[str, str]:
    """Column -> where it comes from, in words."""
    rule = {"last": "last value", "min": "least value"}.get(
        options.loss_from
    ) or f"mean of the last {options.loss_from[5:]} values"
    unit = "nats per token" if options.loss_unit == "nats" else "bits per token, times ln 2"
    words = {}
    for name in (name for name in CANONICAL if name in columns):
        column = columns[name]
        switch = " (true is mup, false sp)" if column.switch else ""
        words[name] = f"{column.said}{switch}" + (f"   (guessed; --column {name}=NAME)" if column.guessed else "")
    guessed = "   (guessed; --loss-metric NAME)" if losses[1] else ""
    return words | {"loss": f"{rule} of {' or '.join(losses[0])}, taken as {unit}{guessed}"}


def _notes(source: Source, columns: Mapping[str, Column], varying: Sequence[str]) -> list[str]:
    absent = [name for name in (*CELL_COLUMNS, "seed") if name not in columns]
    notes = [f"no column {', '.join(absent)}: taken as one level each; add one with --column NAME=..."] if absent else []
    unsaid = sum(state_of(run.state) == "unsaid" for run in source.runs) if "status" not in columns else 0
    if unsaid:
        rule = f"one that ends before {SHORT:.0%} of the last step of its cell's longest is not"
        if not any(run.curve for run in source.runs):
            rule = "only final values are there, so that one that was cut off cannot be told from one that ended"
        notes.append(f"{unsaid} runs do not say how they ended: taken as finished; {rule}")
    if varying:
        notes.append(f"config keys that vary, kept beside the columns and used by no command: {', '.join(varying)}")
    return notes


def _nothing_left(source: Source, placed: Sequence[Placed]) -> Fault:
    reasons = Counter(f"{FATES[item.fate]}{f': {item.why}' if item.why else ''}" for item in placed if item.row is None)
    words = "; ".join(f"{count} runs {why}" for why, count in reasons.most_common(4))
    return Fault(source.where, f"no run is left for the table: {words}", "see the options of `mutransfer import --help`")
