"""Published large runs beside what the planner says of them: `python -m analysis.published_runs` prints the tables of docs/planner.md.

Owns the rows: model, layout and figures as published, each with its source. Nothing is fitted to a row that is then shown with its error,
but for the efficiency of products, whose left-out columns say so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from analysis.hardware import DEVICES, GIB, Arithmetic
from analysis.layout_time import efficiency_of, step_time
from analysis.memory_plan import Layout, device_memory, layer_activations
from analysis.results import json_safe, number, text_table
from scaling.accounting import attention_flops_per_token, flops_per_token, parameter_counts
from scaling.model_config import ModelConfig


def _llama(width: int, depth: int, groups: int, mlp: int, vocabulary: int = 128256, context: int = 8192) -> ModelConfig:
    return ModelConfig(
        width=width, depth=depth, head_dim=128, queries_per_kv=groups, mlp_ratio=mlp / width, activation="swiglu",
        norm_gain=True, vocab_size=vocabulary, context=context,
    )  # fmt: skip


def _gpt(depth: int, width: int, heads: int) -> ModelConfig:
    shape = ModelConfig(width=width, depth=depth, head_dim=width // heads, vocab_size=51200, context=2048)
    return shape.model_copy(update={"norm_gain": True, "tied_embeddings": True})


LLAMA_8B, LLAMA_70B, LLAMA_405B = _llama(4096, 32, 4, 14336), _llama(8192, 80, 8, 28672), _llama(16384, 126, 16, 53248)
LLAMA2_7B = _llama(4096, 32, 1, 11008, 32000, 4096)
GPT_530B, GPT_145B, GPT_1T = _gpt(105, 20480, 128), _gpt(80, 12288, 96), _gpt(128, 25600, 160)
LLAMA_405B_LONG = LLAMA_405B.model_copy(update={"context": 131072})
# 126 layers over 16 stages: one layer is left out of the first and of the last stage; a mean stage is counted here.
TITAN = "torchtitan benchmarks/llama3_h100_202412"
BRIDGE = "Megatron-Bridge performance summary 25.11"


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


def _speeds() -> tuple[SpeedRow, ...]:
    titan = {"device": "h100", "source": TITAN, "attention": "whole"}
    saved: dict[str, Any] = {"sharding": "fsdp", "checkpointing": "selective-op", "micro_batch_size": 2}
    small, wide = Layout(8, batch_size=16, **saved), Layout(128, batch_size=256, **saved)
    split = Layout(32, tp=8, batch_size=512, micro_batch_size=16, sharding="fsdp", checkpointing="full")
    staged = Layout(64, tp=8, pp=16, virtual_stages=8, batch_size=2048, sharding="zero2")
    sequences = Layout(8, tp=8, pp=16, cp=16, virtual_stages=8, batch_size=128, sharding="zero2")
    meta = {"device": "h100", "source": "Llama 3 (2407.21783) Table 4"}
    sc21 = {"device": "a100", "source": "Megatron-LM (2104.04473) Table 1, recomputation taken off", "attention": "whole"}
    old: dict[str, Any] = {"sharding": "megatron", "checkpointing": "full", "flash_attention": False, "dropout": True}
    bridge = {"device": "h100", "source": BRIDGE, "arithmetic": "fp8"}
    return (
        _speed("8B FSDP 8", LLAMA_8B, small, tokens_s=5762, **titan),
        _speed("8B FSDP 8, compiled", LLAMA_8B, small, tokens_s=6667, **titan),
        _speed("8B FSDP 128", LLAMA_8B, wide, tokens_s=5605, **titan),
        _speed("8B FSDP 128, compiled", LLAMA_8B, wide, tokens_s=6514, **titan),
        _speed("70B FSDP 32 TP 8", LLAMA_70B, split, tokens_s=652, **titan),
        _speed("405B TP 8 PP 16 DP 64", LLAMA_405B, staged, tflops=430, attention="whole", **meta),
        _speed("405B TP 8 PP 16 DP 128", LLAMA_405B, replace(staged, dp=128), tflops=400, attention="whole", **meta),
        _speed("405B TP 8 CP 16 PP 16 DP 8", LLAMA_405B_LONG, sequences, tflops=380, **meta),
        _speed("GPT 145.6B TP 8 PP 8 DP 24", GPT_145B, Layout(24, tp=8, pp=8, batch_size=2304, **old), tflops=111, **sc21),
        _speed("GPT 1008B TP 8 PP 64 DP 6", GPT_1T, Layout(6, tp=8, pp=64, batch_size=3072, **old), tflops=122.25, **sc21),
        _speed("8B fp8 FSDP 8", LLAMA_8B, Layout(8, batch_size=128, sharding="megatron-fsdp"), tokens_s=14451, tflops=744, **bridge),
        _speed("70B fp8 TP 4 PP 8", LLAMA_70B, Layout(2, 4, 8, batch_size=128, virtual_stages=5), tokens_s=1602, tflops=719, **bridge),
        _speed("405B fp8 TP 8 PP 8 CP 2", LLAMA_405B, Layout(8, 8, 8, 2, batch_size=512, virtual_stages=8),
               tokens_s=292, tflops=737, **bridge),
    )  # fmt: skip


def _speed(name: str, model: ModelConfig, layout: Layout, **published: Any) -> SpeedRow:
    return SpeedRow(name, model, layout, **published)


def _memories() -> tuple[MemoryRow, ...]:
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


def memory_of(row: MemoryRow) -> float:
    """Our figure for the row, bytes, without overhead."""
    if row.term == "layers":
        return row.model.depth * layer_activations(row.model, row.layout)
    memory = device_memory(row.model, row.layout)
    if row.term == "states":
        return memory.weights + memory.gradients + memory.optimizer
    return memory.activations if row.term == "activations" else memory.counted


def memory_rows() -> list[dict[str, Any]]:
    """Published bytes, ours, the relative error, and whether the published one lies in our band with overhead (None: a single term)."""
    rows = []
    for row in _memories():
        ours, band = memory_of(row), device_memory(row.model, row.layout).band
        inside = band[0] <= row.published <= band[1] if row.term == "counted" else None
        document = {"name": row.name, "published_bytes": row.published, "ours_bytes": ours, "error": ours / row.published - 1}
        rows.append(document | {"band_bytes": band, "inside": inside, "source": row.source})
    return rows


def tflops_rows() -> list[dict[str, Any]]:
    """Rows that publish both tokens/s and TFLOP/s, which test FLOP per token alone."""
    both = [row for row in _speeds() if math.isfinite(row.tokens_s) and math.isfinite(row.tflops)]
    return [
        {"name": row.name, "published": row.tflops, "ours": ours, "error": ours / row.tflops - 1, "source": row.source}
        for row in both
        for ours in [row.tokens_s * row.flops_per_token / 1e12]
    ]


def mfu_rows() -> list[dict[str, Any]]:
    """Published MFU in per cent of Llama 3 405B: TFLOP/s over the device's peak."""
    published = {"405B TP 8 PP 16 DP 64": 43, "405B TP 8 PP 16 DP 128": 41, "405B TP 8 CP 16 PP 16 DP 8": 38}
    rows = [row for row in _speeds() if row.name in published]
    return [
        {
            "name": row.name,
            "published": published[row.name],
            "ours": ours,
            "error": ours / published[row.name] - 1,
            "source": row.source,
        }
        for row in rows
        for ours in [100 * row.tflops * 1e12 / DEVICES[row.device].peak(row.arithmetic)]
    ]


def speed_rows() -> list[dict[str, Any]]:
    """Published tokens/s a device; ours and its MFU band, the row's own family left out of the efficiency; and the row's own efficiency.

    A family is the rows of one source: variants of one run would tell each other.
    """
    rows = _speeds()
    own = {
        row.name: efficiency_of(row.model, row.layout, DEVICES[row.device], row.measured_tokens_s, row.arithmetic) for row in rows
    }
    documents = []
    for row in rows:
        others = [own[o.name] for o in rows if o.arithmetic == row.arithmetic and _family(o) != _family(row)]
        # fp8 has one family: a row is predicted from the other two of it.
        others = others or [own[o.name] for o in rows if o.arithmetic == row.arithmetic and o is not row]
        ours, measured = _tokens_s(row, median(others)), row.measured_tokens_s
        flops = flops_per_token(row.model) / DEVICES[row.device].peak(row.arithmetic)
        band = tuple(flops * _tokens_s(row, end) for end in (min(others), max(others)))
        document = {"name": row.name, "arithmetic": row.arithmetic, "published_tokens_s": measured, "ours_tokens_s": ours}
        document |= {"error": ours / measured - 1, "mfu": flops * measured, "mfu_band": band}
        document |= {"inside": band[0] <= flops * measured <= band[1], "efficiency": own[row.name], "source": row.source}
        documents.append(document)
    return documents


def smallest_width() -> int:
    """Of the models behind the efficiencies."""
    return min(row.model.width for row in _speeds())


def _family(row: SpeedRow) -> str:
    return row.source.split(" ")[0]


def _tokens_s(row: SpeedRow, efficiency: float) -> float:
    """Tokens/s of one device at this efficiency of products."""
    step = step_time(row.model, row.layout, DEVICES[row.device], row.arithmetic, efficiency)
    return row.layout.batch_size * row.model.context / row.layout.devices / step.step_s


def estimator_rows() -> list[dict[str, Any]]:
    """DeepSpeed's estimators as run for 7e9 parameters on 8 devices, largest layer 1e8, against our bytes a parameter."""
    from analysis.memory_plan import SCHEMES

    rows = []
    for name, published in (("zero2", 29.75e9), ("zero3", 16.15e9)):
        scheme = SCHEMES[name]
        terms = ("weights", "gradients", "optimizer")
        states = {term: 7e9 * getattr(scheme, term) / (8 if term in scheme.sharded else 1) for term in terms}
        ours = sum(states.values()) + scheme.unit_bytes * 1e8
        rows.append(
            {
                "name": f"DeepSpeed {name}, 7e9 parameters on 8",
                "published": published,
                "ours": ours,
                "error": ours / published - 1,
            }
        )
    return rows


def parameter_rows() -> list[dict[str, Any]]:
    """Parameters of published models, in 1e9."""
    published = (
        ("Llama 3 8B", LLAMA_8B, 8.03),
        ("Llama 3 70B", LLAMA_70B, 70.55),
        ("Llama 3.1 405B", LLAMA_405B, 405.85),
        ("GPT 145.6B", GPT_145B, 145.6),
        ("GPT 529.6B", GPT_530B, 529.6),
        ("GPT 1008B", GPT_1T, 1008.0),
    )
    return [
        {"name": name, "published": value, "ours": ours, "error": ours / value - 1}
        for name, model, value in published
        for ours in [parameter_counts(model).total / 1e9]
    ]


def tables() -> dict[str, list[dict[str, Any]]]:
    return {
        "parameters": parameter_rows(),
        "tflops": tflops_rows(),
        "mfu": mfu_rows(),
        "memory": memory_rows(),
        "estimators": estimator_rows(),
        "speed": speed_rows(),
    }


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _text(found: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    for title, key in (("parameters, 1e9", "parameters"), ("TFLOP/s from tokens/s", "tflops"), ("MFU from TFLOP/s, %", "mfu")):
        rows = [[row["name"], number(row["published"]), number(row["ours"]), _percent(row["error"])] for row in found[key]]
        parts.append(text_table([title, "published", "ours", "error"], rows))
    inside = {True: "yes", False: "no", None: "-"}
    sizes = [(row["name"], row["published_bytes"], row["ours_bytes"], row["error"], row["inside"]) for row in found["memory"]]
    sizes += [(row["name"], row["published"], row["ours"], row["error"], None) for row in found["estimators"]]
    rows = [
        [name, number(published / GIB, 1), number(ours / GIB, 1), _percent(error), inside[lies]]
        for name, published, ours, error, lies in sizes
    ]
    parts.append(text_table(["memory, GiB", "published", "counted", "error", "in band"], rows))
    rows = [_speed_cells(row, inside[row["inside"]]) for row in found["speed"]]
    header = ["tokens/s a device", "published", "ours, left out", "error", "MFU, %", "band", "in band", "efficiency"]
    parts.append(text_table(header, rows))
    return "\n\n".join(parts)


def _speed_cells(row: dict[str, Any], inside: str) -> list[str]:
    low, high = row["mfu_band"]
    speeds = [number(row["published_tokens_s"], 0), number(row["ours_tokens_s"], 0), _percent(row["error"])]
    band = [number(100 * row["mfu"], 1), f"{100 * low:.0f} to {100 * high:.0f}", inside, number(row["efficiency"])]
    return [f"{row['name']} ({row['arithmetic']})", *speeds, *band]


def main(arguments: Sequence[str]) -> int:
    """Print the tables, or with --json one document."""
    import json

    found = tables()
    print(json.dumps(json_safe(found), indent=1) if "--json" in arguments else _text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
