"""The table of verdicts: right models pass, each fault is caught and the right tensor named, nothing else is blamed."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.coordinates import judge
from scaling.coordinates import measure
from tests.coordinates.targets import Fault, convnet, mlp, transformer, with_fault

WIDTHS = (32, 64, 128, 256)
FULL_HEADS: dict[str, Any] = {"model__head_dim": None, "model__num_heads": 4}

RIGHT: dict[str, Any] = {
    "mlp, adamw": lambda: mlp(),
    "mlp, sgd": lambda: mlp(optimizer_kind="sgd"),
    "mlp, muon and adamw": lambda: mlp(optimizer_kind="muon"),
    "mlp, readout in table 3 form": lambda: mlp(form="table3"),
    "mlp, unit init and 1/sqrt(fan_in) forward": lambda: mlp(form="unit"),
    "mlp, readout starts at zero": lambda: mlp(zero_readout=True),
    "convnet, adamw": lambda: convnet(),
    "transformer": lambda: transformer(),
    "transformer, block outputs start at zero": lambda: transformer(parametrization={"init": {"block_output": "zero"}}),
    "transformer, tied": lambda: transformer(model__tied_embeddings=True),
    "transformer, grouped queries, swiglu, gains": lambda: transformer(
        model__queries_per_kv=2, model__activation="swiglu", model__norm_gain=True
    ),
    "transformer, qk-norm": lambda: transformer(model__qk_norm=True),
    "transformer, sgd": lambda: transformer(optimizer={"kind": "sgd", "lr": 0.5, "beta1": 0.0}),
    "transformer, sgd with momentum, table 9": lambda: transformer(
        optimizer={"kind": "sgd", "lr": 0.2}, parametrization={"form": "table9"}
    ),
    "transformer, table 3": lambda: transformer(parametrization={"form": "table3"}),
    "transformer, table 9": lambda: transformer(parametrization={"form": "table9"}),
    "transformer, completep at twice the base depth": lambda: transformer(
        parametrization={"kind": "completep"}, model__depth=2, base={"width": 32, "depth": 1}
    ),
    "transformer, adam": lambda: transformer(optimizer={"kind": "adam", "lr": 2.0**-6, "eps": 1e-12, "weight_decay": 1e-3}),
    "transformer, lion": lambda: transformer(optimizer={"kind": "lion", "lr": 2.0**-8, "weight_decay": 0.1}),
    "transformer, muon": lambda: transformer(
        optimizer={"kind": "muon", "lr": 0.02, "adamw_lr_factor": 0.5, "eps": 1e-12, "weight_decay": 0.1}
    ),
    "transformer, spectral condition": lambda: transformer(parametrization={"kind": "spectral"}, model__queries_per_kv=2),
    "transformer, head_dim grows": lambda: transformer(**FULL_HEADS),
}

HIDDEN_MLP = {"layers.0.weight", "layers.1.weight"}
HIDDEN_CONV = {"blocks.0.weight", "blocks.1.weight"}
ATTENTION = {f"blocks.0.attention.{part}.weight" for part in ("query", "key", "value", "output")}
HIDDEN = ATTENTION | {"blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"}

FAULTS: dict[str, tuple[Any, set[str], str]] = {
    # name: (target, culprits, statistic)
    "mlp: hidden LR not scaled": (lambda: with_fault(mlp(), lr={"layers.*.weight": 1}), HIDDEN_MLP, "update"),
    "mlp: LR of one layer not scaled": (lambda: with_fault(mlp(), lr={"layers.1.weight": 1}), {"layers.1.weight"}, "update"),
    "mlp: hidden LR scaled twice": (lambda: with_fault(mlp(), lr={"layers.*.weight": -1}), HIDDEN_MLP, "update"),
    "mlp: hidden LR by 1/sqrt(m)": (lambda: with_fault(mlp(), lr={"layers.*.weight": 0.5}), HIDDEN_MLP, "update"),
    "mlp: input LR by 1/m": (lambda: with_fault(mlp(), lr={"embed.weight": -1}), {"embed.weight"}, "update"),
    "mlp: input bias LR by 1/m": (lambda: with_fault(mlp(), lr={"embed.bias": -1}), {"embed.bias"}, "update"),
    "mlp: readout scaled twice": (lambda: with_fault(mlp(), lr={"readout.weight": -1}), {"readout.weight"}, "update"),
    "mlp: readout LR grows": (lambda: with_fault(mlp(), lr={"readout.weight": 1}), {"readout.weight"}, "update"),
    "mlp: no readout multiplier": (lambda: with_fault(mlp(), multiplier={"readout": 1}), {"readout.weight"}, "multiplier"),
    "mlp: readout multiplier twice": (lambda: with_fault(mlp(), multiplier={"readout": -1}), {"readout.weight"}, "multiplier"),
    "mlp: hidden init of constant std": (lambda: with_fault(mlp(), init={"layers.*.weight": 0.5}), HIDDEN_MLP, "init"),
    "mlp: hidden init by 1/fan_in": (lambda: with_fault(mlp(), init={"layers.*.weight": -0.5}), HIDDEN_MLP, "init"),
    "mlp: input init grows": (lambda: with_fault(mlp(), init={"embed.weight": 0.5}), {"embed.weight"}, "init"),
    "mlp: readout init grows": (lambda: with_fault(mlp(), init={"readout.weight": 0.5}), {"readout.weight"}, "init"),
    "mlp: weight decay not scaled": (lambda: with_fault(mlp(), weight_decay={"layers.*.weight": -1}), HIDDEN_MLP, "weight_decay"),
    "mlp: a schedule flattens the groups": (lambda: with_fault(mlp(), flat_schedule=True), HIDDEN_MLP, "update"),
    "mlp, sgd: hidden LR grows": (lambda: with_fault(mlp(optimizer_kind="sgd"), lr={"layers.*.weight": 1}), HIDDEN_MLP, "update"),
    "mlp, sgd: input LR not scaled": (
        lambda: with_fault(mlp(optimizer_kind="sgd"), lr={"embed.weight": -1}), {"embed.weight"}, "update",
    ),
    "mlp, sgd: no readout multiplier": (
        lambda: with_fault(mlp(optimizer_kind="sgd"), multiplier={"readout": 1}), {"readout.weight"}, "multiplier",
    ),
    "mlp, muon: hidden LR by 1/m": (lambda: with_fault(mlp(optimizer_kind="muon"), lr={"layers.*.weight": -1}), HIDDEN_MLP, "update"),
    "convnet: LR not scaled": (lambda: with_fault(convnet(), lr={"blocks.*.weight": 1}), HIDDEN_CONV, "update"),
    "convnet: stem LR by 1/m": (lambda: with_fault(convnet(), lr={"stem.weight": -1}), {"stem.weight"}, "update"),
    "convnet: constant std": (lambda: with_fault(convnet(), init={"blocks.1.weight": 0.5}), {"blocks.1.weight"}, "init"),
    "convnet: no readout multiplier": (lambda: with_fault(convnet(), multiplier={"head": 1}), {"head.weight"}, "multiplier"),
    "convnet: gain LR by 1/m": (lambda: with_fault(convnet(), lr={"norms.0.weight": -1}), {"norms.0.weight"}, "update"),
    "transformer: hidden LR not scaled": (lambda: transformer(Fault(lr={"blocks.*.weight": 1})), HIDDEN, "update"),
    "transformer: hidden LR scaled twice": (lambda: transformer(Fault(lr={"blocks.*.weight": -1})), HIDDEN, "update"),
    "transformer: LR of mlp.down only": (
        lambda: transformer(Fault(lr={"blocks.0.mlp.down.weight": 1})), {"blocks.0.mlp.down.weight"}, "update",
    ),
    "transformer: frozen embedding": (lambda: transformer(Fault(lr={"embedding.weight": -1})), {"embedding.weight"}, "update"),
    "transformer: readout scaled twice": (lambda: transformer(Fault(lr={"readout.weight": -1})), {"readout.weight"}, "update"),
    "transformer: no readout multiplier": (lambda: transformer(Fault(multiplier={"readout": 1})), {"readout.weight"}, "multiplier"),
    "transformer: attention init of constant std": (lambda: transformer(Fault(init={"blocks.0.attention.*": 0.5})), ATTENTION, "init"),
    "transformer: tied, LR by 1/m": (
        lambda: transformer(Fault(lr={"embedding.weight": -1}), model__tied_embeddings=True), {"embedding.weight"}, "update",
    ),
    "transformer: 1/sqrt(head_dim) where head_dim grows": (
        lambda: transformer(Fault(multiplier={"blocks.0.attention.query": 0.5}), **FULL_HEADS), {"blocks.0.attention"}, "attention_logits",
    ),
    "transformer: u-muP, whose embedding learning rate falls with width": (
        lambda: transformer(parametrization={"kind": "umup"}, optimizer={"lr": 0.25, "eps": 1e-9}), {"embedding.weight"}, "update",
    ),
    "transformer: mup-simple, whose readout starts too large": (
        lambda: transformer(parametrization={"kind": "mup-simple"}), {"readout.weight"}, "init",
    ),
    "mlp: eps above the gradient": (lambda: with_fault(mlp(), eps=1e-2), set(), "eps"),
    "transformer: eps above the gradient": (lambda: transformer(Fault(eps=1e-2)), set(), "eps"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_passes(name: str) -> None:
    verdict = judge(measure(RIGHT[name](), WIDTHS, seeds=2))
    assert verdict.verdict == "pass", str(verdict)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_named(name: str) -> None:
    target, culprits, statistic = FAULTS[name]
    verdict = judge(measure(target(), WIDTHS, seeds=2))
    assert verdict.verdict == ("warn" if statistic == "weight_decay" else "fail"), str(verdict)
    named = {item.tensor for item in verdict.culprits if item.statistic == statistic}
    if culprits:
        assert named == culprits, str(verdict)
        assert {item.tensor for item in verdict.culprits} == culprits, str(verdict)
    else:
        assert named, str(verdict)
