"""The folded form trains the same function: in fp64, with multipliers that are powers of two, to the last bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from scaling.config import OptimizerConfig
from scaling.errors import ConfigError
from scaling.exports.folded import folded, folded_rules
from scaling.exports.plan import make_plan
from scaling.exports.recipes import param_groups as recipe
from scaling.model import build_model
from scaling.model_config import ModelFamily
from scaling.parametrization import TensorRule
from tests.conftest import tiny_run

STEPS = 30
RULE = TensorRule("w", "hidden", (8, 16), 16, 8, 1.0, 0.25, 2.0**-6, 0.125, 2.0**-20, "", {})


def losses(kind: str, multiplier: float, fold: bool, clip: float | None = None) -> list[float]:
    """Of a net whose second matrix has a multiplier, in the forward pass or folded."""
    rule = dataclasses.replace(RULE, optimizer=kind)  # type: ignore[arg-type]
    rules = [rule, folded(rule, multiplier) if fold else rule]
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(32, 16, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 16, (32,), generator=draw)
    shapes = ((16, 16), (16, 16))
    weights = [torch.randn(s, generator=draw, dtype=torch.float64) * r.init_std for s, r in zip(shapes, rules, strict=True)]
    parameters = [nn.Parameter(weight) for weight in weights]
    groups: list[dict[str, Any]] = [
        {"params": [parameter], "lr": r.lr, "weight_decay": r.weight_decay} | ({} if kind == "sgd" else {"eps": r.eps})
        for parameter, r in zip(parameters, rules, strict=True)
    ]
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    optimizer = torch.optim.SGD(groups, momentum=0.75) if kind == "sgd" else kinds[kind](groups, betas=(0.9, 0.95))
    result = []
    for _ in range(STEPS):
        hidden = torch.relu(x @ parameters[0].T)
        logits = hidden @ parameters[1].T
        loss = nn.functional.cross_entropy(logits if fold else logits * multiplier, y)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        result.append(loss.item())
    return result


@pytest.mark.parametrize("multiplier", [0.125, 4.0])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_folded_training_is_the_same_to_the_last_bit(kind: str, multiplier: float) -> None:
    apart = losses(kind, multiplier, fold=False)
    assert len(set(apart)) == STEPS
    assert losses(kind, multiplier, fold=True) == apart


def test_clipping_by_the_plain_global_norm_is_another_clipping() -> None:
    apart, together = losses("adamw", 0.125, False, clip=0.02), losses("adamw", 0.125, True, clip=0.02)
    assert max(abs(a - b) for a, b in zip(apart, together, strict=True)) > 1e-4


PARAMETRIZATIONS: list[tuple[str, dict[str, Any]]] = [
    ("mup", {"residual_multiplier": 0.5, "embedding_multiplier": 4.0, "attention_multiplier": 0.5}),
    ("mup", {"form": "table9"}),
    ("completep", {"alpha": 1.0}),
    ("umup", {}),
]


def model_losses(run: Any, form: Any) -> list[float]:
    """Of the toolkit's model in fp64, with the recipe's groups and clipping; the folded form in a model without multipliers."""
    plan = make_plan(run, form).to_dict()
    model = build_model(run).double()
    recipe.initialize(model, plan, seed=1)
    if form == "folded":
        plain = build_model(tiny_run(run.model.width, kind="sp", family=family_of(run))).double()
        plain.load_state_dict(model.state_dict())
        model = plain
    optimizer, result = recipe.build_optimizer(model, plan), []
    for step in range(8):
        tokens = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        recipe.clip_gradients(model, plan)
        optimizer.step()
        result.append(loss.item())
    return result


def family_of(run: Any) -> ModelFamily:
    return ModelFamily(**{name: getattr(run.model, name) for name in ModelFamily.model_fields})


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("kind", "settings"), PARAMETRIZATIONS)
def test_a_folded_transformer_trains_as_the_one_with_multipliers(kind: str, settings: dict[str, Any], qk_norm: bool) -> None:
    """Clipped too, since the recipe's norm is that of the unfolded gradients. fp32 draws are scaled: last digits differ."""
    family = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32, activation="swiglu", qk_norm=qk_norm)
    if kind == "umup" and qk_norm:
        family = family.model_copy(update={"norm_gain": True})
    optimizer = OptimizerConfig(lr=2.0**-6, weight_decay=0.1, clip_norm=0.25)
    run = tiny_run(64, kind=kind, family=family, base_width=32, optimizer=optimizer, init=None, **settings)
    apart, together = model_losses(run, "multipliers"), model_losses(run, "folded")
    assert abs(apart[-1] - apart[0]) > 1e-3
    assert max(abs(a - b) for a, b in zip(apart, together, strict=True)) < 1e-6


def test_a_tied_embedding_with_two_multipliers_has_no_folded_form() -> None:
    family = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32, tied_embeddings=True)
    with pytest.raises(ConfigError, match="one tensor with two multipliers"):
        folded_rules(tiny_run(64, family=family, base_width=32))
    assert all(math.isclose(factor, 1.0) for _, factor in folded_rules(tiny_run(32, family=family, base_width=32)))
