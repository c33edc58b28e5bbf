"""Megatron-LM without its own muP: every tensor's LR, decay and eps by megatron-core's group overrides, and its init, from plan.json.

For what --use-mup lacks: weight decay and eps by the rules, one init std a tensor, residual branches, other parametrizations. The recipe
`recipes/megatron_recipe.py` gives them to Megatron. Written for megatron-core 0.19. Torch-free.

Megatron keeps query, key and value in one tensor, and gate and up in another: rules that differ within one have no place there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from scaling.config import RunConfig
from scaling.errors import Fault
from scaling.exports.batch import Batch
from scaling.exports.folded import folded_rules
from scaling.exports.megatron import Flags, script, shape_flags, shared_faults, training_flags
from scaling.exports.plan import ExportPlan, ExportRow
from scaling.exports.pytorch import PARAM_GROUPS, recipe
from scaling.parametrization import TensorRule, carried, forward_rules

_LAYER = r"decoder\.layers\.\d+\."
PATTERNS = {
    "embedding.weight": r"embedding\.word_embeddings\.weight",
    "attention.query.weight": _LAYER + r"self_attention\.linear_qkv\.weight",
    "attention.key.weight": _LAYER + r"self_attention\.linear_qkv\.weight",
    "attention.value.weight": _LAYER + r"self_attention\.linear_qkv\.weight",
    "attention.output.weight": _LAYER + r"self_attention\.linear_proj\.weight",
    "attention.query_norm.weight": _LAYER + r"self_attention\.q_layernorm\.weight",
    "attention.key_norm.weight": _LAYER + r"self_attention\.k_layernorm\.weight",
    "mlp.up.weight": _LAYER + r"mlp\.linear_fc1\.weight",
    "mlp.gate.weight": _LAYER + r"mlp\.linear_fc1\.weight",
    "mlp.down.weight": _LAYER + r"mlp\.linear_fc2\.weight",
    # The norm before a product is a part of it under Transformer Engine.
    "attention_norm.weight": _LAYER + r"(input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)",
    "mlp_norm.weight": _LAYER + r"(pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)",
    "final_norm.weight": r"decoder\.final_layernorm\.weight",
    "readout.weight": r"output_layer\.weight",
}
"""Our tensor, without its layer -> the whole name in megatron-core's GPTModel, without its wrappers'."""
VALUES = ("lr", "weight_decay", "eps", "init_std")


def _kind(rule: TensorRule) -> str:
    return ".".join(rule.name.split(".")[2:]) if rule.name.startswith("blocks.") else rule.name


def _members(run: RunConfig) -> dict[str, dict[str, tuple[TensorRule, float]]]:
    """Pattern -> kind -> rule and folded multiplier; all layers have the same."""
    found: dict[str, dict[str, tuple[TensorRule, float]]] = defaultdict(dict)
    for rule, factor in folded_rules(run):
        kind = _kind(rule)
        found[PATTERNS[kind]].setdefault(kind, (rule, factor))
    return found


def _values(rule: TensorRule) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in (getattr(rule, name) for name in VALUES))


def faults(run: RunConfig) -> list[Fault]:
    """Everything of `run` that this form cannot express."""
    found = shared_faults(run)
    scale, plain = forward_rules(run).attention_scale, 1 / math.sqrt(run.model.head_size)
    if found:
        return found
    if scale != plain and not run.model.qk_norm:
        what = (
            f"query . key is multiplied by {scale:g}, in Megatron by {plain:g} without a flag, and query and key are one tensor"
        )
        cure = "study model.qk_norm=true, whose gain takes it; or attention_multiplier and head_dim that make it that"
        return [Fault("parametrization.attention_multiplier", what, cure)]
    for kinds in _members(run).values():
        (first, (rule, _)), *others = kinds.items()
        for kind, (other, _) in others:
            if _values(other) != _values(rule):
                differ = [name for name in VALUES if getattr(other, name) != getattr(rule, name)]
                what = f"has another {', '.join(differ)} than {first}, and Megatron keeps the two in one tensor"
                found.append(Fault(kind, what, "--engine torchtitan or --engine pytorch, which keep them apart"))
    return found


def plan_of(run: RunConfig) -> ExportPlan:
    """The folded plan under Megatron's names; call after `faults` found none."""
    rows = []
    for pattern, kinds in _members(run).items():
        rules = [rule for rule, _ in kinds.values()]
        rule, factor = next(iter(kinds.values()))
        shape = (sum(each.shape[0] for each in rules), *rule.shape[1:])
        rows.append(ExportRow(pattern, replace(rule, shape=shape), factor if math.isnan(rule.init_std) else None, factor))
    return ExportPlan(run, "folded", tuple(rows))


def arguments(run: RunConfig, batch: Batch) -> Flags:
    """The flags: LR and init of the embedding and the hidden matrices, which the recipe changes for all that have others."""
    rules = {_kind(rule): rule for rule, _ in folded_rules(run)}
    embedding, query = rules["embedding.weight"], rules["attention.query.weight"]
    optimizer = carried(run)
    return [
        *shape_flags(run, batch),
        *training_flags(run, embedding.lr, optimizer.weight_decay, optimizer.eps),
        ("--init-method-std", repr(query.init_std)),
        ("--embedding-init-method-std", repr(embedding.init_std)),
    ]


def export_files(run: RunConfig, batch: Batch) -> dict[str, str]:
    """File name -> content."""
    names = (PARAM_GROUPS, "megatron_recipe.py")
    return {"megatron_arguments.sh": script(arguments(run, batch)), "plan.json": plan_of(run).to_json()} | {
        name: recipe(name) for name in names
    }
