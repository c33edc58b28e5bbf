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
from scaling.model_config import ModelFamily

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

    def run(self, parametrization: Kind, width: int, log2_lr: float, seed: int) -> RunConfig:
        """The run at one point of the study."""
        settings = self.parametrizations[parametrization]
        rules = {"kind": parametrization, **settings.model_dump(exclude={"seeds_near_best"})}
        return RunConfig(
            model=self.model.at(width),
            parametrization=ParametrizationConfig.model_validate(rules),
            base=self.base,
            optimizer=self.optimizer.at(log2_lr),
            schedule=self.schedule,
            data=self.data,
            training=TrainingConfig(seed=seed, data_seed=seed, **self.training.model_dump()),
            runtime=self.runtime,
        )

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
        run = self.run(kind, record.width, 0.0, record.seed)
        run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"lr": record.lr})})
        return run.run_id == record.run_id and self.data.sha256 in (None, record.data_sha256)

    def template(self, parametrization: Kind) -> RunConfig:
        """A run that stands for what all runs of one parametrization share."""
        return self.run(parametrization, max(self.widths), self.log2_lr.low, 0)
