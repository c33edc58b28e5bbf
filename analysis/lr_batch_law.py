"""Laws of the best learning rate and batch: power laws of parameters, tokens or FLOP from grids of runs at several sizes.

Owns `fit_lr_batch`. method "joint": one loss surface for all sizes whose optimum follows the law (analysis.lr_batch_surface);
"two-stage": a regression of the logs of all runs within a tolerance of their size's best (Step Law's procedure, 2503.04715).
Sizes whose best run lies at an edge enter as inequalities or not at all. Exponents that the sizes do not identify are refused.
Intervals are percentiles over resampled sizes. A law is scored by the loss that it gives away on the grids, in the sample
and with each size left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from analysis.batch_table import SAME, GridCell, LrBatchTable, load_lr_batch_table
from analysis.fit_guards import CORRELATION, DECADE, MOVED
from analysis.fit_result import Estimate
from analysis.fit_search import Starts
from analysis.fit_uncertainty import LEVEL
from analysis.law import Array
from analysis.law_fit import checked_options
from analysis.lr_batch_cells import cell_optimum
from analysis.lr_batch_frontier import WALL, frontier
from analysis.lr_batch_result import LrBatchFit, LrBatchLine, Plateau
from analysis.lr_batch_score import Score, excess_losses, published_scores
from analysis.lr_batch_surface import JointFit, Surface, fit_surface, window_rows
from scaling.errors import DataError, Fault

if TYPE_CHECKING:
    import pandas as pd

OPTIONS = ("method", "window", "by", "batch_by", "tolerance", "draws", "left_out")
METHODS = ("joint", "two-stage")
SIZES = ("params", "tokens", "flops")
WINDOW, TOLERANCE = 0.01, 0.0025
"""Rise over the best run, as shares of the loss: runs that the surface is fitted to; runs that count as near-optimal
(2401.02954, 2503.04715).
"""
PLATEAUS = (0.001, 0.0025)
DRAWS = 200
COSTLY = 0.0025
"""A mean excess loss of left-out sizes from which the law is not to be trusted: more than what counts as near-optimal."""
FORMULA = "log best lr, log best batch = k + sum of exponent x log size"
SOURCES = {"joint": "one loss surface for all sizes", "two-stage": "regression of near-optimal runs, Li et al. 2025"}
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class _Settings:
    method: str
    window: float
    tolerance: float
    draws: int
    left_out: bool
    by: tuple[str, ...] | None
    batch_by: tuple[str, ...] | None


@dataclass(frozen=True, eq=False)
class _Engine:
    """One fit: the line (centre (k,), slopes (k, r)), a refit for weights of cells (c,), and what only the joint model has."""

    centre: Array
    slopes: Array
    refit: Callable[[Array], tuple[Array, Array, float] | None]
    joint: JointFit | None
    runs: int


def fit_lr_batch(
    source: Path | str | pd.DataFrame | LrBatchTable,
    *,
    columns: Mapping[str, str] | None = None,
    where: Sequence[str] = (),
    loss_unit: str = "nats",
    parametrization: str | None = None,
    level: float = LEVEL,
    **options: Any,
) -> LrBatchFit:
    """Fit the law of what was searched: learning rate and batch together, or the one that varies within sizes.

    options: method, "joint" or "two-stage"; window, share of the loss (joint); tolerance, share (two-stage); by, sizes that the
    law reads ("params,tokens", "flops", ...; default: those that the table identifies); batch_by, the same for the batch alone;
    draws of the bootstrap; left_out=False: do not predict each size from the others. Raises DataError.
    """
    settings = _settings(options)
    if isinstance(source, LrBatchTable):
        table = source
    else:
        table = load_lr_batch_table(source, columns, where=where, loss_unit=loss_unit, parametrization=parametrization)
    regressors, free, flags = _regressors(table, settings)
    logs = np.stack([np.log(table.column(name)) for name in regressors], axis=1)
    middle = logs.mean(axis=0)
    optima = tuple(cell_optimum(cell, settings.window, level) for cell in table.cells)
    kept = np.array([not cell.edges() for cell in table.cells])
    needed = 1 + int(free.sum(axis=1).max()) + 1
    if kept.sum() < needed:
        what = f"has {int(kept.sum())} sizes whose best run is not at an edge, and the law needs {needed}"
        raise DataError(Fault("the table", what, _cure(table)))
    engine = _engine(table.cells, logs - middle, free, settings)
    draws = _draws(engine, kept, settings.draws, needed)
    line = LrBatchLine(
        table.knobs,
        regressors,
        free,
        middle,
        engine.centre,
        engine.slopes,
        draws[0],
        draws[1],
        int(kept.sum()),
        level,
        _spans(table, regressors),
    )
    params = line.params()
    in_sample = excess_losses(table.cells, line.logs(logs))
    left_out = _left_out(table.cells, logs, free, kept, settings) if settings.left_out else np.full(len(kept), np.nan)
    scores = (
        Score.of("this law", line.formula(), in_sample),
        Score.of("this law, each size predicted from the others", line.formula(), left_out),
        *published_scores(table.cells),
    )
    if engine.joint is not None and not engine.joint.cubic:
        flags.append(
            "with cubic terms the optima leave the runs: fitted without, blind to how much faster loss rises above the best LR"
        )
    windows = _windows(table, logs - middle, free, settings, line) if engine.joint else ()
    flags += _flags(table, regressors, kept, scores[1], draws[2], settings) + _window_flags(params, windows)
    joint = engine.joint
    surface = joint.surface if joint else None
    plateaus = (
        tuple(_plateau(surface, index, knob, share, table) for index, knob in enumerate(table.knobs) for share in PLATEAUS)
        if surface
        else ()
    )
    starts = (
        Starts(len(joint.costs), joint.at_optimum, max(joint.costs) / max(min(joint.costs), 1e-300))
        if joint
        else Starts(1, 1, 1.0)
    )
    notes = [*table.notes, *_row_notes(table.cells, settings, engine.runs)]
    notes += [f"{optimum.name}: {optimum.reason}" for optimum in optima if optimum.reason]
    if settings.method == "two-stage":
        notes.append("intervals of two-stage are too narrow: near-optimal runs of an asymmetric bottom are not centred on it")
    return LrBatchFit(
        "lr-batch", FORMULA, SOURCES[settings.method], level, params, min(joint.costs) / 1e6 if joint else float("nan"), starts,
        joint.converged if joint else True, tuple(flags), tuple(notes), settings.method, line, optima, scores, plateaus,
        _ridge(surface, draws[3], int(kept.sum()), level), surface, windows,
        frontier(table.cells), table,
    )  # fmt: skip


def _cure(table: LrBatchTable) -> str:
    """What would give more sizes an optimum between their runs; first of all, that all of them search the same."""
    held = {knob: [cell for cell in table.cells if np.ptp(cell.logs[:, index]) < SAME] for index, knob in enumerate(table.knobs)}
    words = [
        f"{len(cells)} of {len(table.cells)} sizes have one {knob}: keep one with --where {knob}=NUMBER, or vary it there"
        for knob, cells in held.items()
        if cells
    ]
    return "; ".join(words or ["extend the grids of the others", "or give fewer sizes to the law with by"])


def _settings(options: Mapping[str, Any]) -> _Settings:
    checked_options("lr-batch", options, OPTIONS)
    method = options.get("method", "joint")
    if method not in METHODS:
        raise DataError(Fault(f"method {method!r}", "is not known", f"choose from: {', '.join(METHODS)}"))
    numbers = {"window": WINDOW, "tolerance": TOLERANCE, "draws": DRAWS}
    for name, default in numbers.items():
        value = options.get(name, default)
        whole = name == "draws"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (20 <= value <= 1e5 if whole else 0 < value < 1):
            raise DataError(
                Fault(
                    f"{name} {value!r}", "is out of range", "from 20 up" if whole else f"a share of the loss such as {default:g}"
                )
            )
        numbers[name] = value
    by, batch_by = (_names(name, options.get(name)) for name in ("by", "batch_by"))
    return _Settings(
        method,
        float(numbers["window"]),
        float(numbers["tolerance"]),
        int(numbers["draws"]),
        bool(options.get("left_out", True)),
        by,
        batch_by,
    )


def _names(option: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(part.strip() for part in given.split(",")) if isinstance(given, str) else tuple(given)
    unknown = [name for name in names if name not in SIZES]
    if unknown or not names or len(set(names)) < len(names):
        raise DataError(
            Fault(f"{option} {given!r}", "is no list of sizes", f"choose from: {', '.join(SIZES)}, as in params,tokens")
        )
    return names


def _regressors(table: LrBatchTable, settings: _Settings) -> tuple[tuple[str, ...], Mask, list[str]]:
    """Sizes that the law reads, which knob reads which (k, r), and what is refused. Raises DataError for refused ones that were
    asked for.
    """
    flags: list[str] = []
    asked = tuple(dict.fromkeys((*(settings.by or ()), *(settings.batch_by or ()))))
    faults = [
        Fault(f"by {name}", "is no column of the table", f"map it with --column {name}=NAME")
        for name in asked
        if name not in table.sizes
    ]
    faults += [
        Fault(f"by {name}", reason, "leave it out, or run several levels of it")
        for name in asked
        if name in table.sizes and (reason := _one_level(table, name))
    ]
    if not faults:
        groups = [group for group in (settings.by, settings.batch_by) if group]
        faults += [
            Fault(f"by {','.join(group)}", reason, "name one of them alone, or flops")
            for group in groups
            if (reason := _collinear(table, group))
        ]
    if faults:
        raise DataError(*faults)
    own = settings.by or _identified(table, flags)
    batch = settings.batch_by or own
    regressors = tuple(dict.fromkeys((*own, *batch)))
    free = np.array([[name in (batch if knob == "batch_tokens" else own) for name in regressors] for knob in table.knobs])
    used = free.any(axis=0)
    return tuple(np.array(regressors)[used].tolist()), free[:, used], flags


def _one_level(table: LrBatchTable, name: str) -> str:
    values = table.column(name)
    return f"has one level ({values[0]:.4g}): its exponent is not identified" if np.ptp(np.log(values)) < SAME else ""


def _collinear(table: LrBatchTable, names: Sequence[str]) -> str:
    """Why these sizes cannot be told apart, in words; empty where they can."""
    if len(names) > 2:
        return "holds flops, which is a product of the others: their exponents are not separable"
    for first, second in combinations(names, 2):
        logs = np.log(table.column(first)), np.log(table.column(second))
        if {first, second} == {"params", "tokens"} and np.ptp(logs[1] - logs[0]) < 0.02:
            ratio = float(np.exp(np.mean(logs[1] - logs[0])))
            return f"tokens are {ratio:.4g} times params at every size: their exponents are not separable"
        if abs(float(np.corrcoef(*logs)[0, 1])) > CORRELATION:
            return f"{first} and {second} are collinear: their exponents are not separable"
    return ""


def _identified(table: LrBatchTable, flags: list[str]) -> tuple[str, ...]:
    """What the table identifies of params and tokens; compute where the two go together."""
    there = [name for name in table.sizes if name != "flops"] or list(table.sizes)
    varied = [name for name in there if not _one_level(table, name)]
    flags += [f"{name} {_one_level(table, name)}; refused" for name in there if name not in varied]
    if not varied:
        raise DataError(
            Fault(
                "the table",
                "holds one size: a law of size is refused",
                "run several sizes; `mutransfer transfer` reads single optima",
            )
        )
    if len(varied) > 1 and (reason := _collinear(table, varied)):
        flags.append(
            f"{reason}; refused: a law of flops along these sizes is given instead"
            if "flops" in table.sizes
            else f"{reason}; refused"
        )
        return ("flops",) if "flops" in table.sizes else (varied[0],)
    return tuple(varied)


def _spans(table: LrBatchTable, regressors: Sequence[str]) -> dict[str, tuple[float, float]]:
    return {name: (float(table.column(name).min()), float(table.column(name).max())) for name in regressors}


def _engine(cells: Sequence[GridCell], sizes: Array, free: Mask, settings: _Settings) -> _Engine:
    if settings.method == "two-stage":
        return _two_stage(cells, sizes, free, settings.tolerance)
    rows = window_rows(cells, sizes, settings.window)
    least = int(free.sum()) + rows.knobs * (rows.knobs + 3) // 2 + (4 if rows.knobs == 2 else 1) + len(np.unique(rows.cell))
    if len(rows.rise) <= least:
        what = (
            f"has {len(rows.rise)} runs within {100 * settings.window:g} % of their size's best, and the surface {least} numbers"
        )
        raise DataError(Fault("the table", what, "widen the window, run more near the best, or take method two-stage"))
    found = fit_surface(rows, free, _resolution(cells))

    def refit(weights: Array) -> tuple[Array, Array, float] | None:
        surface = found.refit(weights)
        return None if surface is None else (surface.centre, surface.slopes, surface.ridge)

    return _Engine(found.surface.centre, found.surface.slopes, refit, found, len(rows.rise))


def _resolution(cells: Sequence[GridCell]) -> float:
    """Median log step of the grids."""
    steps = [np.diff(np.unique(cell.logs[:, index].round(6))) for cell in cells for index in range(len(cell.knobs))]
    return float(np.median(np.concatenate(steps)))


def _two_stage(cells: Sequence[GridCell], sizes: Array, free: Mask, tolerance: float) -> _Engine:
    near = [cell.logs[cell.rise <= tolerance] if not cell.edges() else cell.logs[:0] for cell in cells]
    places, member = np.concatenate(near), np.repeat(np.arange(len(cells)), [len(part) for part in near])

    def solve(weights: Array) -> tuple[Array, Array, float] | None:
        centre, slopes = np.zeros(len(free)), np.zeros(free.shape)
        scale = np.sqrt(weights[member])
        for knob in range(len(free)):
            design = np.concatenate([np.ones((len(member), 1)), sizes[member][:, free[knob]]], axis=1)
            found, _, rank, _ = np.linalg.lstsq(design * scale[:, None], places[:, knob] * scale, rcond=None)
            if rank < design.shape[1]:
                return None
            centre[knob], slopes[knob, free[knob]] = found[0], found[1:]
        return centre, slopes, float("nan")

    whole = solve(np.ones(len(cells)))
    if whole is None:
        raise DataError(
            Fault(
                "the table", "has too few near-optimal runs for the exponents", "give fewer sizes with by, or a larger tolerance"
            )
        )
    return _Engine(whole[0], whole[1], solve, None, len(member))


def _draws(engine: _Engine, kept: Mask, count: int, needed: int) -> tuple[Array, Array, int, Array]:
    """Bootstrap over sizes: centres (B, k), slopes (B, k, r), refits that failed, ridges (B,)."""
    random = np.random.default_rng(0)
    centres, slopes, ridges, failed = [], [], [], 0
    inside = np.flatnonzero(kept)
    for _ in range(count):
        picked = random.choice(inside, len(inside))
        weights = np.bincount(picked, minlength=len(kept)).astype(float)
        # What a censored size says is an inequality, which is not resampled.
        weights[~kept] = 1.0
        found = engine.refit(weights) if len(np.unique(picked)) >= needed - 1 else None
        if found is None:
            failed += 1
            continue
        centres.append(found[0])
        slopes.append(found[1])
        ridges.append(found[2])
    shape = engine.slopes.shape
    return np.array(centres).reshape(-1, shape[0]), np.array(slopes).reshape(-1, *shape), failed, np.array(ridges)


def _left_out(cells: Sequence[GridCell], logs: Array, free: Mask, kept: Mask, settings: _Settings) -> Array:
    """Excess loss of every size under the law of the others; NaN where that cannot be fitted or read off."""
    found = np.full(len(cells), np.nan)
    if kept.sum() < 2 + int(free.sum(axis=1).max()):
        return found
    for index in np.flatnonzero(kept).tolist():
        others = np.arange(len(cells)) != index
        middle = logs[others].mean(axis=0)
        try:
            engine = _engine(
                [cell for cell, other in zip(cells, others, strict=True) if other], logs[others] - middle, free, settings
            )
        except DataError:
            continue
        place = engine.centre + engine.slopes @ (logs[index] - middle)
        found[index] = excess_losses([cells[index]], place[None])[0]
    return found


def _flags(
    table: LrBatchTable, regressors: Sequence[str], kept: Mask, left_out: Score, failed: int, settings: _Settings
) -> list[str]:
    flags = []
    for name in regressors:
        span = table.column(name).max() / table.column(name).min()
        if span < DECADE:
            flags.append(f"{name} spans a factor of {span:.3g}, under a decade: its exponents are hardly identified")
    if (~kept).any():
        flags.append(f"{int((~kept).sum())} of {len(kept)} sizes have their best run at an edge: bounds, not optima")
    if failed > 0.05 * settings.draws:
        flags.append(f"{failed} of {settings.draws} resamples of the sizes have no fit: too few sizes for the intervals")
    if not left_out.cells:
        flags.append("no size can be predicted from the others: the law is not checked")
    elif left_out.mean > COSTLY:
        flags.append(
            f"sizes left out lose {100 * left_out.mean:.2g} % of the loss under the law of the others, above {100 * COSTLY:g} %"
        )
    return flags


def _window_flags(params: Mapping[str, Estimate], windows: Sequence[tuple[float, Mapping[str, float]]]) -> list[str]:
    """Exponents that the choice of the window moves by more than their own standard error."""
    flags = []
    for name in (name for name in params if name.endswith("_exponent")):
        worst = max((abs(found[name] - params[name].value) for _, found in windows if name in found), default=0.0)
        if worst > MOVED * params[name].stderr:
            moved = f"{worst / params[name].stderr:.1f} standard errors"
            flags.append(f"half or twice the window moves {name} by {moved}: the procedure decides it, judge by excess loss")
    return flags


def _row_notes(cells: Sequence[GridCell], settings: _Settings, runs: int) -> list[str]:
    share = settings.window if settings.method == "joint" else settings.tolerance
    total = sum(len(cell.loss) for cell in cells)
    lost = sum(int((cell.rise > WALL).sum()) for cell in cells) + sum(len(cell.lost) for cell in cells)
    fitted = f"{runs} runs within {100 * share:g} % of their size's best are fitted, {total - runs} are not"
    return [f"{fitted}; {lost} diverged or ended {100 * WALL:g} % above the best"]


def _plateau(surface: Surface, index: int, knob: str, share: float, table: LrBatchTable) -> Plateau:
    reach = max(float(np.ptp(cell.logs[:, index])) for cell in table.cells)
    below, above = surface.plateau(index, share, reach)
    return Plateau(knob, share, float(np.exp(-below)), float(np.exp(above)))


def _ridge(surface: Surface | None, ridges: Array, cells: int, level: float) -> Estimate | None:
    if surface is None or not np.isfinite(surface.ridge):
        return None
    if len(ridges) < 2 or cells < 3:
        return Estimate(surface.ridge, float("nan"), (float("nan"), float("nan")))
    low, high = np.quantile(ridges, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(surface.ridge, float(ridges.std(ddof=1)), (float(low), float(high)))


def _windows(
    table: LrBatchTable, sizes: Array, free: Mask, settings: _Settings, line: LrBatchLine
) -> tuple[tuple[float, dict[str, float]], ...]:
    """Exponents with half and twice the window: the procedure's share of the uncertainty."""
    found = []
    for factor in (0.5, 2.0):
        try:
            engine = _engine(table.cells, sizes, free, replace(settings, window=factor * settings.window))
        except DataError:
            continue
        other = replace(line, centre=engine.centre, slopes=engine.slopes)
        found.append(
            (factor * settings.window, {name: item.value for name, item in other.params().items() if not name.endswith("_k")})
        )
    return tuple(found)
