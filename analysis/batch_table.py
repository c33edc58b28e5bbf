"""Tables for the laws of batch size and learning rate: rows in, arrays out, with an account of every row that is left out.

Owns `StepsTable` (steps to a target loss against batch) and `LrBatchTable` (grids of learning rate and batch at every size).
Sizes are parameters, tokens seen and FLOP; batches are tokens, or sequences where the table says so; learning rates are peak
values; losses are nats per token. Runs of several schedules or final learning rates are refused, not pooled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from analysis.fit_table import FLOP_CONVENTION, LOSS_UNITS, raw_rows, rows_where
from analysis.law import Array
from analysis.table import ABSURD_LOSS, DIVERGED, FINISHED, nearest, numbers_of
from scaling.errors import DataError, Fault, raise_all

if TYPE_CHECKING:
    import pandas as pd

BATCHES = {"batch_tokens": "tokens", "batch_seqs": "sequences"}
STEPS_KNOWN = ("params", "tokens", *BATCHES, "steps_to_target", "target_loss", "status")
GRID_NUMBERS = ("params", "tokens", "flops", "lr", "batch_tokens", "loss", "final_lr")
GRID_KNOWN = (*GRID_NUMBERS, "status", "parametrization", "schedule", "seed", "run_id", "width", "depth")
KNOBS = ("lr", "batch_tokens")
SAME = 1e-6
"""Numbers of a table are one level within this share."""


@dataclass(frozen=True, eq=False)
class StepsTable:
    """Steps (n,) that runs of a batch (n,), in `unit`, needed to a size's target loss; columns: {"params": (n,), ...}."""

    columns: Mapping[str, Array]
    batch: Array
    steps: Array
    unit: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def sizes(self) -> Iterator[tuple[dict[str, float], NDArray[np.intp]]]:
        """Each size with the indices of its rows, small to large."""
        rows = np.stack([*self.columns.values()], axis=1)
        levels, member = np.unique(rows, axis=0, return_inverse=True)
        for index, level in enumerate(levels):
            yield dict(zip(self.columns, map(float, level), strict=True)), np.flatnonzero(member.ravel() == index)


def load_steps_table(
    source: Path | str | pd.DataFrame, columns: Mapping[str, str] | None = None, where: Sequence[str] = ()
) -> StepsTable:  # fmt: skip
    """Read columns steps_to_target, batch_tokens or batch_seqs, params or tokens (both where given), target_loss if there.

    Rows without steps never reached the target: left out, counted. Raises DataError with all faults at once.
    """
    notes: list[str] = []
    frame, place = raw_rows(source, columns or {}, notes, STEPS_KNOWN)
    frame = rows_where(frame, where, place, notes)
    present = [str(name) for name in frame.columns]
    batches, sizes = [name for name in BATCHES if name in frame], [name for name in ("params", "tokens") if name in frame]
    faults = [] if "steps_to_target" in frame else [_missing(place, "steps_to_target", present)]
    if not batches:
        faults.append(_missing(place, "batch_tokens", present, "batch_seqs"))
    if len(batches) > 1:
        faults.append(
            Fault(
                f"{place}: columns batch_tokens and batch_seqs",
                "both name the batch",
                "map one of them alone, or remove a column",
            )
        )
    if not sizes:
        faults.append(_missing(place, "params", present, "tokens"))
    raise_all(faults, DataError)
    wanted = [*sizes, *batches, "steps_to_target", *(["target_loss"] if "target_loss" in frame else [])]
    numbers: dict[str, Array] = {
        name: np.asarray(numbers_of(frame[name], name, place, faults), dtype=np.float64) for name in wanted
    }
    raise_all(faults, DataError)
    never = ~np.isfinite(numbers["steps_to_target"]) | (numbers["steps_to_target"] <= 0)
    unsized = ~never & ~np.isfinite(np.stack([numbers[name] for name in (*sizes, *batches)])).all(axis=0)
    for chosen, words in (
        (never, "rows without steps: they never reached the target, and are left out"),
        (unsized, "rows without a size or a batch dropped"),
    ):
        if chosen.any():
            notes.append(f"{int(chosen.sum())} {words}")
    keep = ~never & ~unsized
    if not keep.any():
        raise DataError(Fault(place, "holds no usable run", "; ".join(notes)))
    table = StepsTable(
        {name: numbers[name][keep] for name in sizes},
        numbers[batches[0]][keep],
        numbers["steps_to_target"][keep],
        BATCHES[batches[0]],
        tuple(notes),
    )
    if "target_loss" in numbers:
        _one_target(table, numbers["target_loss"][keep], place)
    return table


def _one_target(table: StepsTable, targets: Array, place: str) -> None:
    """Steps to different losses are not on one curve."""
    for sizes, rows in table.sizes():
        levels = np.unique(targets[rows])
        if len(levels) > 1:
            words = ", ".join(f"{name} {value:.4g}" for name, value in sizes.items())
            shown = ", ".join(f"{level:g}" for level in levels[:5])
            raise DataError(
                Fault(f"{place}: {words}", f"has several target losses ({shown})", "choose one: --where target_loss=...")
            )


def _missing(place: str, name: str, present: Sequence[str], other: str = "") -> Fault:
    words = f"column {name!r}" + (f" (or {other!r})" if other else "")
    return Fault(f"{place}: {words}", "is missing", f"map it with --column {name}=NAME; {nearest(name, present)}")


@dataclass(frozen=True, eq=False)
class GridCell:
    """One size with its runs over the searched knobs.

    logs (n, k): natural logs of lr and batch_tokens; loss (n,): nats, replicates averaged; lost (m, k): logs of diverged runs.
    """

    sizes: Mapping[str, float]
    knobs: tuple[str, ...]
    logs: Array
    loss: Array
    lost: Array

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.sizes.items() if name != "flops") or "the table"

    @property
    def rise(self) -> Array:
        """Loss over the best run's, as a share of it."""
        return np.asarray(self.loss / self.loss.min() - 1)

    @property
    def best(self) -> Array:
        """Logs of the best run's knobs (k,)."""
        return np.asarray(self.logs[int(self.loss.argmin())])

    def edges(self) -> dict[str, str]:
        """{knob: "low" or "high"} where the best run lies at the end of what was tried; diverged runs were tried too."""
        found = {}
        for index, knob in enumerate(self.knobs):
            tried = np.concatenate([self.logs[:, index], self.lost[:, index]])
            if self.best[index] <= tried.min() + SAME:
                found[knob] = "low"
            elif self.best[index] >= tried.max() - SAME:
                found[knob] = "high"
        return found


@dataclass(frozen=True, eq=False)
class LrBatchTable:
    """Cells of (params, tokens), what was searched in them, and what was read and dropped."""

    cells: tuple[GridCell, ...]
    knobs: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the sizes that cells have."""
        return tuple(self.cells[0].sizes)

    def column(self, name: str) -> Array:
        """One size of every cell (c,)."""
        return np.array([cell.sizes[name] for cell in self.cells])


def load_lr_batch_table(
    source: Path | str | pd.DataFrame, columns: Mapping[str, str] | None = None, *, where: Sequence[str] = (), loss_unit: str = "nats",
    parametrization: str | None = None,
) -> LrBatchTable:  # fmt: skip
    """Read loss, lr and / or batch_tokens at sizes params, tokens (flops); further: status, schedule, final_lr,
    parametrization, seed.

    Raises DataError with what is missing or must not be pooled.
    """
    if loss_unit not in LOSS_UNITS:
        raise DataError(Fault(f"loss unit {loss_unit!r}", "is not known", f"choose from: {', '.join(LOSS_UNITS)}"))
    notes: list[str] = []
    frame, place = raw_rows(source, columns or {}, notes, GRID_KNOWN)
    frame = rows_where(frame, where, place, notes)
    present, faults = [str(name) for name in frame.columns], []
    if "loss" not in frame:
        faults.append(_missing(place, "loss", present))
    if not any(name in frame for name in KNOBS):
        faults.append(_missing(place, "lr", present, "batch_tokens"))
    if not any(name in frame for name in ("params", "tokens", "flops")):
        faults.append(_missing(place, "params", present, "tokens"))
    raise_all(faults, DataError)
    unused = [name for name in present if name not in (*GRID_KNOWN, *(columns or {}).values())]
    if unused:
        notes.append(f"columns not used: {', '.join(unused)}")
    frame = _one_parametrization(frame, parametrization, place, notes)
    numbers: dict[str, Array] = {
        name: np.asarray(numbers_of(frame[name], name, place, faults), dtype=np.float64) for name in GRID_NUMBERS if name in frame
    }
    raise_all(faults, DataError)
    _one_schedule(frame, numbers, place)
    numbers["loss"] = numbers["loss"] * LOSS_UNITS[loss_unit]
    if loss_unit != "nats":
        notes.append(f"losses converted from {loss_unit} to nats")
    return _cells(frame, numbers, place, notes)


def _one_parametrization(frame: pd.DataFrame, wanted: str | None, place: str, notes: list[str]) -> pd.DataFrame:
    there = sorted(set(frame["parametrization"].astype(str))) if "parametrization" in frame else []
    if wanted is not None and wanted not in there:
        cure = f"choose from: {', '.join(there)}" if there else "leave it out: the table has no column parametrization"
        raise DataError(Fault(f"--parametrization {wanted}", f"is not in {place}", cure))
    if wanted is None and len(there) > 1:
        what = f"holds runs of several parametrizations ({', '.join(there)}), whose best learning rates follow different laws"
        raise DataError(Fault(place, what, f"choose one: --parametrization {there[0]}"))
    if wanted is None:
        return frame
    keep = frame["parametrization"].astype(str) == wanted
    notes.append(f"{int((~keep).sum())} runs of other parametrizations left out")
    return frame[keep]


def _one_schedule(frame: pd.DataFrame, numbers: Mapping[str, Array], place: str) -> None:
    """The best peak LR depends on where the LR ends: runs that end elsewhere are another table."""
    faults = []
    if "schedule" in frame and frame["schedule"].nunique() > 1:
        levels = sorted(map(str, set(frame["schedule"].dropna())))
        faults.append(
            Fault(
                f"{place}: column 'schedule'",
                f"has several levels ({', '.join(levels[:6])}): their best learning rates differ",
                f"choose one: --where schedule={levels[0]}",
            )
        )
    if "final_lr" in numbers and not _one_level(numbers["final_lr"]):
        share = numbers["final_lr"] / numbers["lr"] if "lr" in numbers else numbers["final_lr"]
        if not _one_level(share):
            shown = ", ".join(f"{level:g}" for level in np.unique(numbers["final_lr"])[:6])
            what = f"varies ({shown}) and is no fixed share of the peak: runs with different final learning rates are not pooled"
            faults.append(Fault(f"{place}: column 'final_lr'", what, "choose one: --where final_lr=..."))
    raise_all(faults, DataError)


def _one_level(values: Array) -> bool:
    known = values[np.isfinite(values)]
    return len(known) == 0 or bool(np.ptp(known) <= SAME * np.abs(known).max())


def _cells(frame: pd.DataFrame, numbers: dict[str, Array], place: str, notes: list[str]) -> LrBatchTable:
    """Rows of one size together, for the knobs that vary within a size."""
    sizes: list[str] = [name for name in ("params", "tokens", "flops") if name in numbers]
    if {"params", "tokens"} == set(sizes):
        numbers["flops"] = 6.0 * numbers["params"] * numbers["tokens"]
        notes.append(f"no column flops: {FLOP_CONVENTION}")
    kind = _kinds(frame, numbers["loss"], notes)
    key = [name for name in sizes if name != "flops"] or sizes
    knobs = [name for name in KNOBS if name in numbers]
    sound = np.isfinite(np.stack([numbers[name] for name in (*key, *knobs)])).all(axis=0)
    if (~sound & (kind != "left")).any():
        notes.append(f"{int((~sound & (kind != 'left')).sum())} rows without a size, a learning rate or a batch dropped")
    kind = np.where(sound, kind, "left")
    levels, member = np.unique(np.stack([numbers[name] for name in key], axis=1), axis=0, return_inverse=True)
    groups = [(member.ravel() == index) & (kind != "left") for index in range(len(levels))]
    searched = tuple(knob for knob in knobs if any(not _one_level(numbers[knob][rows]) for rows in groups))
    notes += [f"{name} does not vary within a size: it is no part of the law" for name in knobs if name not in searched]
    if not searched:
        what = "no size was run at several learning rates or batches"
        raise DataError(Fault(place, what, "this law is of the best of several"))
    logs = np.stack([np.log(numbers[name]) for name in searched], axis=1)
    cells = []
    for rows in groups:
        good = rows & (kind == "sound")
        if good.any():
            at = {name: float(numbers[name][good][0]) for name in (*sizes, "flops") if name in numbers}
            cells.append(_cell(at, searched, logs, numbers["loss"], good, rows & (kind == "lost")))
    if len(cells) < len(groups):
        notes.append(f"{len(groups) - len(cells)} sizes without a finite loss left out")
    if not cells:
        raise DataError(Fault(place, "holds no usable run", "; ".join(notes)))
    averaged = int((kind == "sound").sum()) - sum(len(cell.loss) for cell in cells)
    if averaged:
        notes.append(f"{averaged} rows repeat a size, learning rate and batch: averaged as replicates")
    return LrBatchTable(tuple(cells), searched, tuple(notes))


def _kinds(frame: pd.DataFrame, losses: Array, notes: list[str]) -> np.ndarray[Any, Any]:
    """ "sound", "lost" (diverged: kept for the boundary) or "left" (no finished run), for each row."""
    status = frame["status"].fillna("").astype(str).str.strip().str.lower() if "status" in frame else None
    lost = ~(np.isfinite(losses) & (losses < ABSURD_LOSS))
    left = np.zeros(len(losses), dtype=bool)
    if status is not None:
        lost |= status.isin(DIVERGED).to_numpy()
        left = ~status.isin((*DIVERGED, *FINISHED)).to_numpy()
    left |= ~lost & (losses <= 0)
    lost &= ~left
    if left.any():
        notes.append(f"{int(left.sum())} rows that are not finished runs or have a loss that is not positive dropped")
    if lost.any():
        notes.append(f"{int(lost.sum())} diverged runs kept for the boundary of divergence, not for the optimum")
    return np.where(left, "left", np.where(lost, "lost", "sound"))


def _cell(
    sizes: Mapping[str, float], knobs: tuple[str, ...], logs: Array, losses: Array, rows: np.ndarray[Any, Any], lost: np.ndarray[Any, Any]
) -> GridCell:  # fmt: skip
    """Replicates averaged; places that agree to rounding are one."""
    places, member = np.unique(np.round(logs[rows], 9), axis=0, return_inverse=True)
    counts = np.bincount(member.ravel())
    return GridCell(
        sizes, knobs, places, np.bincount(member.ravel(), losses[rows]) / counts, np.unique(np.round(logs[lost], 9), axis=0)
    )
