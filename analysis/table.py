"""Tables of runs: from a study directory, a CSV, a Parquet file or a DataFrame to one tidy frame.

Owns the canonical columns, their defaults and every note on what was read, dropped or assumed.
Losses are in nats per token; learning rates enter as log2 of the peak LR.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaling.errors import DataError, Fault, MissingExtra, StudyError, raise_all

if TYPE_CHECKING:
    import pandas as pd

CELL_COLUMNS = ("parametrization", "width", "depth", "batch_tokens", "tokens")
CANONICAL = (*CELL_COLUMNS, "lr", "log2_lr", "loss", "seed", "status", "params", "flops", "run_id")
NUMERIC = ("width", "depth", "batch_tokens", "tokens", "lr", "log2_lr", "loss", "params", "flops")
POSITIVE = ("width", "depth", "batch_tokens", "tokens", "lr", "params", "flops")
DIVERGED = ("diverged", "nan", "inf", "exploded")
FINISHED = ("complete", "completed", "finished", "done", "ok", "success", "")


@dataclass(frozen=True)
class Cell:
    """One (parametrization, width, depth, batch, tokens) at which the LR curve is sampled; None where the table does not say."""

    parametrization: str = "unknown"
    width: float | None = None
    depth: float | None = None
    batch_tokens: float | None = None
    tokens: float | None = None

    def size(self, axis: str) -> float:
        """Level of one numeric dimension; NaN where the table does not say."""
        value = getattr(self, axis)
        return float("nan") if value is None else float(value)

    def others(self, axis: str) -> tuple[float, ...]:
        """Levels of every numeric dimension but `axis`; an absent one is -1, so that levels compare."""
        values = (getattr(self, name) for name in CELL_COLUMNS[1:] if name != axis)
        return tuple(-1.0 if value is None else float(value) for value in values)

    def __str__(self) -> str:
        known = [(name, getattr(self, name)) for name in CELL_COLUMNS[1:] if getattr(self, name) is not None]
        parts = [f"{name} {value:.12g}" for name, value in known]
        return ", ".join([self.parametrization, *parts])


@dataclass(frozen=True)
class RunTable:
    """Runs, one row each, with the canonical columns; every number is a float, so that products cannot overflow.

    frame: columns `CANONICAL` and `diverged` (bool; such a row has loss NaN). notes: what was read, dropped, assumed and why.
    """

    frame: pd.DataFrame
    notes: tuple[str, ...] = ()

    def cells(self) -> Iterator[tuple[Cell, pd.DataFrame]]:
        """Each cell with its rows, ordered by parametrization and then by the numbers."""
        for key, rows in self.frame.groupby(list(CELL_COLUMNS), dropna=False, sort=True):
            name, *numbers = key
            levels = (float(str(number)) for number in numbers)
            yield Cell(str(name), *(None if level != level else level for level in levels)), rows

    @property
    def parametrizations(self) -> list[str]:
        return sorted(set(self.frame["parametrization"]))

    def __len__(self) -> int:
        return len(self.frame)


def load_table(source: Path | str | pd.DataFrame, columns: Mapping[str, str] | None = None) -> RunTable:
    """Read runs from a study directory, a .csv or .parquet file, or a DataFrame.

    columns: {canonical name: name in the source}. Raises DataError with all faults at once (a missing or unparsable column),
    StudyError when a study holds no finished run, MissingExtra when Parquet needs pyarrow.
    """
    raw, where = _read(source)
    columns = dict(columns or {})
    raise_all(_mapping_faults(raw, columns, where), DataError)
    # A mapped name replaces a column that bears it already.
    replaced = [name for name in columns if name in raw.columns and name not in columns.values()]
    frame = raw.drop(columns=replaced).rename(columns={actual: name for name, actual in columns.items()})
    raise_all(_missing_faults(frame, where), DataError)
    return _tidy(frame.reset_index(drop=True), where, [f"{len(frame)} runs read from {where}"])


def _read(source: Path | str | pd.DataFrame) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    if isinstance(source, pd.DataFrame):
        return source.copy(), "the DataFrame"
    path = Path(source)
    if path.is_dir():
        return _read_study(path), str(path)
    if not path.exists():
        raise DataError(Fault(str(path), "no such file or study directory", "give a study directory, a .csv or a .parquet file"))
    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            return pd.read_parquet(path), str(path)
        frame = pd.read_csv(path, skipinitialspace=True)
        return (frame if frame.shape[1] > 1 else pd.read_csv(path, sep=None, engine="python")), str(path)
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "reading Parquet") from None
    except (ValueError, OSError, UnicodeDecodeError) as error:
        raise DataError(Fault(str(path), f"cannot be read as a table: {error}", "give a .csv or a .parquet file")) from None


def _read_study(path: Path) -> pd.DataFrame:
    import pandas as pd

    from scaling.records import read_records

    rows = []
    for record in read_records(path):
        row = record.model_dump(include={*CANONICAL, "data_seed"})
        rows.append({**row, "params": record.params.get("total", max(record.params.values(), default=None))})
    if not rows:
        raise StudyError(Fault(str(path), "holds no finished run", "run the study first"))
    frame = pd.DataFrame(rows)
    if frame.groupby("seed")["data_seed"].nunique().max() > 1:
        frame["seed"] = frame["seed"].astype(str) + "/" + frame["data_seed"].astype(str)
    return frame


def _mapping_faults(frame: pd.DataFrame, columns: Mapping[str, str], where: str) -> list[Fault]:
    faults = []
    present = [str(name) for name in frame.columns]
    for name, actual in columns.items():
        if name not in CANONICAL:
            what = f"{name!r} is not a column this program knows"
            faults.append(Fault(f"column {name}={actual}", what, _nearest(name, CANONICAL)))
        if actual not in present:
            faults.append(Fault(f"{where}: column {actual!r}", "is not in the table", _nearest(actual, present)))
    return faults


def _missing_faults(frame: pd.DataFrame, where: str) -> list[Fault]:
    present = [str(name) for name in frame.columns]
    faults = []
    for name in ("loss", "width"):
        if name not in present:
            faults.append(Fault(f"{where}: column {name!r}", "is missing", _mapping_cure(name, present)))
    if "lr" not in present and "log2_lr" not in present:
        faults.append(Fault(f"{where}: column 'lr' (or 'log2_lr')", "is missing", _mapping_cure("lr", present)))
    return faults


def _mapping_cure(name: str, present: Sequence[str]) -> str:
    return f"map it with --column {name}=NAME; {_nearest(name, present)}"


def _nearest(name: str, candidates: Sequence[str]) -> str:
    lowered = {candidate.lower(): candidate for candidate in candidates}
    near = [lowered[key] for key in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    near += [c for c in candidates if c not in near and (name.lower() in c.lower() or c.lower() in name.lower())]
    return f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(candidates)}"


def _tidy(frame: pd.DataFrame, where: str, notes: list[str]) -> RunTable:
    import numpy as np
    import pandas as pd

    faults: list[Fault] = []
    tidy = pd.DataFrame(index=frame.index)
    for name in NUMERIC:
        if name in frame:
            tidy[name] = _numbers(frame[name], name, where, faults)
        else:
            tidy[name] = np.nan
    raise_all(faults, DataError)
    if "log2_lr" not in frame:
        tidy["log2_lr"] = np.log2(tidy["lr"])
    tidy["lr"] = np.exp2(tidy["log2_lr"])
    missing = tidy["log2_lr"].isna() | tidy["width"].isna()
    if missing.any():
        notes.append(f"{int(missing.sum())} rows without a learning rate or a width dropped")
    _defaults(tidy, frame, notes)
    keep = ~missing & _usable(tidy, notes)
    tidy = _without_duplicates(tidy[keep], notes)
    if tidy.empty:
        raise DataError(Fault(where, "holds no usable run", "; ".join(notes)))
    return RunTable(tidy[[*CANONICAL, "diverged"]].reset_index(drop=True), tuple(notes))


def _numbers(values: pd.Series[Any], name: str, where: str, faults: list[Fault]) -> pd.Series[float]:
    import pandas as pd

    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    words = values.astype(str).str.strip().str.lower()
    # A loss written as a word is how loggers write a divergence.
    allowed = words.isin(["", "nan", "none", "<na>", "null", *(["inf", "-inf", "diverged"] if name == "loss" else [])])
    bad = numbers.isna() & values.notna() & ~allowed
    if bad.any():
        what = f"{int(bad.sum())} values are not numbers, first {_first(values, bad)}"
        faults.append(Fault(f"{where}: column {name!r}", what, "write plain numbers; leave a missing one empty"))
    not_positive = numbers <= 0
    if name in POSITIVE and not_positive.any():
        what = f"{int(not_positive.sum())} values are not positive, first {_first(values, not_positive)}"
        cure = "give log2 LRs as column log2_lr" if name == "lr" else "correct or remove these rows"
        faults.append(Fault(f"{where}: column {name!r}", what, cure))
    return numbers


def _first(values: pd.Series[Any], chosen: pd.Series[bool]) -> str:
    at = int(chosen.to_numpy().argmax())
    return f"{str(values.iloc[at])!r} in row {at + 1}"


def _defaults(tidy: pd.DataFrame, frame: pd.DataFrame, notes: list[str]) -> None:
    """Fill the columns that may be absent, and say so."""
    if "parametrization" in frame:
        tidy["parametrization"] = frame["parametrization"].fillna("unknown").astype(str).str.strip()
    else:
        tidy["parametrization"] = "unknown"
        notes.append('no column parametrization: all runs count as "unknown"')
    if "seed" in frame:
        tidy["seed"] = frame["seed"].fillna(0).astype(str).str.removesuffix(".0")
    else:
        tidy["seed"] = "0"
        notes.append("no column seed: all runs count as seed 0")
    absent = [name for name in ("depth", "batch_tokens", "tokens") if name not in frame]
    if absent:
        notes.append(f"no column {', '.join(absent)}: taken as one level each")
    tidy["status"] = frame["status"].fillna("").astype(str).str.strip().str.lower() if "status" in frame else ""
    tidy["run_id"] = frame["run_id"].astype(str) if "run_id" in frame else ""


def _usable(tidy: pd.DataFrame, notes: list[str]) -> pd.Series[bool]:
    """Mark divergences (loss NaN, column `diverged`) and say which rows are runs at all."""
    import numpy as np

    said = tidy["status"].isin(DIVERGED)
    unfinished = ~said & ~tidy["status"].isin(FINISHED)
    if unfinished.any():
        names = ", ".join(sorted(set(tidy["status"][unfinished])))
        notes.append(f"{int(unfinished.sum())} rows that are not finished runs (status {names}) dropped")
    lost = ~said & ~unfinished & ~np.isfinite(tidy["loss"])
    tidy["diverged"] = said | lost
    if said.any():
        notes.append(f"{int(said.sum())} diverged runs kept as divergences")
    if lost.any():
        notes.append(f"{int(lost.sum())} rows with a loss that is NaN, infinite or absent counted as diverged")
    tidy.loc[tidy["diverged"], "loss"] = np.nan
    tidy["status"] = np.where(tidy["diverged"], "diverged", "complete")
    return ~unfinished


def _without_duplicates(tidy: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    # log2 of one LR written as 0.0039 and 0.00390625 are two LRs; 1e-9 octaves only undoes rounding.
    tidy = tidy.assign(log2_lr=tidy["log2_lr"].round(9))
    repeated = tidy.duplicated([*CELL_COLUMNS, "log2_lr", "seed"], keep="first")
    if repeated.any():
        notes.append(f"{int(repeated.sum())} repeated runs of one (cell, learning rate, seed): the first is kept")
    return tidy[~repeated]
