"""The folded form: a tensor's forward multiplier moved into the tensor, so that an engine needs no multipliers. Pure, torch-free.

y = A (W x) is y = (A W) x. With W' = A W the init std is A B and, the gradient of W' being that of W over A,

    AdamW, Lion, Muon   lr A C      weight decay wd / A      eps E / A
    Adam                lr A C      weight decay wd / A^2    eps E / A     (its decay is part of the gradient)
    SGD                 lr A^2 C    weight decay wd / A^2

train the same function, step by step (Tensor Programs V, 2203.03466, Lemma J.1, with eps and decay added). A global gradient norm is not
the same: W' contributes 1 / A of what W does, so that clipping by it is another clipping unless the norm is taken over A times the
gradients.
A tied embedding is one tensor with two multipliers, and can be folded only where they are equal.
"""

from __future__ import annotations

import math
from dataclasses import replace

from scaling.config import RunConfig
from scaling.errors import ConfigError, Fault
from scaling.parametrization import ForwardRules, TensorRule, forward_rules, tensor_rules


def folded(rule: TensorRule, multiplier: float) -> TensorRule:
    """`rule` for the tensor times `multiplier` (positive), whose forward pass then has none."""
    squared = rule.optimizer in ("adam", "sgd")
    return replace(
        rule,
        multiplier=1.0,
        init_std=rule.init_std * multiplier,
        lr=rule.lr * (multiplier**2 if rule.optimizer == "sgd" else multiplier),
        weight_decay=rule.weight_decay / (multiplier**2 if squared else multiplier),
        eps=rule.eps / multiplier,
    )


def multipliers(run: RunConfig) -> dict[str, float]:
    """Name -> everything that the forward pass multiplies the tensor's output by, beyond 1 / sqrt(head_dim) in attention.

    Raises ConfigError for a tied embedding whose two uses have different multipliers.
    """
    forward = forward_rules(run)
    if run.model.tied_embeddings and forward.embedding != forward.readout:
        what = f"is one tensor with two multipliers, {forward.embedding:g} as embedding and {forward.readout:g} as readout"
        cure = "set model.tied_embeddings to false, or export with --form multipliers to an engine whose model applies them"
        raise ConfigError(Fault("embedding.weight", f"{what}: it has no folded form", cure))
    return {rule.name: rule.multiplier * _around(rule, forward, run) for rule in tensor_rules(run)}


def _around(rule: TensorRule, forward: ForwardRules, run: RunConfig) -> float:
    """Multipliers of the forward pass that stand beside the tensor, not in its rule."""
    last, attention = rule.name.split(".")[-2], forward.attention_scale / (1 / math.sqrt(run.model.head_size))
    if rule.role == "hidden":
        beside = {
            "output": forward.attention_output * forward.attention_branch,
            "down": forward.mlp_inner * forward.mlp_branch,
            "query": 1.0 if run.model.qk_norm else attention,
        }
        return beside.get(last, 1.0)
    # A norm takes any factor on the queries out again: the factor goes to the gain behind it.
    return attention if last == "query_norm" else 1.0


def folded_rules(run: RunConfig) -> list[tuple[TensorRule, float]]:
    """Every tensor's rule in the folded form, and the multiplier that went into it."""
    factors = multipliers(run)
    return [(folded(rule, factors[rule.name]), factors[rule.name]) for rule in tensor_rules(run)]
