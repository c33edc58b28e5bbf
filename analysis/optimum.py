"""The best learning rate of a cell: fitted near the bottom, with an interval, or censored; never extrapolated.

Owns CellOptimum, fit_cell and cell_optima. The statistics are in `analysis.posterior` (the likelihood), `analysis.shapes` (the
curves that are weighed) and `analysis.noise`. Units: log2 of the peak LR, so one octave is a factor of two; losses in nats
per token; every interval is at 90 %, an end the data do not bound is infinite, a missing uncertainty is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis import noise as noises
from analysis.draws import CellDraws, draw_cell, flat_draws
from analysis.kin import rise_of, shapes_of
from analysis.noise import NoiseEstimate
from analysis.posterior import DISCREPANCY, REACH, CellData, Likelihood, likelihood, mean_losses, sigma_grid
from analysis.results import UNKNOWN, Interval, json_safe, whole
from analysis.shapes import Array, Shape, library
from analysis.table import Cell, RunTable

WALL = 0.2
"""A loss this far above the best one, relative to it, is a wall and not part of the bottom (Everett et al. 2407.05872: 1.2)."""
WINDOW = 3.0
"""Octaves from the best learning rate within which a point is fitted although it lies higher than `WINDOW_RISE`."""
WINDOW_RISE = 0.05
TINY = 1e-9
"""Keeps relative measures finite where a loss is 0, nats."""
MIN_POINTS = 3
"""Distinct learning rates near the bottom for a curve; with fewer an optimum is only bracketed."""
MISFIT = 2.5
"""Standard deviations off the curve from which a learning rate is remarked on."""
PLATEAUS = (0.001, 0.0025)
LEVELS = (0.05, 0.95)

Censored = Literal["low", "high", "unresolved"]


@dataclass(frozen=True)
class FittedCurve:
    """The most probable curve through the bottom, given the optimum: for reading values and drawing."""

    log2_lr: float
    level: float
    scale: float
    shape: Shape
    window: Interval
    """log2 LRs between which it was fitted."""

    def __call__(self, log2_lr: ArrayLike) -> Array:
        """Loss in nats per token; meaningful inside `window`."""
        return np.asarray(self.level + self.scale * self.shape(np.asarray(log2_lr, dtype=float) - self.log2_lr))


@dataclass(frozen=True)
class CellOptimum:
    """The best learning rate of one cell and how well it is known."""

    cell: Cell
    log2_lr: float
    """log2 of the best LR; the sampled edge when censored is "low" (at most) or "high" (at least); NaN when "unresolved"."""
    interval: Interval
    censored: Censored | None
    best_loss: float
    best_loss_interval: Interval
    plateaus: dict[float, Interval]
    """{relative rise: log2 LR range on the fitted curve, cut at the sampled LRs}."""
    curvature: float
    """d2 loss / d(log2 LR)2 at the bottom, nats per octave squared, from half an octave to either side."""
    noise: NoiseEstimate | None
    n_points: int
    """Distinct learning rates in the fit."""
    n_runs: int
    """Runs in the fit."""
    n_finite: int
    """Runs with a finite loss; those far above the best one do not enter the fit."""
    n_seeds: int
    n_diverged: int
    sampled: Interval
    """Lowest and highest log2 LR with a finite loss."""
    n_pruned: int = 0
    """Runs that were ended early; those with a bound that is a wall bound the optimum."""
    lowest_diverged: float = math.inf
    """Lowest log2 LR at which most runs diverged; infinite when there is none."""
    flags: tuple[str, ...] = ()
    curve: FittedCurve | None = field(default=None, repr=False)
    draws: CellDraws | None = field(default=None, repr=False, compare=False)

    @property
    def width(self) -> int:
        return round(self.cell.size("width"))

    @property
    def usable(self) -> bool:
        return self.censored is None and math.isfinite(self.log2_lr)

    @property
    def half_width(self) -> float:
        """Half the interval in octaves; NaN when an end is open or missing."""
        width = 0.5 * (self.interval[1] - self.interval[0])
        return width if math.isfinite(width) else math.nan

    @property
    def steepness(self) -> Array | None:
        """Draws of the mean rise one octave off the optimum, nats; None unless a curve was fitted around an interior optimum."""
        return self.draws.scale if self.draws is not None and self.noise is not None and self.usable else None

    def rise_at(self, log2_lr: float) -> tuple[float, Interval]:
        """Loss at `log2_lr` over the best loss of the cell, in nats, with interval.

        Infinite where runs diverged; NaN with a lower bound (possibly 0) beyond the sampled learning rates.
        """
        if self.draws is None or not math.isfinite(log2_lr):
            return math.nan, (0.0, math.inf)
        return self.draws.rise_at(log2_lr)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; unbounded and missing numbers are null."""
        cell, noise = self.cell, self.noise
        return dict(
            json_safe(
                {
                    "parametrization": cell.parametrization,
                    "width": whole(cell.size("width")),
                    "depth": whole(cell.size("depth")),
                    "batch_tokens": whole(cell.size("batch_tokens")),
                    "tokens": whole(cell.size("tokens")),
                    "log2_lr": self.log2_lr,
                    "interval": self.interval,
                    "censored": self.censored,
                    "best_loss": {"value": self.best_loss, "interval": self.best_loss_interval},
                    "plateaus": {f"{100 * rise:g}%": ends for rise, ends in self.plateaus.items()},
                    "curvature": self.curvature,
                    "noise": None if noise is None else {"sd": noise.sd, "df": noise.df, "source": noise.source},
                    "n_points": self.n_points,
                    "n_runs": self.n_runs,
                    "n_finite": self.n_finite,
                    "n_seeds": self.n_seeds,
                    "n_diverged": self.n_diverged,
                    "n_pruned": self.n_pruned,
                    "flags": self.flags,
                }
            )
        )


@dataclass(frozen=True)
class Prepared:
    """A cell before its fit: what enters, what bounds it, what there is to say."""

    cell: Cell
    data: CellData | None
    log2_lr: Array
    loss: Array
    best: float
    """Sampled log2 LR with the lowest mean loss."""
    bounded: tuple[bool, bool]
    """Whether something clearly worse (a wall or a divergence) was sampled below / above."""
    n_seeds: int
    n_diverged: int
    first_diverged: float
    flags: tuple[str, ...]
    n_pruned: int = 0
    walled: Array = field(default_factory=lambda: np.empty(0))
    """log2 LRs that pruned runs show to be a wall."""


def fit_cell(
    log2_lr: ArrayLike, loss: ArrayLike, seed: Sequence[Any] | NDArray[Any] | None = None, *,
    noise: NoiseEstimate | None = None, cell: Cell | None = None,
) -> CellOptimum:  # fmt: skip
    """Find the best learning rate of one cell.

    log2_lr, loss, seed: one entry a run; a loss that is not finite is a divergence. Runs of one seed share their data over the
    learning rates, so a seed's level is a block effect; without `seed` all runs are one block. noise: what other cells say
    about the noise of a run (`cell_optima` pools it); without it only the cell's own scatter and a weak prior count.
    """
    x, y = np.asarray(log2_lr, dtype=float), np.asarray(loss, dtype=float)
    seeds = np.zeros(len(x), dtype=np.int64) if seed is None else np.unique(np.asarray(seed).astype(str), return_inverse=True)[1]
    prepared = prepare(cell or Cell(), x, y, seeds)
    if prepared.data is None:
        return bracketed(prepared)
    scale = float(mean_losses(prepared.data.log2_lr, prepared.data.loss, prepared.data.block).min())
    sigmas = sigma_grid(scale)
    prior = noises.weak_prior(sigmas, scale) if noise is None else noise.log_prior(sigmas)
    return conclude(prepared, likelihood(prepared.data, sigmas), prior, "" if noise is None else noise.source)


def cell_optima(table: RunTable) -> list[CellOptimum]:
    """The optimum of every cell.

    The noise of a run is pooled over the cells of the table; the curve's shape and steepness over those of a parametrization, with
    room to differ (`analysis.kin`). Where a cell's optimum is comes from its own runs.
    """
    prepared = [prepare(cell, *_columns(rows)) for cell, rows in table.cells()]
    fitted = [item for item in prepared if item.data is not None]
    if not fitted:
        return [bracketed(item) for item in prepared]
    scale = float(np.median([np.nanmin(item.loss) for item in fitted]))
    sigmas = sigma_grid(scale)
    likelihoods = [likelihood(item.data, sigmas) for item in fitted if item.data is not None]
    predicted, _ = noises.pool([noises.evidence(item) for item in likelihoods], sigmas, scale)
    log_sigmas = [np.log(density + 1e-300) for density in predicted]
    replicated = sum(item.n_seeds > 1 for item in fitted)
    source = f"the scatter about the fitted curves of {len(fitted)} cell{'s' if len(fitted) != 1 else ''}, pooled"
    source += f", {replicated} with replicate seeds" if replicated else "; no replicate seeds"
    found = dict(zip(map(id, fitted), _with_kin(fitted, likelihoods, log_sigmas, source), strict=True))
    return [found[id(item)] if id(item) in found else bracketed(item) for item in prepared]


def _with_kin(
    fitted: Sequence[Prepared], likelihoods: Sequence[Likelihood], log_sigmas: Sequence[Array], source: str
) -> list[CellOptimum]:
    """Optima, each under what the other cells of its parametrization say of the curve, those looked at alone."""
    alone = [conclude(*item, source) for item in zip(fitted, likelihoods, log_sigmas, strict=True)]
    shapes = [cell.shapes(log_sigma) for cell, log_sigma in zip(likelihoods, log_sigmas, strict=True)]
    optima = []
    for at, (item, cell, log_sigma) in enumerate(zip(fitted, likelihoods, log_sigmas, strict=True)):
        kin = [other for other, its in enumerate(fitted) if other != at and its.cell.parametrization == item.cell.parametrization]
        if not kin:
            optima.append(alone[at])
            continue
        rise = rise_of([draws for other in kin if (draws := alone[other].steepness) is not None])
        optima.append(conclude(item, cell.under(rise), log_sigma, source, shapes_of([shapes[other] for other in kin])))
    return optima


def _columns(rows: Any) -> tuple[Array, Array, NDArray[np.int64], Array]:
    seeds = np.unique(rows["seed"].to_numpy().astype(str), return_inverse=True)[1]
    log2_lr, loss, bound = (rows[name].to_numpy(dtype=float) for name in ("log2_lr", "loss", "bound"))
    return log2_lr, loss, seeds.astype(np.int64), bound


def prepare(cell: Cell, x: Array, y: Array, seeds: NDArray[np.int64], bound: Array | None = None) -> Prepared:
    """Split runs into bottom, walls and divergences. bound: finite where a run was pruned, at least what its loss would have been."""
    finite, pruned = np.isfinite(y), np.isfinite(bound) if bound is not None else np.zeros(len(y), dtype=bool)
    pruned &= ~finite
    n_diverged, n_pruned = int((~finite & ~pruned).sum()), int(pruned.sum())
    flags = [] if not n_diverged else [f"{n_diverged} diverged run{'s' if n_diverged > 1 else ''} kept out of the fit"]
    if not finite.any():
        flags.append("no finite loss")
        lowest = float(x[~pruned].min()) if n_diverged else math.inf
        return Prepared(cell, None, x[finite], y[finite], math.nan, (False, False), 0, n_diverged, lowest, tuple(flags), n_pruned)
    blocks = _blocks(x[finite], seeds[finite])
    rates = np.unique(x[finite])
    means = mean_losses(x[finite], y[finite], blocks)
    best, height = float(rates[means.argmin()]), (means - means.min()) / max(abs(means.min()), TINY)
    lost = _mostly(x, ~finite & ~pruned)
    walled = _walled(x, pruned, bound, float(means.min()), flags)
    outside = (height > WALL) | ((np.abs(rates - best) > WINDOW) & (height > WINDOW_RISE))
    walls_above = np.concatenate([rates[outside & (rates > best)], lost[lost > best], walled[walled > best]])
    walls_below = np.concatenate([rates[outside & (rates < best)], walled[walled < best]])
    if (lost < best).any():
        flags.append(f"a run diverged at a {cell.quantity} below the best one")
    low = float(walls_below.max()) if len(walls_below) else float(rates.min()) - REACH
    high = float(walls_above.min()) if len(walls_above) else float(rates.max()) + REACH
    inside = finite & (x > low) & (x < high)
    data = CellData(x[inside], y[inside], _blocks(x[inside], seeds[inside]), low, high)
    n_seeds = len(np.unique(seeds[finite]))
    if len(data.rates) < MIN_POINTS:
        flags.append(f"too few learning rates near the bottom for a curve ({len(data.rates)}): sample more around the best")
    first_diverged = float(lost[lost > best].min()) if (lost > best).any() else math.inf
    bounded = (len(walls_below) > 0, len(walls_above) > 0)
    fitted = data if len(data.rates) >= MIN_POINTS else None
    return Prepared(
        cell, fitted, x[finite], y[finite], best, bounded, n_seeds, n_diverged, first_diverged, tuple(flags), n_pruned, walled
    )  # fmt: skip


def _mostly(x: Array, chosen: NDArray[np.bool_]) -> Array:
    """Learning rates at which at least half of the runs are chosen."""
    return np.array([value for value in np.unique(x[chosen]) if 2 * chosen[x == value].sum() >= (x == value).sum()])


def _walled(x: Array, pruned: NDArray[np.bool_], bound: Array | None, best_loss: float, flags: list[str]) -> Array:
    """Learning rates that pruned runs show to be a wall; what their bounds do not show is said."""
    if bound is None or not pruned.any():
        return np.empty(0)
    wall = pruned & (bound - best_loss > WALL * max(abs(best_loss), TINY))
    flags.append(f"{int(pruned.sum())} pruned run{'s' if pruned.sum() > 1 else ''} bound the optimum and are no values")
    if (low := int((pruned & ~wall).sum())) > 0:
        flags.append(f"{low} of them say nothing: their bound is less than {WALL:.0%} above the best loss")
    return _mostly(x, wall)


def _blocks(x: Array, seeds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Seeds that appear at one learning rate only cannot be compared with themselves: they form one block together."""
    alone = {int(value) for value in np.unique(seeds) if len(np.unique(x[seeds == value])) == 1}
    return np.array([-1 if int(value) in alone else int(value) for value in seeds], dtype=np.int64)


def bracketed(prepared: Prepared) -> CellOptimum:
    """A cell without a fit: the best sampled learning rate between its neighbours, or at the edge."""
    x, y, best = prepared.log2_lr, prepared.loss, prepared.best
    rates = np.unique(x)
    tried = np.unique(np.concatenate([rates, prepared.walled, [prepared.first_diverged]]))
    below, above = tried[tried < best], tried[(tried > best) & np.isfinite(tried)]
    low = float(below.max()) if len(below) else -math.inf
    high = float(above.min()) if len(above) else math.inf
    flags = prepared.flags
    censored: Censored | None = "unresolved" if math.isinf(low) and math.isinf(high) else None
    if censored is None and math.isinf(high - low):
        censored = "low" if math.isinf(low) else "high"
        side, more = ("below the lowest", "lower") if censored == "low" else ("above the highest", "higher")
        flags += (f"the optimum is at or {side} {prepared.cell.quantity} 2^{best:.4g}: sample {more} ones",)
    elif censored is None:
        flags += (f"no curve was fitted: the optimum is bracketed by the neighbours of the best {prepared.cell.quantity}",)
    draws = None
    if censored != "unresolved":
        ends = (max(low, best - REACH), min(high, best + REACH))
        draws = flat_draws(ends, float(y[x == best].mean()), (x, y), prepared.first_diverged, censored is not None)
    return CellOptimum(
        cell=prepared.cell, log2_lr=math.nan if censored == "unresolved" else best, interval=(low, high), censored=censored,
        best_loss=float(y.min()) if len(y) else math.nan, best_loss_interval=UNKNOWN,
        plateaus=dict.fromkeys(PLATEAUS, UNKNOWN), curvature=math.nan, noise=None,
        n_points=len(rates), n_runs=len(y), n_finite=len(y), n_seeds=prepared.n_seeds, n_diverged=prepared.n_diverged,
        n_pruned=prepared.n_pruned,
        sampled=(float(rates[0]), float(rates[-1])) if len(y) else UNKNOWN, lowest_diverged=prepared.first_diverged,
        flags=flags, draws=draws,
    )  # fmt: skip


def conclude(
    prepared: Prepared, cell: Likelihood, log_prior_sigma: Array, source: str, log_shape: Array | None = None
) -> CellOptimum:
    """The optimum from the cell's likelihood; log_shape: log prior weights of the shapes, the library's own by default."""
    data = cell.data
    posterior = cell.posterior(log_prior_sigma, log_shape)
    ends = _quantiles(cell.optima, posterior.sum(axis=(1, 2)), (LEVELS[0], 0.5, LEVELS[1]))
    low_edge = data.low if prepared.bounded[0] else float(data.rates.min())
    high_edge = data.high if prepared.bounded[1] else float(data.rates.max())
    log2_lr, interval, censored, flags = _interior(prepared, ends, (low_edge, high_edge))
    draws = draw_cell(cell, posterior, log_prior_sigma, (prepared.log2_lr, prepared.loss), prepared.first_diverged)
    noise = noises.summarise(posterior.sum(axis=(0, 1)), cell.sigmas, source or "the cell's own scatter and a weak prior")
    if len(np.unique(data.block)) == 1:
        flags.append("one seed: the interval of the best loss leaves out how far another seed would lie")
    curve = _curve(cell, posterior, ends[1])
    flags += _misfit(data, curve, noise.sd)
    best = curve.level if censored is None else float(mean_losses(data.log2_lr, data.loss, data.block).min())
    spread = _quantiles(np.sort(draws.level), np.full(len(draws.level), 1.0 / len(draws.level)), LEVELS)
    inside = censored is None
    return CellOptimum(
        cell=prepared.cell, log2_lr=log2_lr, interval=interval, censored=censored,
        best_loss=best, best_loss_interval=(min(spread[0], best), max(spread[1], best)) if inside else (-math.inf, best),
        plateaus={rise: _plateau(curve, rise, (low_edge, high_edge)) if inside else UNKNOWN for rise in PLATEAUS},
        curvature=float(curve([ends[1] - 0.5, ends[1] + 0.5]).sum() - 2 * curve.level) / 0.25 if inside else math.nan,
        noise=noise, n_points=len(data.rates), n_runs=len(data.loss), n_finite=len(prepared.loss),
        n_seeds=prepared.n_seeds, n_diverged=prepared.n_diverged, n_pruned=prepared.n_pruned,
        sampled=(float(prepared.log2_lr.min()), float(prepared.log2_lr.max())), lowest_diverged=prepared.first_diverged,
        flags=(*prepared.flags, *flags),
        curve=curve if inside else None, draws=replace(draws, censored=not inside),
    )  # fmt: skip


def _interior(prepared: Prepared, ends: Sequence[float], edges: Interval) -> tuple[float, Interval, Censored | None, list[str]]:
    """Decide whether the optimum is interior, and where its interval is open."""
    low_quantile, middle, high_quantile = ends
    low = low_quantile if low_quantile > edges[0] or prepared.bounded[0] else -math.inf
    high = high_quantile if high_quantile < edges[1] or prepared.bounded[1] else math.inf
    data = prepared.data
    assert data is not None, "a cell without data has no fit"
    at_low = not prepared.bounded[0] and (prepared.best == data.rates.min() or middle <= edges[0])
    at_high = not prepared.bounded[1] and (prepared.best == data.rates.max() or middle >= edges[1])
    if math.isinf(low) and math.isinf(high):
        words = f"the losses show no minimum above their noise: more seeds or a wider range of the {prepared.cell.quantity}"
        return math.nan, (low, high), "unresolved", [words]
    if at_low:
        words = f"the optimum is at or below the lowest {prepared.cell.quantity} 2^{edges[0]:.4g}: sample lower ones"
        return edges[0], (-math.inf, max(high_quantile, edges[0])), "low", [words]
    if at_high:
        words = f"the optimum is at or above the highest {prepared.cell.quantity} 2^{edges[1]:.4g}: sample higher ones"
        return edges[1], (min(low_quantile, edges[1]), math.inf), "high", [words]
    flags = []
    if math.isinf(low):
        flags.append(f"the lower end of the optimum is not bounded: sample below 2^{edges[0]:.4g}")
    if math.isinf(high):
        flags.append(f"the upper end of the optimum is not bounded: sample above 2^{edges[1]:.4g}")
    return middle, (low, high), None, flags


def _quantiles(values: Array, density: Array, levels: Sequence[float]) -> list[float]:
    """Quantiles of a density on ordered grid points (each point stands for its own step)."""
    cumulative = np.cumsum(density) - 0.5 * density
    return [float(value) for value in np.interp(levels, cumulative, values)]


def _curve(cell: Likelihood, posterior: Array, log2_lr: float) -> FittedCurve:
    """The most probable shape at the optimum, at the most probable noise."""
    at = int(np.abs(cell.optima - log2_lr).argmin())
    shape_index, sigma_index = np.unravel_index(int(posterior[at].argmax()), posterior[at].shape)
    shape, form = library()[0][int(shape_index)], cell.forms[int(sigma_index)]
    values = shape(cell.data.rates - log2_lr)
    scale = max(0.0, float(values @ form.cross / (values @ form.square @ values)))
    level = float(form.level_loss - scale * (form.level_curve @ values))
    return FittedCurve(log2_lr, level, scale, shape, (float(cell.data.rates.min()), float(cell.data.rates.max())))


def _misfit(data: CellData, curve: FittedCurve, sd: float) -> list[str]:
    """Where the runs leave the curve by more than noise and the curve's own error explain: the bottom is bumpy, the noise large."""
    means = mean_losses(data.log2_lr, data.loss, data.block)
    runs = np.array([(data.log2_lr == rate).sum() for rate in data.rates])
    expected = np.hypot(sd / np.sqrt(runs), DISCREPANCY * (means - means.min()))
    off = means - curve(data.rates)
    worst = int(np.abs(off / np.maximum(expected, TINY)).argmax())
    if abs(off[worst]) < MISFIT * expected[worst]:
        return []
    return [f"the runs at 2^{data.rates[worst]:.4g} lie {off[worst]:+.3f} nats off the curve: more seeds there"]


def _plateau(curve: FittedCurve, rise: float, edges: Interval) -> Interval:
    """log2 LRs on the fitted curve within `rise` of the best loss, cut at the sampled learning rates."""
    grid = np.linspace(edges[0], edges[1], 2001)
    inside = grid[curve(grid) - curve.level <= rise * abs(curve.level)]
    return (float(inside.min()), float(inside.max())) if len(inside) else (curve.log2_lr, curve.log2_lr)
