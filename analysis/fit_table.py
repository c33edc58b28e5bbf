"""What a scaling-law fit needs of a table: sizes, tokens, compute, losses, and an account of every row that it leaves out.

Owns `FitTable` and `load_fit_table`. Sizes are parameters, tokens are tokens seen, compute is FLOP, losses are nats per token (bits are
converted where the caller says so). Every number is a float before any product, so that 6 N D cannot overflow. Nothing is counted or
converted silently: the notes say what was read, derived, dropped and why, with counts.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.laws import Array
from analysis.table import ABSURD_LOSS, DIVERGED, FINISHED, load_table, nearest, numbers_of, read_frame
from scaling.errors import DataError, Fault, raise_all

if TYPE_CHECKING:
    import pandas as pd

SIZES = ("params", "tokens", "flops", "unique_tokens", "experts")
MEASURED = ("loss", "stderr", "weight", "lr", "step")
WORDS = ("status", "seed", "parametrization", "group", "schedule", "run_id")
KNOWN = (*SIZES, *MEASURED, *WORDS)
FLOP_CONVENTION = "6 x params x tokens"
FLOP_TOLERANCE = 0.1
"""A column flops further than this from 6 N D, as a share, counts FLOP in another way."""
PARAMS_INCLUDE = ("embedding", "non-embedding")
"""Whether the column params counts embeddings: at small sizes exponents depend on it."""
LOSS_UNITS = {"nats": 1.0, "bits": float(np.log(2.0))}
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, eq=False)
class FitTable:
    """Rows that a law is fitted to.

    columns: {size: (n,)} of those the table has; loss (n,) in nats per token; weights (n,) or None; groups (n,) names of what was
    repeated or logged together, or None; notes: what was read, derived and dropped; sha256: of the numbers that remain.
    """

    columns: Mapping[str, Array]
    loss: Array
    weights: Array | None = None
    groups: np.ndarray[Any, Any] | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """What makes a fit of these rows doubtful."""
    conventions: Mapping[str, str] = field(default_factory=dict)
    """{"params": one of PARAMS_INCLUDE or "not stated", "flops": how compute was counted}."""
    stderr_known: bool = False
    """Whether the weights are 1 / stderr^2, in nats, and not relative."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.columns):
            digest.update(name.encode() + np.ascontiguousarray(self.columns[name]).tobytes())
        digest.update(self.loss.tobytes())
        return digest.hexdigest()

    def rows(self, chosen: Array | np.ndarray[Any, Any]) -> FitTable:
        """The chosen rows (mask or indices), notes kept."""
        return replace(
            self,
            columns={name: values[chosen] for name, values in self.columns.items()},
            loss=self.loss[chosen],
            weights=None if self.weights is None else self.weights[chosen],
            groups=None if self.groups is None else self.groups[chosen],
        )

    @property
    def size(self) -> Array:
        """What orders the rows from small to large: compute, else parameters, else whatever the table has."""
        return self.columns[next(name for name in ("flops", *SIZES) if name in self.columns)]

    def require(self, names: Sequence[str]) -> None:
        """Raise DataError where columns are missing."""
        faults = [
            Fault(f"column {name!r}", "is missing", f"map it with --column {name}=NAME (columns={{{name!r}: NAME}} in Python)")
            for name in names
            if name not in self.columns
        ]
        raise_all(faults, DataError)


def load_fit_table(
    source: Path | str | pd.DataFrame | FitTable,
    columns: Mapping[str, str] | None = None,
    *,
    where: Sequence[str] = (),
    loss_unit: str = "nats",
    all_lrs: bool = False,
    parametrization: str | None = None,
    params_include: str | None = None,
    curves: bool = False,
) -> FitTable:
    """Read a study directory, a .csv or .parquet file or a DataFrame.

    columns: {name here: name in the source}. where: conditions such as "loss<4" or "dataset=c4", over the source's columns. loss_unit:
    nats or bits, per token. all_lrs: keep every learning rate of a size; default: the one with the lowest loss, where several were run.
    params_include: one of PARAMS_INCLUDE, what the column params counts; a study's are known. curves: keep every checkpoint of a
    run (column run_id, which becomes the groups) and every learning rate. Raises DataError with all faults at once.
    """
    if isinstance(source, FitTable):
        named = (parametrization, params_include) != (None, None)
        if columns or where or all_lrs or curves or named or loss_unit != "nats":
            raise DataError(
                Fault("a FitTable", "is read already: columns, where and the like cannot apply", "give the file instead")
            )
        return source
    notes: list[str] = []
    frame, place = raw_rows(source, columns or {}, notes)
    frame = rows_where(frame, where, place, notes)
    if loss_unit not in LOSS_UNITS:
        raise DataError(Fault(f"loss unit {loss_unit!r}", "is not known", f"choose from: {', '.join(LOSS_UNITS)}"))
    faults = _missing(frame, place)
    counted = _params_convention(source, columns or {}, params_include, faults)
    raise_all(faults, DataError)
    numbers = {name: numbers_of(frame[name], name, place, faults) for name in (*SIZES, *MEASURED) if name in frame}
    for name in ("unique_tokens", "experts", "stderr", "weight"):
        if name in numbers and (numbers[name] <= 0).any():
            faults.append(Fault(f"{place}: column {name!r}", "has values that are not positive", "correct or remove these rows"))
    raise_all(faults, DataError)
    tidy = frame[[name for name in WORDS if name in frame]].assign(**numbers).reset_index(drop=True)
    for name in {"loss", "stderr"} & set(tidy):
        tidy[name] *= LOSS_UNITS[loss_unit]
    if loss_unit != "nats":
        notes.append(f"losses converted from {loss_unit} to nats")
    tidy = _parametrization(tidy, parametrization, place, notes)
    tidy, derived = _sizes(tidy, notes)
    tidy = _finished(tidy, notes)
    tidy = _curves(tidy, place, notes) if curves else _once(tidy, notes, all_lrs)
    if tidy.empty:
        raise DataError(Fault(place, "holds no usable run", "; ".join(notes)))
    return _table(tidy, notes, _conventions(tidy, derived, counted, notes))


def raw_rows(
    source: Path | str | pd.DataFrame, columns: Mapping[str, str], notes: list[str], known: Sequence[str] = KNOWN
) -> tuple[pd.DataFrame, str]:
    """The source's rows under our names, of which there are `known`."""
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        table = load_table(source)
        notes += table.notes
        frame, place = (table.frame if table.whole is None else table.whole).dropna(axis=1, how="all"), str(source)
    else:
        frame, place = read_frame(source, None, notes)
        notes.append(f"{len(frame)} rows read from {place}")
    present, faults = [str(name) for name in frame.columns], []
    for name, actual in columns.items():
        if name not in known:
            faults.append(Fault(f"column {name}={actual}", f"{name!r} is not a column this program knows", nearest(name, known)))
        if actual not in present:
            faults.append(Fault(f"{place}: column {actual!r}", "is not in the table", nearest(actual, present)))
    raise_all(faults, DataError)
    # A mapped column stays under its own name too, for conditions; one that bears the name already is replaced.
    return frame.assign(**{name: frame[actual] for name, actual in columns.items()}), place


def rows_where(frame: pd.DataFrame, conditions: Sequence[str], place: str, notes: list[str]) -> pd.DataFrame:
    """The rows that meet every condition such as "loss<4"; raises DataError for those that cannot be read."""
    import pandas as pd

    faults = []
    for text in conditions:
        match = re.fullmatch(r"\s*(.+?)\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*", text)
        if match is None:
            faults.append(
                Fault(f"--where {text}", "is not of the form NAME=VALUE, NAME<VALUE, ...", "for example --where 'loss<4'")
            )
            continue
        name, sign, value = match.groups()
        if name not in frame:
            faults.append(
                Fault(f"--where {text}", f"{place} has no column {name!r}", nearest(name, [str(c) for c in frame.columns]))
            )
            continue
        number, numbers = pd.to_numeric(value, errors="coerce"), pd.to_numeric(frame[name], errors="coerce")
        if number != number and sign not in ("=", "!="):
            faults.append(Fault(f"--where {text}", f"{value!r} is not a number", "words are compared with = and !="))
            continue
        left, right = (frame[name].astype(str), value) if number != number else (numbers, number)
        keep = COMPARISONS[sign](left, right)
        notes.append(f"{int((~keep).sum())} rows left out that do not meet {name}{sign}{value}")
        frame = frame[keep]
    raise_all(faults, DataError)
    return frame


def _missing(frame: pd.DataFrame, place: str) -> list[Fault]:
    present = [str(name) for name in frame.columns]
    faults = []
    if "loss" not in present:
        faults.append(
            Fault(f"{place}: column 'loss'", "is missing", f"map it with --column loss=NAME; {nearest('loss', present)}")
        )
    if not any(name in present for name in SIZES):
        cure = f"map them: --column params=NAME --column tokens=NAME; {nearest('params', present)}"
        faults.append(Fault(f"{place}: columns {', '.join(SIZES[:3])}", "are all missing", cure))
    return faults


def _parametrization(tidy: pd.DataFrame, wanted: str | None, place: str, notes: list[str]) -> pd.DataFrame:
    """Runs of one parametrization: two of them follow two laws."""
    there = sorted(set(tidy["parametrization"].astype(str))) if "parametrization" in tidy else []
    if wanted is None and len(there) > 1:
        cure = f"choose one: --parametrization {there[0]}"
        raise DataError(Fault(place, f"holds runs of several parametrizations ({', '.join(there)})", cure))
    if wanted is None:
        return tidy
    if wanted not in there:
        cure = f"choose from: {', '.join(there)}" if there else "leave it out: the table has no column parametrization"
        raise DataError(Fault(f"--parametrization {wanted}", f"is not in {place}", cure))
    keep = tidy["parametrization"].astype(str) == wanted
    notes.append(f"{int((~keep).sum())} runs of other parametrizations left out")
    return tidy[keep]


def _sizes(tidy: pd.DataFrame, notes: list[str]) -> tuple[pd.DataFrame, str]:
    """Derive the one of params, tokens and flops that is missing, and name it; all are floats by now."""
    have = {"params", "tokens", "flops"} & set(tidy)
    if have == {"params", "tokens"}:
        notes.append(f"no column flops: {FLOP_CONVENTION}")
        return tidy.assign(flops=6.0 * tidy["params"] * tidy["tokens"]), "flops"
    if have == {"params", "flops"}:
        notes.append("no column tokens: flops / (6 x params)")
        return tidy.assign(tokens=tidy["flops"] / (6.0 * tidy["params"])), "tokens"
    if have == {"tokens", "flops"}:
        notes.append("no column params: flops / (6 x tokens)")
        return tidy.assign(params=tidy["flops"] / (6.0 * tidy["tokens"])), "params"
    return tidy, ""


def _params_convention(
    source: Path | str | pd.DataFrame, columns: Mapping[str, str], stated: str | None, faults: list[Fault]
) -> str | None:
    """What the column params counts: as stated, or as a study's records say (all tensors)."""
    if stated is not None and stated not in PARAMS_INCLUDE:
        faults.append(Fault(f"--params-include {stated}", "is not known", f"choose from: {', '.join(PARAMS_INCLUDE)}"))
    study = isinstance(source, (str, Path)) and Path(source).is_dir() and "params" not in columns
    if study and stated == "non-embedding":
        cure = "leave --params-include out, or map a column: --column params=NAME"
        faults.append(Fault(f"--params-include {stated}", "the params of a study count every tensor, embeddings too", cure))
    return "embedding" if study else stated


def _conventions(tidy: pd.DataFrame, derived: str, counted: str | None, notes: list[str]) -> dict[str, str]:
    """What the sizes of the rows that are fitted mean, said in the notes too."""
    found = {}
    if "params" in tidy:
        found["params"] = counted or "not stated"
        words = {"embedding": "params count embeddings", "non-embedding": "params leave embeddings out"}
        ask = f"whether params count embeddings is not stated (--params-include {' or '.join(PARAMS_INCLUDE)})"
        notes.append(words.get(found["params"], ask))
    if "flops" in tidy:
        found["flops"] = FLOP_CONVENTION if derived else "as given"
    if {"params", "tokens", "flops"} <= set(tidy) and not derived:
        ratio = tidy["flops"] / (6.0 * tidy["params"] * tidy["tokens"])
        low, high = float(ratio.min()), float(ratio.max())
        same = abs(low - 1) < 0.001 and abs(high - 1) < 0.001
        found["flops"] = FLOP_CONVENTION if same else f"{low:.3g} to {high:.3g} times {FLOP_CONVENTION}"
        far = max(1 - low, high - 1) > FLOP_TOLERANCE
        apart = f": more than {100 * FLOP_TOLERANCE:g} % apart; a budget that is split is taken as {FLOP_CONVENTION}"
        notes.append(f"column flops is {found['flops']}{apart if far else ''}")
    return found


def _finished(tidy: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Only finished runs with a finite loss and sizes: a law of the loss says nothing about divergence."""
    if "status" in tidy:
        status = tidy["status"].fillna("").astype(str).str.strip().str.lower()
        diverged = status.isin(DIVERGED)
        unfinished = ~diverged & ~status.isin(FINISHED)
        if unfinished.any():
            names = ", ".join(sorted(set(status[unfinished])))
            notes.append(f"{int(unfinished.sum())} rows that are not finished runs (status {names}) dropped")
        if diverged.any():
            notes.append(f"{int(diverged.sum())} diverged runs dropped")
        tidy = tidy[~diverged & ~unfinished]
    finite = np.isfinite(tidy["loss"]) & (tidy["loss"].abs() < ABSURD_LOSS)
    if (~finite).any():
        notes.append(f"{int((~finite).sum())} rows with a loss that is NaN, infinite, absent or above {ABSURD_LOSS:g} dropped")
    tidy = tidy[finite]
    positive = tidy["loss"] > 0
    if (~positive).any():
        notes.append(f"{int((~positive).sum())} rows with a loss that is not positive dropped")
    tidy = tidy[positive]
    # A column with no entry at all is no column of this table.
    tidy = tidy.dropna(axis=1, how="all")
    sized = np.isfinite(tidy[[name for name in SIZES if name in tidy]].to_numpy(float)).all(axis=1)
    if (~sized).any():
        notes.append(f"{int((~sized).sum())} rows without a size dropped")
    usable: pd.DataFrame = tidy.loc[sized]
    return usable


def _once(tidy: pd.DataFrame, notes: list[str], all_lrs: bool) -> pd.DataFrame:
    """One row for each run, and, unless all are asked for, the best learning rate of each size."""
    if "step" in tidy and "run_id" in tidy and tidy["run_id"].duplicated().any():
        last = tidy.groupby("run_id")["step"].transform("max") == tidy["step"]
        notes.append(f"{int((~last).sum())} earlier checkpoints dropped: their learning rate had not decayed")
        tidy = tidy[last]
    copies = tidy.duplicated(keep="first")
    if copies.any():
        notes.append(f"{int(copies.sum())} rows that repeat another one, loss included, are left out")
        tidy = tidy[~copies]
    sizes = [name for name in SIZES if name in tidy and name != "flops"] or ["flops"]
    if "lr" in tidy and not all_lrs and len(tidy) and (tidy.groupby(sizes)["lr"].nunique() > 1).any():
        best = tidy.groupby(sizes)["loss"].idxmin().map(tidy["lr"].to_dict())
        wanted = tidy.set_index(sizes).index.map(best.to_dict())
        keep = np.asarray(tidy["lr"].to_numpy() == np.asarray(wanted, dtype=float)) | tidy["lr"].isna().to_numpy()
        notes.append(f"{int((~keep).sum())} runs at other learning rates than the best of their size left out")
        tidy = tidy[keep]
    repeated = tidy.duplicated(sizes, keep=False)
    if repeated.any():
        notes.append(f"{int(repeated.sum())} rows share their sizes: taken as replicates")
    return tidy


def _curves(tidy: pd.DataFrame, place: str, notes: list[str]) -> pd.DataFrame:
    """Every checkpoint of every run, once."""
    if "run_id" not in tidy:
        raise DataError(
            Fault(f"{place}: column 'run_id'", "is missing: it says which rows are one curve", "map it with --column run_id=NAME")
        )
    copies = tidy.duplicated(keep="first")
    if copies.any():
        notes.append(f"{int(copies.sum())} rows that repeat another one, loss included, are left out")
    notes.append(f"{tidy['run_id'].nunique()} runs with all their checkpoints")
    return tidy[~copies].assign(group=tidy["run_id"].astype(str))


def _table(tidy: pd.DataFrame, notes: list[str], conventions: Mapping[str, str]) -> FitTable:
    warnings = []
    if "schedule" in tidy and tidy["schedule"].nunique() > 1:
        counts = ", ".join(f"{count} {name}" for name, count in tidy["schedule"].value_counts().items())
        warnings.append(f"runs of several LR schedules are fitted together ({counts})")
    weights = None
    if "stderr" in tidy and "weight" in tidy:
        raise DataError(Fault("columns 'stderr' and 'weight'", "both say how sure a loss is", "leave one out"))
    if "stderr" in tidy:
        weights = (1 / tidy["stderr"].to_numpy(float)) ** 2
        notes.append("rows weighted by 1 / stderr^2")
    elif "weight" in tidy:
        weights = tidy["weight"].to_numpy(float)
        notes.append("rows weighted by column weight")
    if weights is not None and not np.isfinite(weights).all():
        raise DataError(Fault("column 'stderr' or 'weight'", "has empty entries", "fill them, or leave the column out"))
    columns = {name: tidy[name].to_numpy(float) for name in SIZES if name in tidy}
    groups = tidy["group"].astype(str).to_numpy() if "group" in tidy else None
    return FitTable(
        columns, tidy["loss"].to_numpy(float), weights, groups, tuple(notes), tuple(warnings), conventions, "stderr" in tidy
    )
