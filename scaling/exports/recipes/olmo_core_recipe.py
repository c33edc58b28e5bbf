"""OLMo-core 3.0.0 configs from plan.json and model.json: its transformer with the plan's init, and the plan's optimizer groups.

    config.model = model_config()
    config.train_module = train_module_config(dp_config=..., compile_model=True)
    config.trainer.max_duration, config.data_loader.global_batch_size = duration(), global_batch_tokens()

The rest of a script of yours stays: `model = config.model.build(init_device="meta")`, `config.train_module.build(model)`. OLMo-core's
schedulers and init methods are others than the run's; `Schedule` and `PlanInit` stand in their place. Needs param_groups.py beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import param_groups
from param_groups import PlanError, read_plan
from torch import nn

try:
    from olmo_core.config import DType
    from olmo_core.nn.attention import AttentionConfig
    from olmo_core.nn.feed_forward import FeedForwardConfig
    from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
    from olmo_core.nn.lm_head import LMHeadConfig
    from olmo_core.nn.rope import RoPEConfig
    from olmo_core.nn.transformer import TransformerBlockConfig, TransformerConfig
    from olmo_core.nn.transformer.init import _apply_init
    from olmo_core.optim import AdamConfig, AdamWConfig, OptimConfig, OptimGroupOverride, Scheduler
    from olmo_core.train import Duration
    from olmo_core.train.train_module import TransformerTrainModuleConfig
except ImportError as error:
    raise param_groups.not_installed(error, "olmo_core", "pip install ai2-olmo-core==3.0.0") from None

HERE = Path(__file__).parent
WRITTEN_FOR = "3.0.0"
OWN_SETTINGS = ("rank_microbatch_size", "max_sequence_length", "optim", "scheduler", "max_grad_norm", "autocast_precision")
"""Settings of the train module that are the run's."""


def plan_and_shape(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """plan.json and model.json. Raises PlanError for another version of OLMo-core."""
    if version("ai2-olmo-core") != WRITTEN_FOR:
        raise PlanError(f"ai2-olmo-core {version('ai2-olmo-core')} is installed; this recipe is for {WRITTEN_FOR}")
    return read_plan(folder / "plan.json"), json.loads((folder / "model.json").read_text())


class PlanInit:
    """Stands where a transformer's `init_method` does: each tensor is drawn from N(0, its own std), the gains of QK-norm filled."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.rows = {name_of(row): row for row in plan["tensors"]}

    def init_embeddings(self, m: Any, *, generator: Any = None, **_: Any) -> None:
        self._fill(m.weight, "embeddings", generator)

    def init_attention(self, m: Any, *, generator: Any = None, **_: Any) -> None:
        norms = [name for name in ("q_norm", "k_norm") if getattr(m, name) is not None]
        for name in ("w_q", "w_k", "w_v", "w_out", *norms):
            self._fill(getattr(m, name).weight, f"blocks.*.attention.{name}", generator)

    def init_feed_forward(self, m: Any, *, generator: Any = None, **_: Any) -> None:
        for name in ("w1", "w2", "w3"):
            self._fill(getattr(m, name).weight, f"blocks.*.feed_forward.{name}", generator)

    def init_final_w_out(self, m: Any, *, generator: Any = None, **_: Any) -> None:
        self._fill(m.weight, "lm_head.w_out", generator)

    def _fill(self, weight: Any, name: str, generator: Any) -> None:
        row = self.rows[f"{name}.weight"]
        if row["init_std"] is None:
            _apply_init(nn.init.constant_, weight, row["init_constant"])
        else:
            _apply_init(nn.init.normal_, weight, std=row["init_std"], generator=generator)


@dataclass
class PlannedTransformerConfig(TransformerConfig):  # type: ignore[misc]
    """A TransformerConfig whose model starts as the plan says. plan: path of plan.json."""

    plan: str = ""

    def build(self, *, init_device: str = "cpu") -> Any:
        """The model; raises PlanError where a tensor has no row of the plan, or a row no tensor."""
        plan, model = read_plan(self.plan), super().build(init_device=init_device)
        for name, _, row in param_groups.match(model, plan):
            # OLMo-core fills gains with 1 by itself, before PlanInit.
            if row["init_constant"] not in (None, 1.0) and not name.endswith(("q_norm.weight", "k_norm.weight")):
                raise PlanError(f"{name} starts at {row['init_constant']}, and OLMo-core fills it with 1")
        model.init_method = PlanInit(plan)
        return model


@dataclass
class Schedule(Scheduler):  # type: ignore[misc]
    """The plan's schedule: a warm-up that ends at `warmup_steps`, the peak until `decay_start_step`, a decay to `final_factor`."""

    steps: int = 0
    warmup_steps: int = 0
    decay_start_step: int = 0
    decay_shape: str = "linear"
    final_factor: float = 0.0

    def get_lr(self, initial_lr: Any, current: int, t_max: int) -> Any:
        """LR of update number `current`, which OLMo-core counts from 1. Raises PlanError for another number of steps than the run's."""
        if t_max != self.steps:
            raise PlanError(f"the trainer has {t_max} steps and the run {self.steps}: give it max_duration=duration()")
        return initial_lr * param_groups.lr_factor({"schedule": vars(self)}, current - 1)


def model_config(folder: Path = HERE) -> PlannedTransformerConfig:
    """The run's transformer: pre-norm blocks with RMSNorm, SwiGLU and rotary positions, queries, keys and values as three matrices."""
    _, shape = plan_and_shape(folder)
    norm = LayerNormConfig(name=LayerNormType.rms, eps=shape["norm_eps"], bias=False)
    attention = AttentionConfig(
        n_heads=shape["n_heads"],
        n_kv_heads=shape["n_kv_heads"],
        head_dim=shape["head_dim"],
        bias=False,
        rope=RoPEConfig(theta=shape["rope_theta"]),
        qk_norm=norm if shape["qk_norm"] else None,
        use_head_qk_norm=True if shape["qk_norm"] else None,
    )
    feed_forward = FeedForwardConfig(hidden_size=shape["hidden_size"], bias=False)
    return PlannedTransformerConfig(
        d_model=shape["d_model"],
        vocab_size=shape["vocab_size"],
        n_layers=shape["n_layers"],
        block=TransformerBlockConfig(sequence_mixer=attention, feed_forward=feed_forward, layer_norm=norm),
        lm_head=LMHeadConfig(layer_norm=norm, bias=False),
        tie_word_embeddings=shape["tie_word_embeddings"],
        plan=str(folder / "plan.json"),
    )


def name_of(row: dict[str, Any]) -> str:
    """A row's tensor as a glob, `*` for a layer's number."""
    return str(row["pattern"].replace(r"\d+", "*").replace("\\", ""))


def optimizer_config(folder: Path = HERE) -> OptimConfig[Any]:
    """AdamW or Adam, tensors with equal settings in one group; none is left to the default group, whose LR is 0."""
    plan, _ = plan_and_shape(folder)
    groups: dict[tuple[float, ...], list[str]] = {}
    for row in plan["tensors"]:
        groups.setdefault((row["lr"], row["weight_decay"], row["eps"]), []).append(name_of(row))
    overrides = [
        OptimGroupOverride(params=names, opts={"lr": lr, "weight_decay": decay, "eps": eps})
        for (lr, decay, eps), names in groups.items()
    ]
    kinds: dict[str, Any] = {"adamw": AdamWConfig, "adam": AdamConfig}
    betas = (plan["optimizer"]["beta1"], plan["optimizer"]["beta2"])
    config: OptimConfig[Any] = kinds[plan["optimizer"]["kind"]](lr=0.0, betas=betas, group_overrides=overrides)
    return config


def train_module_config(folder: Path = HERE, **settings: Any) -> TransformerTrainModuleConfig:
    """settings: your own of TransformerTrainModuleConfig (dp_config, compile_model, ...). Raises PlanError for those that are the run's."""
    plan, shape = plan_and_shape(folder)
    own = [name for name in OWN_SETTINGS if name in settings]
    if own:
        raise PlanError(f"{', '.join(own)}: set by the export from the run; leave it out")
    return TransformerTrainModuleConfig(
        rank_microbatch_size=shape["micro_batch_sequences"] * shape["context_tokens"],
        max_sequence_length=shape["context_tokens"],
        optim=optimizer_config(folder),
        max_grad_norm=plan["optimizer"]["clip_norm"],
        scheduler=Schedule(**plan["schedule"]),
        autocast_precision=DType.bfloat16 if shape["bf16"] else None,
        **settings,
    )


def duration(folder: Path = HERE) -> Duration:
    """The trainer's max_duration: the run's steps."""
    return Duration.steps(plan_and_shape(folder)[0]["schedule"]["steps"])


def global_batch_tokens(folder: Path = HERE) -> int:
    """The data loader's global_batch_size, tokens."""
    shape = plan_and_shape(folder)[1]
    return int(shape["batch_sequences"] * shape["context_tokens"])
