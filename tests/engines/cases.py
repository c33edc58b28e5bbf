"""The runs whose tables are made: parametrizations at a target four times as wide and half again as deep as the base. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from scaling.config import InitConfig, OptimizerConfig, RunConfig
from scaling.exports.folded import folded_rules
from scaling.exports.plan import Form
from scaling.model_config import ModelFamily
from scaling.parametrization import TensorRule, tensor_rules

BASE_WIDTH, WIDTH, BASE_DEPTH, DEPTH = 32, 128, 2, 3
LR, WEIGHT_DECAY, EPS = 0.01, 0.1, 1e-8


def engine_run(
    kind: str,
    *,
    qk_norm: bool = False,
    queries_per_kv: int = 2,
    optimizer: dict[str, Any] | None = None,
    init: InitConfig | None = None,
    **more: Any,
) -> RunConfig:
    """A Llama-shaped run of `kind` at the target; more: further keys of its parametrization."""
    family = ModelFamily(
        depth=DEPTH,
        head_dim=16,
        context=16,
        vocab_size=512,
        activation="swiglu",
        norm_gain=True,
        qk_norm=qk_norm,
        queries_per_kv=queries_per_kv,
    )
    return RunConfig.model_validate(
        {
            "model": family.at(WIDTH),
            "base": {"width": BASE_WIDTH, "depth": BASE_DEPTH},
            "parametrization": {"kind": kind, "init": init or InitConfig()} | more,
            "optimizer": OptimizerConfig(**{"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS} | (optimizer or {})),
            "data": {"source": "zipf-markov", "synthetic_tokens": 40_000, "synthetic_vocab": 32},
            "training": {"steps": 10, "batch_size": 8},
        }
    )


MUP = engine_run("mup", residual_multiplier=0.5, embedding_multiplier=4.0, attention_multiplier=0.5)
COMPLETEP = engine_run("completep", qk_norm=True)
COMPLETEP_PLAIN = engine_run("completep")
UMUP = engine_run("umup")


def exported_rules(run: RunConfig, form: Form, name_of: Callable[[str], str] = str) -> Iterable[tuple[str, TensorRule, float]]:
    """The engine's name, the rule in the exported form, and the multiplier that went into the tensor."""
    pairs = folded_rules(run) if form == "folded" else [(rule, 1.0) for rule in tensor_rules(run)]
    return [(name_of(rule.name), rule, factor) for rule, factor in pairs]


def title_of(run: RunConfig, form: str) -> str:
    """A heading: what the run is, and in which form it was exported."""
    model, base = run.model, run.base_model()
    return f"{run.parametrization.kind}, {form}: width {base.width} -> {model.width}, depth {base.depth} -> {model.depth}"
