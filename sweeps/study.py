"""StudyConfig: what a study varies and what it holds fixed; any cell of it as a RunConfig.

A cell is one (parametrization, width, depth, batch, tokens) at which the LR curve is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from scaling.config import (
    BaseShape,
    DataConfig,
    OptimizerConfig,
    OptimizerSettings,
    ParametrizationConfig,
    ParametrizationKind,
    ParametrizationSettings,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainingConfig,
)
from scaling.config_base import Frozen, Positive, PositiveFloat, fault_at
from scaling.hyperparameters import HYPERPARAMETERS, with_values
from scaling.model_config import ModelFamily
from sweeps.axes import LEVELS, At, Axis, AxisName, Line

if TYPE_CHECKING:
    from scaling.records import RunRecord

Kind = ParametrizationKind
Log2LR = Annotated[float, Field(ge=-40, le=10)]
Seeds = Annotated[int, Field(ge=1, le=10_000, strict=True)]
MAX_LRS = 1000


class LRRange(Frozen):
    """log2 of the peak LRs: from `low` to `high` in steps of `step` octaves."""

    low: Log2LR
    high: Log2LR
    step: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise fault_at("low", f"low {self.low:g} lies above high {self.high:g}")
        if (self.high - self.low) / self.step > MAX_LRS:
            raise fault_at("step", f"step {self.step:g} gives more than {MAX_LRS} learning rates")
        return self

    def values(self) -> tuple[float, ...]:
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return tuple(self.low + index * self.step for index in range(count))


class FollowUp(Frozen):
    """Runs added once the grid's results are in; a pure function of them, so that any driver adds the same."""

    margin_points: Annotated[int, Field(ge=0, le=5, strict=True)] = 1
    """Extend a cell's LRs by `log2_lr.step` until its best run has this many runs on each side."""
    max_extensions: Annotated[int, Field(ge=0, le=64, strict=True)] = 4
    """LRs added on one side of a cell at most."""
    seeds_near_best: Seeds = 1
    """Seeds for LRs near a cell's best, the first included."""
    near_octaves: PositiveFloat = 1.0
    """"Near" is within this many octaves of the best run."""


class SearchConfig(Frozen):
    """How a cell's learning rates are chosen."""

    kind: Literal["grid", "adaptive", "tpe", "gp", "qmc", "random"] = "grid"
    """grid: `log2_lr`, grown by `follow_up`. adaptive: where the best LR's interval shrinks most, from `log2_lr` on. Others: Optuna's
    samplers within `log2_lr`."""
    precision: PositiveFloat = 0.15
    """adaptive: octaves; a cell is done when half the 90 % interval of its best log2 LR is as small."""
    max_runs: Annotated[int, Field(ge=3, le=10_000, strict=True)] = 6
    """Runs of a cell at the largest width; smaller ones get up to three times as many, since they cost less."""
    batch: Annotated[int, Field(ge=1, le=1000, strict=True)] = 2
    """Runs of a cell that are chosen together: more keep more workers busy, fewer learn more from each."""
    lattice: Annotated[float, Field(gt=0, le=2)] = 0.25
    """adaptive: octaves; LRs are multiples of it."""


SAFE_SHARE = 0.3


class PruningConfig(Frozen):
    """Which runs are ended before their last step (docs/early-stopping.md)."""

    kind: Literal["none", "safe", "median", "hyperband", "asha"] = "none"
    """safe: runs that are sure to end on a wall of their cell, which changes no optimum. Others: Optuna's pruners, by the loss in
    mid-run."""
    min_finished: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 3
    """Runs of the cell (for `safe`: of the run's own seed) that must be finished before another run is ended."""
    min_share: Annotated[float, Field(gt=0, lt=1)] = SAFE_SHARE
    """Share of its steps that every run makes."""
    reduction: Annotated[int, Field(ge=2, le=1000, strict=True)] | None = None
    """hyperband (3 by default) and asha (4): of how many runs one goes on from each rung."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        if self.kind == "safe" and self.min_share < SAFE_SHARE:
            raise fault_at("min_share", f"{self.min_share:g} is below {SAFE_SHARE:g}, where safe was measured to be wrong")
        if self.reduction is not None and self.kind not in ("hyperband", "asha"):
            raise fault_at("reduction", f"belongs to hyperband and asha, and kind is {self.kind}")
        return self


class StudyTraining(Frozen):
    """Training settings of every run; see scaling.config.TrainingConfig."""

    steps: Positive = 400
    batch_size: Positive = 16
    micro_batch_size: Positive | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    validation_sequences: Positive = 256
    validate_every_steps: Positive | None = None

    @model_validator(mode="after")
    def _valid(self) -> Self:
        TrainingConfig(**self.model_dump())
        return self


class StudyOptimizer(OptimizerSettings):
    """An optimizer at the base shape; its LR is swept."""

    def at(self, log2_lr: float) -> OptimizerConfig:
        return OptimizerConfig(lr=2.0**log2_lr, **self.model_dump())


class StudyParametrization(ParametrizationSettings):
    """Form, init and multipliers of one parametrization."""

    seeds_near_best: Seeds | None = None
    """Instead of follow_up.seeds_near_best: more seeds where the question is close, fewer where it is not."""

    def near_seeds(self, follow_up: FollowUp) -> int:
        """Seeds for LRs near a cell's best."""
        return self.seeds_near_best or follow_up.seeds_near_best


class TransferTolerances(Frozen):
    """What still counts as "transfers"."""

    slope: PositiveFloat = 0.25
    """Octaves of best LR per doubling of width; halfway to the smallest exponent that theory allows, 1/2."""
    regret: PositiveFloat = 0.01
    """Loss given up by using the smallest width's LR at the largest, over the best loss there."""


class StudyConfig(Frozen):
    """A study: one YAML file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    description: str = ""
    widths: Annotated[tuple[Positive, ...], Field(min_length=1)]
    log2_lr: LRRange
    parametrizations: Annotated[dict[Kind, StudyParametrization], Field(min_length=1)]
    seeds: Seeds = 1
    """Seeds (of initialization and data together) for every LR."""
    follow_up: FollowUp = FollowUp()
    search: SearchConfig = SearchConfig()
    axes: dict[AxisName, Axis] = Field(default_factory=dict)
    """What else is varied: depth, batch_size or steps at given values; others along a line through each cell's best LR (sweeps.axes)."""
    pruning: PruningConfig = PruningConfig()
    model: ModelFamily = ModelFamily()
    base: BaseShape = BaseShape()
    data: DataConfig = DataConfig()
    training: StudyTraining = StudyTraining()
    optimizer: StudyOptimizer = StudyOptimizer()
    schedule: ScheduleConfig = ScheduleConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    tolerances: TransferTolerances = TransferTolerances()
    storage: str | None = None
    """Optuna storage URL of an RDB; default: a journal file in the study directory."""
    target: str | None = None
    """A YAML file that describes the large run to recommend for, relative to the study's file."""

    @field_validator("widths")
    @classmethod
    def _distinct(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(widths)) != len(widths):
            raise ValueError(f"a width is given twice: {list(widths)}")
        return tuple(sorted(widths))

    @model_validator(mode="after")
    def _bounded_where_needed(self) -> Self:
        if self.search.kind == "adaptive" and self.pruning.kind not in ("none", "safe"):
            raise fault_at("pruning", f"{self.pruning.kind} bounds no loss, and search.kind adaptive needs bounds: kind safe")
        return self

    @model_validator(mode="after")
    def _members_exist(self) -> Self:
        reasons = [reason for width in (*self.widths, self.base.width) if (reason := self.model.check_width(width))]
        if reasons:
            raise fault_at("widths", "; ".join(list(dict.fromkeys(reasons))[:5]))
        for kind in self.parametrizations:
            try:
                self.template(kind)
            except ValidationError as error:
                raise fault_at("parametrizations", f"{kind}: {error.errors()[0]['msg']}") from None
        return self

    @model_validator(mode="after")
    def _axes_exist(self) -> Self:
        for name, axis in self.axes.items():
            if reason := axis.check(name, self.widths):
                raise fault_at(f"axes.{name}", reason)
            for kind in self.parametrizations:
                try:
                    self._check_axis(name, axis, kind)
                except (ValueError, ValidationError) as error:
                    errors = error.errors() if isinstance(error, ValidationError) else []
                    words = errors[0]["msg"].removeprefix("Value error, ") if errors else str(error)
                    raise fault_at(f"axes.{name}", f"{kind}: {words}") from None
        return self

    def _check_axis(self, name: AxisName, axis: Axis, kind: Kind) -> None:
        """Build the runs at its ends. Raises ValueError where they do not exist."""
        width, low = self.axis_widths(name)[-1], self.log2_lr.low
        if axis.values is not None:
            for value in axis.values:
                self.run(kind, width, low, 0, ((name, value),))
            return
        if self.optimizer.kind in HYPERPARAMETERS[name].unused_by:
            raise ValueError(f"{self.optimizer.kind} does not use it")
        line = self.line(kind, name)
        for end in (line.low, line.high):
            self.run(kind, width, low, 0, ((name, line.value(end)),))

    def axis_widths(self, name: AxisName) -> tuple[int, ...]:
        """The widths at which an axis is varied."""
        return self.axes[name].widths or self.widths

    def line(self, kind: Kind, name: AxisName) -> Line:
        """The line of a hyperparameter under one parametrization. Raises ValueError where the study turns it off."""
        own = HYPERPARAMETERS[name].of(self.template(kind))
        if not own:
            key = ".".join(HYPERPARAMETERS[name].path)
            raise ValueError(
                f"the study's own value, {key}, is 0 or off, and a line goes through it on a logarithmic scale: set it"
            )
        return Line(name, self.axes[name], own)

    def own_sizes(self) -> dict[str, float]:
        """Columns of a table in which cells differ by levels of axes, with the study's own level."""
        batch_tokens = self.training.batch_size * self.model.context
        return {"depth": self.model.depth, "batch_tokens": batch_tokens, "tokens": batch_tokens * self.training.steps}

    def own_values(self) -> dict[str, dict[str, float]]:
        """{hyperparameter: {parametrization: the study's own value}}, of its lines."""
        return {
            name: {kind: self.line(kind, name).own for kind in self.parametrizations} for name in self.axes if name not in LEVELS
        }

    def run(self, parametrization: Kind, width: int, log2_lr: float, seed: int, at: At = ()) -> RunConfig:
        """The run at one point of the study; at: axes that are not at the study's own value."""
        settings = self.parametrizations[parametrization]
        rules = {"kind": parametrization, **settings.model_dump(exclude={"seeds_near_best"})}
        levels = {name: int(value) for name, value in at if name in LEVELS}
        model = self.model.model_copy(update={"depth": levels.get("depth", self.model.depth)}).at(width)
        training = self.training.model_dump() | {"seed": seed, "data_seed": seed, **self._batches(levels)}
        run = RunConfig(
            model=model,
            parametrization=ParametrizationConfig.model_validate(rules),
            base=self.base,
            optimizer=self.optimizer.at(log2_lr),
            schedule=self.schedule,
            data=self.data,
            training=TrainingConfig.model_validate(training),
            runtime=self.runtime,
        )
        off: dict[str, float] = {name: value for name, value in at if name not in LEVELS}
        return with_values(run, off) if off else run

    def _batches(self, levels: Mapping[AxisName, int]) -> dict[str, int]:
        """steps and batch_size; another batch sees the same number of tokens."""
        steps = levels.get("steps", self.training.steps)
        batch_size = levels.get("batch_size", self.training.batch_size)
        sequences = steps * self.training.batch_size
        if sequences % batch_size:
            raise ValueError(f"{sequences} sequences are no multiple of batch_size {batch_size}, and tokens are to stay the same")
        return {"steps": sequences // batch_size, "batch_size": batch_size}

    def at_of(self, record: RunRecord) -> At:
        """Where a record's run lies off the study's own settings, as far as the study's axes go."""
        own = {"depth": self.model.depth, "batch_size": self.training.batch_size, "steps": self.training.steps}
        batch_size = record.batch_tokens // self.model.context
        steps = record.steps * batch_size / self.training.batch_size
        levels: dict[AxisName, float] = {"depth": record.depth, "batch_size": batch_size, "steps": steps}
        at: list[tuple[AxisName, float]] = []
        for name in self.axes:
            value = levels[name] if name in LEVELS else record.hyperparameters.get(name)
            kind = next(kind for kind in self.parametrizations if kind == record.parametrization)
            usual = own[name] if name in LEVELS else HYPERPARAMETERS[name].of(self.template(kind))
            if value is not None and value != usual:
                at.append((name, value))
        return tuple(at)

    def identity(self) -> Mapping[str, object]:
        """The part of the config that a study directory is bound to: all but its grid, and where and how its runs are made and judged.

        The corpus is known by its hash; the folder that it lies in may change.
        """
        outside = {
            "runtime",
            "tolerances",
            "storage",
            "target",
            "description",
            "widths",
            "log2_lr",
            "seeds",
            "follow_up",
            "search",
            "axes",
            "pruning",
        }
        paths = {"paths", "train_bin", "validation_bin"}
        values = self.model_dump(mode="json", exclude={**dict.fromkeys(outside, True), "data": paths})
        for settings in values["parametrizations"].values():
            del settings["seeds_near_best"]
        return values

    def owns(self, record: RunRecord) -> bool:
        """Whether a finished run is one of this study, wherever its grid ends now: same settings, same data."""
        kind = next((kind for kind in self.parametrizations if kind == record.parametrization), None)
        if kind is None or record.seed != record.data_seed or self.model.check_width(record.width):
            return False
        try:
            run = self.run(kind, record.width, 0.0, record.seed, self.at_of(record))
        except (ValueError, ValidationError):
            return False
        run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"lr": record.lr})})
        return run.run_id == record.run_id and self.data.sha256 in (None, record.data_sha256)

    def template(self, parametrization: Kind) -> RunConfig:
        """A run that stands for what all runs of one parametrization share."""
        return self.run(parametrization, max(self.widths), self.log2_lr.low, 0)
