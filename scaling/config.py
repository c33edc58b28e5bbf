"""What one run is: frozen, validated configs, and the hash that names a run.

Owns RunConfig and its parts. Torch-free, so that planning, analysis and `--help` never import torch.
Units stand in the names; every LR is a peak LR; losses are in nats per token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from scaling.config_base import (
    Depth,
    Factor,
    Fraction,
    Frozen,
    LearningRate,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Seed,
    fault_at,
)
from scaling.horizon import horizon_betas
from scaling.model_config import ModelConfig
from scaling.parallel import Layout

ParametrizationKind = Literal["sp", "mup", "mup-simple", "sp-per-layer", "completep", "umup", "spectral"]
OptimizerKind = Literal["adamw", "adam", "sgd", "lion", "muon"]
WeightDecayRule = Literal["constant", "unscaled", "independent", "sqrt"]
Precision = Literal["fp32", "bf16", "fp16"]


class InitConfig(Frozen):
    """Standard deviations at the base width; the parametrization says how they change with the width."""

    embedding_std: NonNegativeFloat = 0.02
    hidden_std: NonNegativeFloat | Literal["fan_in"] = "fan_in"
    """"fan_in" is 1/sqrt(fan_in) at every width."""
    block_output: Literal["zero", "hidden", "depth_scaled"] = "hidden"
    """Matrices that write to the residual stream: zeros, like other hidden matrices, or those over sqrt(2 depth)."""
    readout_std: NonNegativeFloat = 0.02


class ParametrizationSettings(Frozen):
    """What a parametrization leaves open: its form, its init and its multipliers."""

    form: Literal["table3", "table8", "table9"] = "table8"
    """mup and completep: which of Tensor Programs V's (2203.03466) equivalent tables; where the factors of embedding and readout stand."""
    alpha: Annotated[float, Field(ge=0.5, le=1)] = 1.0
    """completep: residual branches are multiplied by (depth / base depth)^-alpha (CompleteP 2505.01618)."""
    alignment: Literal["full", "none"] = "full"
    """sp-per-layer: whether updates are taken to align with activations (Everett et al. 2407.05872)."""
    init: InitConfig = InitConfig()
    embedding_multiplier: PositiveFloat = 1.0
    readout_multiplier: PositiveFloat = 1.0
    attention_multiplier: PositiveFloat = 1.0
    residual_multiplier: PositiveFloat = 1.0
    """On what blocks add to the residual stream."""
    residual_attention_ratio: PositiveFloat = 1.0
    """What attention adds to the stream over what MLPs add, their mean square held fixed (u-muP 2407.17465, Appendix G)."""


class ParametrizationConfig(ParametrizationSettings):
    """Which rules carry hyperparameters from the base shape to another shape."""

    kind: ParametrizationKind = "mup"


class BaseShape(Frozen):
    """The shape at which every rule's factor is 1."""

    width: Positive = 64
    depth: Depth | None = None
    """Default: the depth of the model."""
    steps: Positive | None = None
    """Steps of the run that the values were found in: with them, LR, decay and eps follow the number of steps (scaling.parametrization.
    carried); without, they do not."""


class LRMultipliers(Frozen):
    """Constant factors on the LR, by class of tensor (Everett et al. 2407.05872)."""

    embedding: Factor = 1.0
    hidden: Factor = 1.0
    gain: Factor = 1.0
    readout: Factor = 1.0


class OptimizerSettings(Frozen):
    """An optimizer at the base shape, without its LR; AdamW's, Lion's and Muon's decay is torch's, multiplied by the LR
    (Loshchilov & Hutter 1711.05101), Adam's and SGD's is part of the gradient."""

    kind: OptimizerKind = "adamw"
    """sgd: beta1 is its momentum, beta2 and eps are unused. muon: hidden matrices by torch.optim.Muon, all else by AdamW."""
    lr_multipliers: LRMultipliers = LRMultipliers()
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=1e-60, le=1e9)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    weight_decay_rule: WeightDecayRule = "constant"
    """How a tensor's decay changes with its width: see scaling.tables.DECAY_RULES."""
    eps_rule: Literal["scaled", "constant"] = "scaled"
    """Whether eps follows the size of a tensor's gradient, as the tables say, or is the same for all."""
    horizon_exponent: Fraction = 0.5
    """With base.steps: LR goes with (steps / base steps)^-exponent (Complete(d)P 2512.22382 Table 1)."""
    betas_rule: Literal["constant", "horizon"] = "constant"
    """horizon: with base.steps, 1 - beta goes with base steps / steps (Complete(d)P 2512.22382 Table 1)."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adamw_lr_factor: Factor = 1.0
    """muon: AdamW's LR over Muon's."""
    clip_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; null turns clipping off."""

    @model_validator(mode="after")
    def _settings_are_used(self) -> Self:
        """What this optimizer would ignore, or has no rule for, is an error."""
        if self.kind == "adam" and self.weight_decay and self.weight_decay_rule not in ("constant", "unscaled"):
            what = f"{self.weight_decay_rule} is a rule for decoupled decay, and adam's is part of the gradient"
            raise fault_at("weight_decay_rule", f"{what}; use adamw, or the rule constant or unscaled")
        if self.kind != "muon":
            for key, default in (("adamw_lr_factor", 1.0), ("muon_momentum", 0.95)):
                if getattr(self, key) != default:
                    raise fault_at(key, f"is muon's, and the optimizer is {self.kind}")
        if self.kind in ("sgd", "lion") and self.eps_rule != "scaled":
            raise fault_at("eps_rule", f"{self.kind} has no eps; leave it out")
        return self

    @property
    def horizon_fault(self) -> str | None:
        """Why these settings cannot be carried to another number of steps, or None."""
        if self.kind not in ("adamw", "adam"):
            return f"no rule is known that carries {self.kind} to another number of steps"
        if self.kind == "adam" and self.weight_decay:
            return "no rule is known that carries adam's decay in the gradient to another number of steps (adamw's is known)"
        return None


class OptimizerConfig(OptimizerSettings):
    """An optimizer at the base shape."""

    lr: LearningRate = 2.0**-8
    """Peak LR at the base shape."""


class ScheduleConfig(Frozen):
    """LR over the run as a factor of each group's own peak LR."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "wsd"
    warmup_fraction: Fraction = 0.1
    """Share of the steps in which the LR rises linearly from 0."""
    decay_fraction: Fraction = 0.5
    """Share of the steps in which "wsd" decays linearly; the others decay from the end of the warm-up on."""
    final_factor: Fraction = 0.0
    """LR factor at the end of the decay."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.kind == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            together = f"warmup_fraction {self.warmup_fraction} and decay_fraction {self.decay_fraction} together exceed 1"
            raise fault_at("decay_fraction", together)
        return self


class DataConfig(Frozen):
    """Where the tokens come from."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "bin", "zipf-markov"] = "stdlib"
    """stdlib: the Python standard library's source text on this machine; bin: tokens as nanoGPT writes them."""
    paths: tuple[str, ...] = ()
    """Files or globs, for text, jsonl and parquet."""
    field: str = "text"
    """Key (jsonl) or column (parquet) that holds the text."""
    train_bin: str | None = None
    validation_bin: str | None = None
    dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Type of the tokens in .bin files."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    bpe_vocab_size: Annotated[int, Field(ge=257, le=2**20, strict=True)] = 4096
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the documents held out."""
    synthetic_tokens: Annotated[int, Field(ge=1, le=2**30, strict=True)] = 4_000_000
    synthetic_vocab: Annotated[int, Field(ge=2, le=4096, strict=True)] = 64
    synthetic_zipf: PositiveFloat = 1.2
    sha256: str | None = None
    """Expected fingerprint of the corpus; a study pins it, so that no run is trained on other data."""

    @model_validator(mode="after")
    def _keys_fit_the_source(self) -> Self:
        from_files = self.source in ("text", "jsonl", "parquet")
        if self.paths and not from_files:
            raise fault_at("paths", f"source {self.source!r} reads no paths; choose source text, jsonl or parquet")
        if (self.train_bin or self.validation_bin) and self.source != "bin":
            key = "train_bin" if self.train_bin else "validation_bin"
            raise fault_at(key, f"source {self.source!r} reads no .bin files; choose source bin")
        if self.source == "bin" and self.train_bin is not None and self.train_bin == self.validation_bin:
            raise fault_at("validation_bin", "is the training file: its loss would not be a held-out one")
        if self.tokenizer == "bpe" and self.source in ("bin", "zipf-markov"):
            raise fault_at("tokenizer", f"source {self.source!r} has tokens already; leave the tokenizer out")
        return self


class TrainingConfig(Frozen):
    """How long and with which batches."""

    steps: Positive = 400
    batch_size: Positive = 16
    """Sequences a step."""
    micro_batch_size: Positive | None = None
    """Sequences a forward pass; smaller than batch_size accumulates gradients."""
    precision: Precision = "fp32"
    """bf16 and fp16 are autocast over fp32 master weights; fp16 needs a CUDA device."""
    compile: bool = False
    validation_sequences: Positive = 256
    validate_every_steps: Positive | None = None
    """Default: only at the end."""
    data_seed: Seed = 0
    seed: Seed = 0
    """Seed of the initialization."""

    @model_validator(mode="after")
    def _batch_splits(self) -> Self:
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            what = f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            raise fault_at("micro_batch_size", what)
        return self


class RuntimeConfig(Frozen):
    """Where a run is made and what it writes on the way; not part of the run's identity."""

    device: Literal["cpu", "cuda"] = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Of each process."""
    processes: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Processes that a run is spread over, each with its share of every batch (data parallel)."""
    parallel: Layout | None = None
    """How a run is laid over its processes (scaling.parallel); default: data parallel."""
    pin: bool = True
    """Whether workers of a local pool are bound to cores (sweeps.pinning)."""
    checkpoint_every_steps: Positive | None = None
    checkpoint_async: bool = False
    """Sharded layouts: training goes on while a checkpoint is written (torch.distributed.checkpoint.async_save)."""
    keep_checkpoints_at_steps: tuple[Positive, ...] = ()
    """Updates after which a checkpoint is written that stays when the run ends, for `mutransfer branch`."""
    log_every_steps: Positive = 10
    noise_scale_every_steps: Positive | None = None
    """Steps between two measurements of the gradient at two batch sizes (scaling.noise_scale); default: none."""


class Branch(Frozen):
    """Where a run goes on from, when it is not from its own initialization: a checkpoint of another run."""

    run_id: str
    """Of the run that it branches off."""
    step: Positive
    """Updates that run had done."""
    batch_size: Positive
    """That run's sequences a step: the branch reads on in the order in which that run would have, whatever its own batch."""


class Recommended(Frozen):
    """What a recommended run was derived from, so that it can be told when that has changed; not part of the run's identity."""

    source: str
    """The study's directory, or the table; relative to the config's own folder."""
    runs: Positive
    fingerprint: str
    """Of the runs and their losses (sweeps.recommended_from)."""


YOUNGER_KEYS: dict[str, dict[str, Any]] = {
    "parametrization": {
        "form": "table8",
        "alpha": 1.0,
        "alignment": "full",
        "residual_multiplier": 1.0,
        "residual_attention_ratio": 1.0,
    },
    "optimizer": {
        "weight_decay_rule": "constant",
        "eps_rule": "scaled",
        "lr_multipliers": {"embedding": 1.0, "hidden": 1.0, "gain": 1.0, "readout": 1.0},
        "horizon_exponent": 0.5,
        "betas_rule": "constant",
        "muon_momentum": 0.95,
        "adamw_lr_factor": 1.0,
    },
    "base": {"steps": None},
}
"""Keys that came after the first studies, with their defaults."""

ADAPTIVE: tuple[OptimizerKind, ...] = ("adamw", "adam", "lion")
WITH_RULES: Mapping[ParametrizationKind, tuple[OptimizerKind, ...]] = {
    "sp": (*ADAPTIVE, "sgd", "muon"),
    "mup": (*ADAPTIVE, "sgd", "muon"),
    "completep": (*ADAPTIVE, "sgd", "muon"),
    "spectral": (*ADAPTIVE, "sgd", "muon"),
    "mup-simple": ADAPTIVE,
    "sp-per-layer": ADAPTIVE,
    "umup": ADAPTIVE,
}
"""The optimizers for which a parametrization has a published rule."""
TIED: tuple[ParametrizationKind, ...] = ("sp", "mup", "completep")
"""Parametrizations whose readout and embedding may be one tensor (in the form of Table 8)."""


class RunConfig(Frozen):
    """Everything that determines one training run."""

    model: ModelConfig
    parametrization: ParametrizationConfig = ParametrizationConfig()
    base: BaseShape = BaseShape()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    branch: Branch | None = None
    """Written by `mutransfer branch`; its schedule and steps count from the branching point."""
    recommended: Recommended | None = None
    """Written by `mutransfer recommend`."""

    @model_validator(mode="after")
    def _base_exists(self) -> Self:
        self.base_model()
        return self

    @model_validator(mode="after")
    def _processes_share_the_batch(self) -> Self:
        batch, processes = self.training.batch_size, self.runtime.processes
        if batch % processes and self.runtime.parallel is None:
            raise fault_at("runtime", f"processes {processes} does not divide training.batch_size {batch}")
        if self.runtime.noise_scale_every_steps is not None:
            if batch == 1:
                raise fault_at("runtime", "noise_scale_every_steps needs two sequences a batch, and training.batch_size is 1")
            if self.training.precision == "fp16":
                raise fault_at("runtime", "noise_scale_every_steps does not know fp16's scaled gradients; use bf16 or fp32")
        late = [step for step in self.runtime.keep_checkpoints_at_steps if step > self.training.steps]
        if late:
            raise fault_at("runtime", f"keep_checkpoints_at_steps {late} lie beyond training.steps {self.training.steps}")
        return self

    @model_validator(mode="after")
    def _rules_are_known(self) -> Self:
        rules, optimizer = self.parametrization, self.optimizer
        if optimizer.kind not in WITH_RULES[rules.kind]:
            kinds = ", ".join(kind for kind, known in WITH_RULES.items() if optimizer.kind in known)
            raise fault_at(
                "optimizer", f"{rules.kind} has no known rule for {optimizer.kind}; parametrizations that have one: {kinds}"
            )
        if rules.form != "table8" and rules.kind not in ("mup", "completep"):
            raise fault_at("parametrization", f"form {rules.form} is one of muP's; {rules.kind} has none")
        if self.model.tied_embeddings and (rules.kind not in TIED or rules.form != "table8"):
            name = rules.kind if rules.kind not in TIED else rules.form
            what = f"{name} gives embedding and readout different rules, and they are one tensor"
            raise fault_at("parametrization", f"{what}; use {', '.join(TIED)} with form table8")
        if rules.kind == "umup" and rules.init != InitConfig():
            raise fault_at("init", "umup starts every matrix at standard deviation 1; leave init out")
        if rules.alpha != 1.0 and rules.kind != "completep":
            raise fault_at("alpha", f"is completep's; {rules.kind} has no depth rule of that kind")
        if rules.alignment != "full" and rules.kind != "sp-per-layer":
            raise fault_at("alignment", f"is sp-per-layer's; {rules.kind} assumes full alignment")
        return self

    @model_validator(mode="after")
    def _forms_are_the_same_training(self) -> Self:
        """Settings under which the tables of `form` would not be equivalent are table 8's alone."""
        optimizer, form = self.optimizer, self.parametrization.form
        if form == "table8" and self.parametrization.kind != "spectral":
            return self
        name = form if form != "table8" else "spectral, whose readout is in the form of table 3,"
        if optimizer.weight_decay and optimizer.weight_decay_rule == "unscaled":
            raise fault_at(
                "weight_decay_rule",
                f"unscaled means another training in {name} than in table 8; use another rule, or mup in table8",
            )
        if optimizer.eps_rule == "constant":
            raise fault_at("eps_rule", f"constant means another training in {name} than in table 8; use scaled, or mup in table8")
        return self

    @model_validator(mode="after")
    def _settings_meet_tensors(self) -> Self:
        multipliers, model = self.optimizer.lr_multipliers, self.model
        if multipliers.gain != 1.0 and not (model.norm_gain or model.qk_norm):
            raise fault_at("lr_multipliers", "gain: the model has no gains (model.norm_gain, model.qk_norm)")
        if multipliers.readout != 1.0 and model.tied_embeddings:
            raise fault_at("lr_multipliers", "readout: the readout is the embedding's matrix; use embedding")
        if self.parametrization.kind == "umup" and self.optimizer.kind == "adam" and self.optimizer.weight_decay:
            raise fault_at("weight_decay", "umup has no known rule for adam's decay in the gradient; use adamw")
        return self

    @model_validator(mode="after")
    def _steps_have_a_rule(self) -> Self:
        optimizer, base_steps = self.optimizer, self.base.steps
        if base_steps is None:
            if optimizer.betas_rule == "horizon":
                raise fault_at("betas_rule", "horizon needs base.steps, the steps of the run that the betas were found in")
            if optimizer.horizon_exponent != 0.5:
                raise fault_at("horizon_exponent", "needs base.steps, the steps of the run that the values were found in")
            return self
        if optimizer.horizon_fault:
            raise fault_at("base", f"{optimizer.horizon_fault}; leave base.steps out")
        if optimizer.betas_rule == "horizon":
            try:
                horizon_betas((optimizer.beta1, optimizer.beta2), self.training.steps / base_steps)
            except ValueError as error:
                raise fault_at("betas_rule", f"{error}; use constant, or more steps") from None
        return self

    def base_model(self) -> ModelConfig:
        """The same family at the base shape."""
        return self.model.at(self.base.width, self.base.depth or self.model.depth)

    @property
    def batch_tokens(self) -> int:
        return self.training.batch_size * self.model.context

    @property
    def tokens(self) -> int:
        """Tokens seen in the whole run."""
        return self.training.steps * self.batch_tokens

    @property
    def log2_lr(self) -> float:
        return math.log2(self.optimizer.lr)

    @property
    def run_id(self) -> str:
        """Name of the run: a hash of its identity."""
        return content_hash(self.identity())

    def identity(self) -> dict[str, Any]:
        """What the run's name is made of: everything but `runtime`, `recommended` and, once the corpus is pinned by its hash, its paths."""
        paths = {"paths", "train_bin", "validation_bin"} if self.data.sha256 else set()
        values = self.model_dump(mode="json", exclude={"runtime": True, "recommended": True, "data": paths})
        # Keys that are younger than the first studies count where they differ from their default, so that older runs keep their names.
        for section, keys in YOUNGER_KEYS.items():
            for name, default in keys.items():
                if values[section][name] == default:
                    del values[section][name]
        if values["branch"] is None:
            del values["branch"]
        return values


ID_DIGITS = 12


def content_hash(value: Any, digits: int = ID_DIGITS) -> str:
    """First hex digits of the SHA-256 of `value`'s canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:digits]


def canonical_json(value: Any) -> str:
    """The one text of `value`: keys sorted, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
