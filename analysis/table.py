"""Tables of runs: from a study directory, a CSV, a Parquet file or a DataFrame to one tidy frame.

Owns the canonical columns, their defaults and every note on what was read, dropped or assumed.
Losses are in nats per token; learning rates enter as log2 of the peak LR.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaling.errors import DataError, Fault, MissingExtra, StudyError, raise_all
from scaling.hyperparameters import HYPERPARAMETERS

if TYPE_CHECKING:
    import pandas as pd

    from scaling.records import RunRecord

LEARNING_RATE = "learning rate"
CELL_COLUMNS = ("parametrization", "width", "depth", "batch_tokens", "tokens")
CANONICAL = (*CELL_COLUMNS, "lr", "log2_lr", "loss", "bound", "seed", "status", "params", "flops", "run_id")
NUMERIC = ("width", "depth", "batch_tokens", "tokens", "lr", "log2_lr", "loss", "bound", "params", "flops")
POSITIVE = ("width", "depth", "batch_tokens", "tokens", "lr", "params", "flops")
DIVERGED = ("diverged", "nan", "inf", "exploded")
PRUNED = "pruned"
"""A run ended early: `bound` is what its final loss is at least; nothing is known of it without one."""
SPELLINGS = {"mup": "mup", "μp": "mup", "µp": "mup", "sp": "sp"}
"""Lower case -> the name used here."""
MAX_LOG2_LR = 60
ABSURD_LOSS = 1e6
"""Nats per token; ln(vocabulary) is 11 at most in practice."""
FINISHED = ("complete", "completed", "finished", "done", "ok", "success", "")


@dataclass(frozen=True)
class Cell:
    """One (parametrization, width, depth, batch, tokens) at which the LR curve is sampled; None where the table does not say."""

    parametrization: str = "unknown"
    width: float | None = None
    depth: float | None = None
    batch_tokens: float | None = None
    tokens: float | None = None
    quantity: str = LEARNING_RATE
    """What is varied in the cell."""

    def size(self, axis: str) -> float:
        """Level of one numeric dimension; NaN where the table does not say."""
        value = getattr(self, axis)
        return float("nan") if value is None else float(value)

    @property
    def values(self) -> str:
        """Several values of what is varied, in words."""
        return "learning rates" if self.quantity == LEARNING_RATE else f"values of the {self.quantity}"

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

    frame: columns `CANONICAL` and `diverged` (bool; such a row has loss NaN); a row of status "pruned" has loss NaN and a finite `bound`.
    notes: what was read, dropped, assumed and why. own: {hyperparameter: {parametrization: its value in `frame`}} for those that vary;
    whole: the runs at other values too, with columns of these names.
    """

    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    whole: pd.DataFrame | None = field(default=None, repr=False)
    quantity: str = LEARNING_RATE
    """What the column log2_lr holds the log2 of; another hyperparameter in a table of lines (analysis.axes)."""

    def cells(self) -> Iterator[tuple[Cell, pd.DataFrame]]:
        """Each cell with its rows, ordered by parametrization and then by the numbers."""
        for key, rows in self.frame.groupby(list(CELL_COLUMNS), dropna=False, sort=True):
            name, *numbers = key
            levels = (float(str(number)) for number in numbers)
            width, depth, batch, tokens = (None if level != level else level for level in levels)
            yield Cell(str(name), width, depth, batch, tokens, self.quantity), rows

    @property
    def parametrizations(self) -> list[str]:
        return sorted(set(self.frame["parametrization"]))

    def __len__(self) -> int:
        return len(self.frame)


def load_table(
    source: Path | str | pd.DataFrame,
    columns: Mapping[str, str] | None = None,
    belongs: Callable[[RunRecord], bool] | None = None,
    own: Mapping[str, Mapping[str, float]] | None = None,
) -> RunTable:
    """Read runs from a study directory, a .csv or .parquet file, or a DataFrame.

    columns: {canonical name: name in the source}. belongs: for a study directory, which of its records to take. own: {hyperparameter:
    {parametrization: value}} at which LR curves are read, where runs at the same size, LR and seed differ; default: the most frequent.
    Raises DataError with all faults at once (a missing or unparsable column, rows that differ in a column that is not used),
    StudyError when a study holds no finished run, MissingExtra when Parquet needs pyarrow.
    """
    notes: list[str] = []
    raw, where = read_frame(source, belongs, notes)
    columns = dict(columns or {})
    raise_all(_mapping_faults(raw, columns, where), DataError)
    # A mapped name replaces a column that bears it already.
    replaced = [name for name in columns if name in raw.columns and name not in columns.values()]
    frame = raw.drop(columns=replaced).rename(columns={actual: name for name, actual in columns.items()})
    raise_all(_missing_faults(frame, where), DataError)
    unused = [str(name) for name in frame.columns if name not in (*CANONICAL, "data_seed", "diverged", *HYPERPARAMETERS)]
    notes.insert(0, f"{len(frame)} runs read from {where}" + (f"; columns not used: {', '.join(unused)}" if unused else ""))
    return _tidy(frame.reset_index(drop=True), where, notes, own or {})


def read_frame(
    source: Path | str | pd.DataFrame, belongs: Callable[[RunRecord], bool] | None, notes: list[str]
) -> tuple[pd.DataFrame, str]:
    """The rows of a study directory, a file or a DataFrame as they stand, and what to call it in messages."""
    import pandas as pd

    if isinstance(source, pd.DataFrame):
        return source.copy(), "the DataFrame"
    path = Path(source)
    if path.is_dir():
        return _read_study(path, belongs, notes), str(path)
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


def _read_study(path: Path, belongs: Callable[[RunRecord], bool] | None, notes: list[str]) -> pd.DataFrame:
    import pandas as pd

    from scaling.records import read_records

    rows = []
    records = list(read_records(path))
    strangers = [record.run_id for record in records if belongs is not None and not belongs(record)]
    if strangers:
        notes.append(f"{len(strangers)} runs of another config or other data are left out: {', '.join(strangers[:5])}")
    for record in records:
        if record.run_id in strangers:
            continue
        row = record.model_dump(include={*CANONICAL, "data_seed"})
        row["bound"] = None if record.pruned is None else record.pruned.bound
        row |= record.hyperparameters
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
        if name not in (*CANONICAL, *HYPERPARAMETERS):
            what = f"{name!r} is not a column this program knows"
            faults.append(Fault(f"column {name}={actual}", what, nearest(name, (*CANONICAL, *HYPERPARAMETERS))))
        if actual not in present:
            faults.append(Fault(f"{where}: column {actual!r}", "is not in the table", nearest(actual, present)))
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
    return f"map it with --column {name}=NAME; {nearest(name, present)}"


def nearest(name: str, candidates: Sequence[str]) -> str:
    """In words: the candidates that `name` may have meant, or all of them."""
    lowered = {candidate.lower(): candidate for candidate in candidates}
    near = [lowered[key] for key in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    near += [c for c in candidates if c not in near and (name.lower() in c.lower() or c.lower() in name.lower())]
    return f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(candidates)}"


def _tidy(frame: pd.DataFrame, where: str, notes: list[str], own: Mapping[str, Mapping[str, float]]) -> RunTable:
    import numpy as np
    import pandas as pd

    faults: list[Fault] = []
    tidy = pd.DataFrame(index=frame.index)
    for name in NUMERIC:
        if name in frame:
            tidy[name] = numbers_of(frame[name], name, where, faults)
        else:
            tidy[name] = np.nan
    raise_all(faults, DataError)
    if "log2_lr" not in frame:
        tidy["log2_lr"] = np.log2(tidy["lr"])
    raise_all(_lr_faults(tidy, where), DataError)
    tidy["lr"] = np.exp2(tidy["log2_lr"])
    missing = ~np.isfinite(tidy["log2_lr"]) | ~np.isfinite(tidy["width"])
    if missing.any():
        notes.append(f"{int(missing.sum())} rows without a learning rate or a width dropped")
    _defaults(tidy, frame, notes)
    keep = ~missing & _usable(tidy, notes)
    varied = _varied(tidy[keep], frame, where)
    for name in varied:
        tidy[name] = numbers_of(frame[name], name, where, faults)
    tidy = _replicates(tidy[keep], frame, where, notes, varied)
    if tidy.empty:
        raise DataError(Fault(where, "holds no usable run", "; ".join(notes)))
    return _split(tidy[[*CANONICAL, "diverged", *varied]].reset_index(drop=True), varied, own, notes)


def _varied(tidy: pd.DataFrame, frame: pd.DataFrame, where: str) -> list[str]:
    """The hyperparameters in which runs of the same size, LR and seed differ: those that were varied on their own."""
    key = [tidy[name].astype(str) for name in (*CELL_COLUMNS, "log2_lr", "seed")]
    faults: list[Fault] = []
    found = []
    for name in HYPERPARAMETERS:
        if name in frame and frame[name].nunique() > 1:
            numbers = numbers_of(frame[name], name, where, faults).reindex(tidy.index)
            found += [name] if (numbers.groupby(key).nunique() > 1).any() else []
    raise_all(faults, DataError)
    return found


def _split(tidy: pd.DataFrame, varied: Sequence[str], own: Mapping[str, Mapping[str, float]], notes: list[str]) -> RunTable:
    """LR curves are read at one value of everything else; the other runs are kept beside them."""

    if not varied:
        return RunTable(tidy, tuple(notes))
    values = {name: own.get(name) or _most_frequent(tidy, name) for name in varied}
    usual = at_own(tidy, values)
    words = ", ".join(f"{name} {text}" for name, text in ((name, _levels(values[name])) for name in varied))
    notes.append(
        f"learning rates are compared at {words}; {int((~usual).sum())} runs at other values belong to the axes of these"
    )
    frame = tidy[usual].drop(columns=list(varied)).reset_index(drop=True)
    return RunTable(frame, tuple(notes), values, tidy)


def _most_frequent(tidy: pd.DataFrame, name: str) -> dict[str, float]:
    return {
        str(kind): float(rows[name].mode().iloc[0]) for kind, rows in tidy.groupby("parametrization") if rows[name].notna().any()
    }


def _levels(values: Mapping[str, float]) -> str:
    distinct = dict.fromkeys(f"{value:.12g}" for value in values.values())
    return " or ".join(distinct)


def at_own(rows: pd.DataFrame, own: Mapping[str, Mapping[str, float]]) -> pd.Series[bool]:
    """Which rows have the own value of every hyperparameter of `own`; a missing value counts as it."""
    import numpy as np
    import pandas as pd

    usual = pd.Series(True, index=rows.index)
    for name, values in own.items():
        expected = rows["parametrization"].map(values).astype(float)
        usual &= rows[name].isna() | expected.isna() | pd.Series(np.isclose(rows[name], expected, rtol=1e-9), index=rows.index)
    return usual


def numbers_of(values: pd.Series[Any], name: str, where: str, faults: list[Fault]) -> pd.Series[float]:
    """A column as floats, missing ones NaN; adds to `faults` what is no number, or not positive where it must be."""
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
        names = frame["parametrization"].fillna("unknown").astype(str).str.strip()
        tidy["parametrization"] = names.where(~names.str.lower().isin(SPELLINGS), names.str.lower().map(SPELLINGS))
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
    """Mark divergences (loss NaN, column `diverged`) and pruned runs (loss NaN, `bound`), and say which rows are runs at all."""
    import numpy as np

    said = tidy["status"].isin(DIVERGED)
    pruned = tidy["status"] == PRUNED
    unbounded = pruned & ~np.isfinite(tidy["bound"])
    unfinished = ~said & ~pruned & ~tidy["status"].isin(FINISHED)
    if unfinished.any():
        names = ", ".join(sorted(set(tidy["status"][unfinished])))
        notes.append(f"{int(unfinished.sum())} rows that are not finished runs (status {names}) dropped")
    if (pruned & ~unbounded).any():
        notes.append(f"{int((pruned & ~unbounded).sum())} pruned runs bound the optimum and are no values")
    if unbounded.any():
        words = "pruned runs without a bound dropped: nothing is known of the loss that they would have ended with"
        notes.append(f"{int(unbounded.sum())} {words}")
    lost = ~said & ~pruned & ~unfinished & ~(tidy["loss"].abs() < ABSURD_LOSS)
    tidy["diverged"] = said | lost
    if said.any():
        notes.append(f"{int(said.sum())} diverged runs kept as divergences")
    if lost.any():
        notes.append(
            f"{int(lost.sum())} rows with a loss that is NaN, infinite, absent or above {ABSURD_LOSS:g} counted as diverged"
        )
    tidy.loc[tidy["diverged"] | pruned, "loss"] = np.nan
    tidy.loc[~pruned, "bound"] = np.nan
    tidy["status"] = np.select([tidy["diverged"], pruned], ["diverged", PRUNED], "complete")
    usable: pd.Series[bool] = ~unfinished & ~unbounded
    return usable


def _lr_faults(tidy: pd.DataFrame, where: str) -> list[Fault]:
    """An LR column in the wrong unit, or two that contradict each other: a verdict on them would be on nothing."""
    import numpy as np

    faults = []
    high = tidy["log2_lr"].abs() > MAX_LOG2_LR
    if (high & np.isfinite(tidy["log2_lr"])).any():
        what = f"{int(high.sum())} values beyond +-{MAX_LOG2_LR}, first {_first(tidy['log2_lr'], high)}"
        faults.append(Fault(f"{where}: column 'log2_lr'", what, "it holds log2 of the LR (-8 for 0.0039); give LRs as column lr"))
    differs = (np.log2(tidy["lr"]) - tidy["log2_lr"]).abs() > 0.01
    if differs.any():
        what = f"contradicts column 'lr' in {int(differs.sum())} rows, first {_first(tidy['log2_lr'], differs)}"
        faults.append(Fault(f"{where}: column 'log2_lr'", what, "remove one of the two, or map the right one with --column"))
    return faults


def _replicates(tidy: pd.DataFrame, frame: pd.DataFrame, where: str, notes: list[str], varied: Sequence[str]) -> pd.DataFrame:
    """Rows of one (cell, LR, seed): the same run written twice counts once; other ones are replicates, unless a column tells them apart.

    Raises DataError when a column that is not used here varies among them: they are different experiments, not seeds.
    """
    # log2 of one LR written as 0.0039 and 0.00390625 are two LRs; 1e-9 octaves only undoes rounding.
    tidy = tidy.assign(log2_lr=tidy["log2_lr"].round(9))
    key = [*CELL_COLUMNS, "log2_lr", "seed", *varied]
    copies = tidy.duplicated([*key, "loss", "diverged"], keep="first")
    if copies.any():
        notes.append(f"{int(copies.sum())} rows that repeat another one, loss included, are left out")
        tidy = tidy[~copies]
    repeated = tidy.duplicated(key, keep=False)
    if not repeated.any():
        return tidy
    unused = [name for name in frame.columns if name not in (*CANONICAL, *varied)]
    groups = frame.loc[tidy.index[repeated], unused].groupby([tidy.loc[repeated, name].astype(str) for name in key])
    telling = [str(name) for name in unused if (groups[name].nunique(dropna=False) == groups.size()).all()]
    if telling:
        what = (
            f"{int(repeated.sum())} rows share parametrization, width, learning rate and seed, and differ in {', '.join(telling)}"
        )
        cure = f"a replicate: --column seed={telling[0]}; a parametrization: --column parametrization={telling[0]}; else one table each"
        raise DataError(Fault(where, what, cure))
    number = tidy[repeated].groupby(key, dropna=False).cumcount()
    notes.append(f"{int(repeated.sum())} rows share their cell, learning rate and seed: taken as replicates (no column seed?)")
    return tidy.assign(seed=tidy["seed"].where(~repeated, tidy["seed"] + "#" + number.reindex(tidy.index).astype(str)))
