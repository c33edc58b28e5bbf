"""Published large runs: model, layout and figures as their sources print them.

Owns the rows and nothing else; analysis.published_runs sets ours beside them. Which rows of a source are here: all dense ones of
torchtitan's, Megatron-Bridge's (on devices that the planner knows) and Llama 3's tables and of Megatron-LM's Table 1; of
llm-foundry's, those of its 1b to 70b models on H100 and A100 80 GB at contexts 2048 and 8192.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from analysis.hardware import GIB, Arithmetic
from analysis.memory_plan import Layout
from scaling.accounting import attention_flops_per_token, flops_per_token
from scaling.model_config import ModelConfig


def _llama(width: int, depth: int, groups: int, mlp: int, vocabulary: int = 128256, context: int = 8192) -> ModelConfig:
    return ModelConfig(
        width=width, depth=depth, head_dim=128, queries_per_kv=groups, mlp_ratio=mlp / width, activation="swiglu",
        norm_gain=True, vocab_size=vocabulary, context=context,
    )  # fmt: skip


def _gpt(depth: int, width: int, heads: int, vocabulary: int = 51200, context: int = 2048) -> ModelConfig:
    shape = ModelConfig(width=width, depth=depth, head_dim=width // heads, vocab_size=vocabulary, context=context)
    return shape.model_copy(update={"norm_gain": True, "tied_embeddings": True})


LLAMA_8B, LLAMA_70B, LLAMA_405B = _llama(4096, 32, 4, 14336), _llama(8192, 80, 8, 28672), _llama(16384, 126, 16, 53248)
LLAMA2_7B = _llama(4096, 32, 1, 11008, 32000, 4096)
GPT_530B, GPT_145B, GPT_1T = _gpt(105, 20480, 128), _gpt(80, 12288, 96), _gpt(128, 25600, 160)
TITAN = "torchtitan benchmarks/llama3_h100_202412"
TITAN_2025 = "torchtitan benchmarks/asyncTP_llama3_h100_2025-06"
TITAN_H200 = "torchtitan benchmarks/llama3_8b_h200_2025-06"
BRIDGE = "Megatron-Bridge performance summary 25.11"
LLAMA3 = "Llama 3 (2407.21783) Table 4"
MEGATRON = "Megatron-LM (2104.04473) Table 1, recomputation taken off; layouts: its examples/sc21/run_table_1.sh"
KORTHIKANTI = "Megatron-LM (2205.05198) abstract"
FOUNDRY = "llm-foundry scripts/train/benchmarking"


@dataclass(frozen=True)
class SpeedRow:
    """A published speed. tokens_s: of one device (NaN: only tflops is published). attention: "causal" where its FLOP halve the scores'."""

    name: str
    model: ModelConfig
    layout: Layout
    device: str
    source: str
    tokens_s: float = math.nan
    tflops: float = math.nan
    attention: Literal["causal", "whole"] = "causal"
    arithmetic: Arithmetic = "bf16"

    @property
    def family(self) -> str:
        """Rows of one would tell each other: one team's runs."""
        return self.source.split(" ")[0]

    @property
    def flops_per_token(self) -> float:
        extra = attention_flops_per_token(self.model) if self.attention == "whole" else 0.0
        return flops_per_token(self.model) + extra

    @property
    def measured_tokens_s(self) -> float:
        return self.tokens_s if math.isfinite(self.tokens_s) else self.tflops * 1e12 / self.flops_per_token


@dataclass(frozen=True)
class MemoryRow:
    """A published memory, bytes. term: what of ours is compared: "counted" (all), "states", "activations" or "layers" (all layers of one
    micro-batch)."""

    name: str
    model: ModelConfig
    layout: Layout
    published: float
    source: str
    term: Literal["counted", "states", "activations", "layers"] = "counted"


def _long(model: ModelConfig, context: int) -> ModelConfig:
    return model.model_copy(update={"context": context})


def speeds() -> tuple[SpeedRow, ...]:
    return (*_torchtitan(), *_torchtitan_split(), *_bridge(), *_llama3(), *_megatron(), *_foundry())


def _torchtitan() -> Iterator[SpeedRow]:
    """8B: Tables 1 to 3, and another team's H200."""
    kept: dict[str, Any] = {"sharding": "fsdp", "checkpointing": "selective-op", "micro_batch_size": 2}
    compiled: tuple[tuple[str, bool, Arithmetic], ...] = (
        ("", False, "bf16"),
        (", compiled", True, "bf16"),
        (", compiled", True, "fp8"),
    )
    for devices, figures in ((8, (5762, 6667, 8532)), (128, (5605, 6514, 8380))):
        for (word, fused, arithmetic), speed in zip(compiled, figures, strict=True):
            layout = Layout(devices, batch_size=2 * devices, fused=fused, **kept)
            yield SpeedRow(f"8B FSDP {devices}{word}", LLAMA_8B, layout, "h100-500w", TITAN, speed, arithmetic=arithmetic)
    for cp, speed in ((1, 3890), (2, 2540), (4, 1071), (8, 548)):
        model = _long(LLAMA_8B, 32768 * cp)
        layout = Layout(8 // cp, cp=cp, batch_size=8 // cp, sharding="fsdp", checkpointing="full")
        yield SpeedRow(f"8B CP {cp}, context {model.context}", model, layout, "h100-500w", TITAN, speed, arithmetic="fp8")
    for devices, speed in ((32, 10938), (64, 10753)):
        layout = Layout(devices, batch_size=2 * devices, **kept)
        yield SpeedRow(f"8B FSDP {devices} on H200", LLAMA_8B, layout, "h200", TITAN_H200, speed, arithmetic="fp8")


def _torchtitan_split() -> Iterator[SpeedRow]:
    """70B and 405B: Tables 4 to 6. As many micro-batches as stages, which is its default; weights stay whole between them."""
    wide = Layout(32, tp=8, batch_size=512, micro_batch_size=16, sharding="fsdp", checkpointing="full")
    yield SpeedRow("70B FSDP 32 TP 8, async", LLAMA_70B, wide, "h100-500w", TITAN_2025, 652)
    yield SpeedRow("70B FSDP 32 TP 8", LLAMA_70B, wide, "h100-500w", TITAN, 829, arithmetic="fp8")
    yield SpeedRow("70B FSDP 32 TP 8, async", LLAMA_70B, wide, "h100-500w", TITAN, 876, arithmetic="fp8")
    staged = Layout(8, tp=8, pp=8, batch_size=256, micro_batch_size=4, sharding="zero2", checkpointing="full")
    for parts, speed in ((1, 100), (2, 128)):
        layout = replace(staged, virtual_stages=parts)
        yield SpeedRow(f"405B TP 8 PP 8, parts {parts}", LLAMA_405B, layout, "h100-500w", TITAN, speed, arithmetic="fp8")
    for cp, speed in ((1, 76), (2, 47), (4, 31), (8, 16)):
        model = _long(LLAMA_405B, 32768 * cp)
        layout = replace(staged, dp=8 // cp, cp=cp, batch_size=64 // cp, micro_batch_size=1)
        yield SpeedRow(f"405B CP {cp}, context {model.context}", model, layout, "h100-500w", TITAN, speed, arithmetic="fp8")


def _bridge() -> Iterator[SpeedRow]:
    rows: tuple[tuple[str, ModelConfig, Layout, str, float, float], ...] = (
        ("8B FSDP 8", LLAMA_8B, Layout(8, batch_size=128, sharding="megatron-fsdp"), "h100", 14451, 744),
        ("70B TP 4 PP 8", LLAMA_70B, Layout(2, 4, 8, batch_size=128, virtual_stages=5), "h100", 1602, 719),
        ("405B TP 8 PP 8 CP 2", LLAMA_405B, Layout(8, 8, 8, 2, batch_size=512, virtual_stages=8), "h100", 292, 737),
        ("8B DP 8 on B200", LLAMA_8B, Layout(8, batch_size=128, micro_batch_size=2), "b200", 30624, 1576),
        ("405B TP 4 PP 8 CP 2 on B200", LLAMA_405B, Layout(2, 4, 8, 2, batch_size=64, virtual_stages=8), "b200", 661, 1667),
    )
    for name, model, layout, device, speed, tflops in rows:
        yield SpeedRow(name, model, layout, device, BRIDGE, speed, tflops, arithmetic="fp8")


def _llama3() -> Iterator[SpeedRow]:
    """The paper does not say whether the FLOP at 131,072 tokens halve attention; halved is taken. Its parts a stage are a layer each."""
    staged = Layout(64, tp=8, pp=16, virtual_stages=8, batch_size=2048, sharding="zero2")
    whole: dict[str, Any] = {"device": "h100", "source": LLAMA3, "attention": "whole"}
    yield SpeedRow("405B TP 8 PP 16 DP 64", LLAMA_405B, staged, tflops=430, **whole)
    yield SpeedRow("405B TP 8 PP 16 DP 128", LLAMA_405B, replace(staged, dp=128), tflops=400, **whole)
    long = replace(staged, dp=8, cp=16, batch_size=128)
    yield SpeedRow("405B TP 8 CP 16 PP 16 DP 8", _long(LLAMA_405B, 131072), long, "h100", LLAMA3, tflops=380)


_SC21 = (  # billions, layers, width, heads, tp, pp, micro-batch, batch, devices, parts a stage, TFLOP/s with recomputation
    (1.7, 24, 2304, 24, 1, 1, 16, 512, 32, 1, 137), (3.6, 30, 3072, 32, 2, 1, 16, 512, 64, 1, 138),
    (7.5, 36, 4096, 32, 4, 1, 16, 512, 128, 1, 142), (18.4, 40, 6144, 48, 8, 1, 8, 1024, 256, 1, 135),
    (39.1, 48, 8192, 64, 8, 2, 4, 1536, 512, 1, 138), (76.1, 60, 10240, 80, 8, 4, 2, 1792, 1024, 3, 140),
    (145.6, 80, 12288, 96, 8, 8, 2, 2304, 1536, 2, 148), (310.1, 96, 16384, 128, 8, 16, 1, 2160, 1920, 2, 155),
    (529.6, 105, 20480, 128, 8, 35, 1, 2520, 2520, 3, 163), (1008, 128, 25600, 160, 8, 64, 1, 3072, 3072, 1, 163),
)  # fmt: skip


def _megatron() -> Iterator[SpeedRow]:
    old: dict[str, Any] = {"sharding": "megatron", "flash_attention": False, "dropout": True}
    whole: dict[str, Any] = {"device": "a100", "attention": "whole"}
    for size, depth, width, heads, tp, pp, micro, batch, devices, parts, tflops in _SC21:
        layout = Layout(
            devices // (tp * pp), tp, pp, 1, micro, batch, parts, checkpointing="full", sequence_parallel=False, **old
        )
        # Its FLOP hold the forward pass that is made again: four passes for three.
        row = SpeedRow(
            f"GPT {size:g}B TP {tp} PP {pp}", _gpt(depth, width, heads), layout, source=MEGATRON, tflops=0.75 * tflops, **whole
        )
        yield row
    for kind, mfu in (("selective", 0.542), ("full", 0.421)):
        layout = Layout(8, tp=8, pp=35, batch_size=2240, virtual_stages=3, checkpointing=kind, **old)  # type: ignore[arg-type]
        yield SpeedRow(f"GPT 530B on 2240, {kind}", GPT_530B, layout, source=KORTHIKANTI, tflops=312 * mfu, **whole)


_MPT = {
    "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32),
    "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
"""Layers, width, heads."""
_H100 = """
70b 2048 64 8 2048 1039 full,   70b 2048 32 2 1024 882 full,   30b 8192 8 1 168 1384 full,   30b 2048 32 14 1344 2308 full,
30b 2048 16 10 480 2263 full,   30b 2048 8 3 504 2002 full,    13b 2048 64 2 128 4800 none,  13b 2048 32 2 64 4811 none,
13b 2048 16 2 32 4767 none,     13b 2048 8 2 16 4792 none,     7b 8192 8 8 128 6935 full,    7b 2048 8 6 48 10643 none,
3b 8192 8 3 144 16578 none,     3b 2048 64 6 1152 22525 none,  3b 2048 32 6 576 23021 none,  3b 2048 16 10 480 24142 none,
1b 8192 8 3 96 29157 none,      1b 2048 64 20 1280 44402 none, 1b 2048 32 20 640 45130 none, 1b 2048 16 20 320 46037 none,
1b 2048 8 14 112 45455 none
"""
_A100 = """
70b 2048 64 8 2048 410 full,    70b 2048 32 2 1024 373 full,   30b 8192 8 1 168 574 full,    30b 2048 8 3 504 916 full,
13b 8192 8 5 120 1795 full,     13b 2048 8 2 48 2262 none,     7b 8192 8 8 128 3206 full,    7b 2048 8 6 96 4641 none,
3b 8192 8 3 144 7695 none,      3b 2048 8 10 160 10811 none,   1b 8192 8 3 96 13814 none,    1b 2048 8 14 448 20513 none
"""
_H100_FP8 = "3b 8192 8 3 144 19146 none,     3b 2048 8 10 480 30586 none,   1b 8192 8 2 64 32010 none"
"""Model, context, devices, micro-batch, batch, tokens/s a device, checkpointing."""


def _foundry() -> Iterator[SpeedRow]:
    tables: tuple[tuple[str, str, Arithmetic], ...] = (
        ("h100", _H100, "bf16"),
        ("a100", _A100, "bf16"),
        ("h100", _H100_FP8, "fp8"),
    )
    for device, table, arithmetic in tables:
        for text in table.split(","):
            size, context, devices, micro, batch, speed, kept = text.split()
            model = _gpt(*_MPT[size], 50368, int(context))
            layout = Layout(int(devices), micro_batch_size=int(micro), batch_size=int(batch), sharding="fsdp", checkpointing=kept)  # type: ignore[arg-type]
            name = f"MPT {size} on {devices} {device}, context {context}, micro-batch {micro}"
            yield SpeedRow(name, model, layout, device, FOUNDRY, float(speed), arithmetic=arithmetic)


def memories() -> tuple[MemoryRow, ...]:
    def titan(dp: int) -> Layout:
        return Layout(dp, batch_size=2 * dp, micro_batch_size=2, sharding="fsdp", checkpointing="selective-op")

    def titan_70b(dp: int) -> Layout:
        return Layout(dp, tp=8, batch_size=16 * dp, micro_batch_size=16, sharding="fsdp", checkpointing="full")

    oracle = Layout(16, tp=2, pp=2, batch_size=128)
    narrow: dict[str, Any] = {"flash_attention": False, "dropout": True}
    korthikanti = "2205.05198 Table 2, summed over 105 layers"
    selective = Layout(1, tp=8, checkpointing="selective", **narrow)
    full = Layout(1, tp=8, checkpointing="full", sequence_parallel=False, **narrow)
    h800 = "Megatron-LM pull request 482 (context not stated)"
    short = LLAMA2_7B.model_copy(update={"context": 2048})
    staged = Layout(4, pp=2, micro_batch_size=2, batch_size=2048)
    split = Layout(1, tp=8, micro_batch_size=4, batch_size=128, sequence_parallel=False)
    return (
        MemoryRow("8B FSDP 8", LLAMA_8B, titan(8), 82.4 * GIB, TITAN),
        MemoryRow("8B FSDP 8, compiled", LLAMA_8B, titan(8), 77.0 * GIB, TITAN),
        MemoryRow("8B FSDP 128", LLAMA_8B, titan(128), 67.0 * GIB, TITAN),
        MemoryRow("8B FSDP 128, compiled", LLAMA_8B, titan(128), 62.0 * GIB, TITAN),
        MemoryRow("70B FSDP 32 TP 8, fp8", LLAMA_70B, titan_70b(32), 67.6 * GIB, TITAN),
        MemoryRow("8B TP 2 PP 2 DP 16, states", LLAMA_8B, oracle, 12.6 * GIB, "megatron.training.theoretical_memory_usage", "states"),
        MemoryRow("the same, activations", LLAMA_8B, oracle, 16.0 * GIB, "megatron.training.theoretical_memory_usage", "activations"),
        MemoryRow("Llama 2 7B PP 2 DP 4, context 4096", LLAMA2_7B, staged, 49.5e9, h800),
        MemoryRow("the same, context 2048", short, staged, 49.5e9, h800),
        MemoryRow("Llama 2 7B TP 8, context 4096", LLAMA2_7B, split, 28.6e9, h800),
        MemoryRow("the same, context 2048", short, split, 28.6e9, h800),
        MemoryRow("GPT 530B TP 8, no checkpointing", GPT_530B, Layout(1, tp=8, **narrow), 53.9e9, korthikanti, "layers"),
        MemoryRow("GPT 530B TP 8, selective", GPT_530B, selective, 18.7e9, korthikanti, "layers"),
        MemoryRow("GPT 530B TP 8, full", GPT_530B, full, 8.8e9, korthikanti, "layers"),
    )  # fmt: skip
