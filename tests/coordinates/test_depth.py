"""The check against depth: CompleteP passes at any alpha, muP and SP do not, each fault is caught and the right tensors named."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.coordinate_verdict import CoordinateVerdict
from analysis.depth_coordinates import judge_depth
from scaling.coordinates import measure_depths
from scaling.layer_names import LayerNames
from tests.coordinates.depth_targets import DeepMlp, DepthFault, PlainMlp, transformer

DEPTHS = (2, 4, 8, 16)
HALF: dict[str, Any] = {"parametrization": {"kind": "completep", "alpha": 0.5}}
ATTENTION = {f"blocks.*.attention.{part}.weight" for part in ("query", "key", "value", "output")}
FEED_FORWARD = {"blocks.*.mlp.up.weight", "blocks.*.mlp.down.weight"}
BLOCK = ATTENTION | FEED_FORWARD
LAYERS = {f"layers.*.{place}.{kind}" for place in (0, 2) for kind in ("weight", "bias")}

RIGHT: dict[str, Any] = {
    "transformer, alpha 1": lambda: transformer(),
    "transformer, alpha 3/4": lambda: transformer(parametrization={"kind": "completep", "alpha": 0.75}),
    "transformer, alpha 1/2": lambda: transformer(**HALF),
    "transformer, base depth not named": lambda: transformer(base={"width": 32}),
    "transformer, embedding of std 1": lambda: transformer(parametrization={"kind": "completep", "init": {"embedding_std": 1.0}}),
    "transformer, block outputs start at zero": lambda: transformer(
        parametrization={"kind": "completep", "init": {"block_output": "zero"}}
    ),
    "transformer, tied": lambda: transformer(model__tied_embeddings=True),
    "transformer, swiglu, gains, grouped queries, qk-norm": lambda: transformer(
        model__activation="swiglu", model__norm_gain=True, model__queries_per_kv=2, model__qk_norm=True
    ),
    "residual mlp, alpha 1": lambda: DeepMlp(),
    "residual mlp, alpha 1/2": lambda: DeepMlp(alpha=0.5),
    "residual mlp, sgd, alpha 1": lambda: DeepMlp(optimizer_kind="sgd", lr=0.02),
    "residual mlp, sgd, alpha 1/2": lambda: DeepMlp(optimizer_kind="sgd", lr=0.02, alpha=0.5),
}

FAULTS: dict[str, tuple[Any, set[str], str]] = {
    # name: (target, culprits, statistic)
    "transformer: mup": (lambda: transformer(parametrization={"kind": "mup"}), BLOCK, "multiplier"),
    "transformer: sp": (lambda: transformer(parametrization={"kind": "sp"}), BLOCK, "multiplier"),
    "transformer: mup, block outputs' init by 1/sqrt(depth)": (
        lambda: transformer(parametrization={"kind": "mup", "init": {"block_output": "depth_scaled"}}), BLOCK, "update",
    ),
    "transformer: alpha 1/2, LR not scaled": (lambda: transformer(DepthFault(lr={"blocks.*": 0.5}), **HALF), BLOCK, "update"),
    "transformer: alpha 1, LR as at 1/2": (lambda: transformer(DepthFault(lr={"blocks.*": -0.5})), BLOCK, "update"),
    "transformer: alpha 1/2, LR scaled twice": (lambda: transformer(DepthFault(lr={"blocks.*": -0.5}), **HALF), BLOCK, "update"),
    "transformer: embedding LR falls": (lambda: transformer(DepthFault(lr={"embedding.weight": -0.5})), {"embedding.weight"}, "update"),
    "transformer: readout LR falls": (lambda: transformer(DepthFault(lr={"readout.weight": -1})), {"readout.weight"}, "update"),
    "transformer: attention branch not multiplied": (
        lambda: transformer(DepthFault(multiplier={"blocks.*.attention.output": 1})), ATTENTION, "multiplier",
    ),
    "transformer: mlp branch multiplied twice": (
        lambda: transformer(DepthFault(multiplier={"blocks.*.mlp.down": -1})), FEED_FORWARD, "multiplier",
    ),
    "transformer: LR of mlp.down falls": (
        lambda: transformer(DepthFault(lr={"blocks.*.mlp.down.weight": -1})), {"blocks.*.mlp.down.weight"}, "update",
    ),
    "transformer: init of block outputs falls too": (
        lambda: transformer(DepthFault(init={"blocks.*.output.weight": -0.5, "blocks.*.down.weight": -0.5})),
        {"blocks.*.attention.output.weight", "blocks.*.mlp.down.weight"}, "init",
    ),
    "residual mlp: no multiplier": (lambda: DeepMlp(fault=DepthFault(multiplier={"layers.*.2": 1})), LAYERS, "multiplier"),
    "residual mlp: 1/sqrt(depth), LR not scaled": (
        lambda: DeepMlp(alpha=0.5, fault=DepthFault(lr={"layers.*": 0.5})), LAYERS, "update",
    ),
    "residual mlp: alpha 1, LR as at 1/2": (lambda: DeepMlp(fault=DepthFault(lr={"layers.*": -0.5})), LAYERS, "update"),
    "residual mlp: embedding LR falls": (lambda: DeepMlp(fault=DepthFault(lr={"embed.weight": -1})), {"embed.weight"}, "update"),
    "residual mlp: readout multiplied": (
        lambda: DeepMlp(fault=DepthFault(multiplier={"readout": -1})), {"readout.weight"}, "multiplier",
    ),
    "residual mlp, sgd: LR not scaled": (
        lambda: DeepMlp(optimizer_kind="sgd", lr=0.02, fault=DepthFault(lr={"layers.*": -1})), LAYERS, "update",
    ),
    "transformer: eps above the gradient": (lambda: transformer(DepthFault(eps=1e-2)), set(), "eps"),
}  # fmt: skip


def check(target: Any, depths: tuple[int, ...] = DEPTHS) -> CoordinateVerdict:
    measurement, layers = measure_depths(target, depths, seeds=2)
    return judge_depth(measurement, layers)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_passes(name: str) -> None:
    verdict = check(RIGHT[name]())
    assert verdict.verdict == "pass", str(verdict)
    assert verdict.to_dict()["axis"] == "depth"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_named(name: str) -> None:
    target, culprits, statistic = FAULTS[name]
    verdict = check(target())
    assert verdict.verdict == "fail", str(verdict)
    named = {item.tensor for item in verdict.culprits if item.statistic == statistic}
    if culprits:
        assert named == culprits, str(verdict)
        assert {item.tensor for item in verdict.culprits} == culprits, str(verdict)
    else:
        assert named, str(verdict)


def test_without_a_residual_stream_nothing_is_promised() -> None:
    verdict = check(DeepMlp(model=PlainMlp))
    assert verdict.verdict in ("fail", "inconclusive"), str(verdict)


@pytest.mark.parametrize(
    ("shallow", "deep", "name", "free"),
    [
        (["blocks.0.w", "e"], ["blocks.0.w", "blocks.1.w", "e"], "blocks.7.w", "blocks.*.w"),
        (
            ["h.0.mlp.0.w", "h.0.mlp.2.w"],
            ["h.0.mlp.0.w", "h.0.mlp.2.w", "h.1.mlp.0.w", "h.1.mlp.2.w"],
            "h.1.mlp.2.w",
            "h.*.mlp.2.w",
        ),
        (["s.0.b.0.w", "s.1.b.0.w"], ["s.0.b.0.w", "s.0.b.1.w", "s.1.b.0.w"], "s.0.b.1.w", "s.0.b.*.w"),
        (["net.0.w", "net.2.w"], ["net.0.w", "net.2.w"], "net.2.w", "net.2.w"),
    ],
)
def test_the_number_that_counts_layers_is_found(shallow: list[str], deep: list[str], name: str, free: str) -> None:
    layers = LayerNames([shallow, deep])
    assert layers(name) == free
    assert layers.in_blocks(name) == ("*" in free)
