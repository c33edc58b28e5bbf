"""Published large runs beside what the planner says of them: `python -m analysis.published_runs` prints the tables of docs/planner.md.

Owns the comparison; the rows are analysis.published_rows'. Nothing is fitted to a row that is then shown with its error: the efficiency of
products that a row is predicted with comes from the rows of all other sources.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from analysis.hardware import DEVICES, GIB
from analysis.layout_experts import planned_parameters, with_experts
from analysis.layout_time import BAND, bubble, communication_s, efficiency_of, recompute_factor, tokens_s
from analysis.memory_plan import device_memory, layer_activations
from analysis.published_rows import (
    GPT_1T,
    GPT_145B,
    GPT_530B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MemoryRow,
    SpeedRow,
    memories,
    speeds,
)
from analysis.results import json_safe, number, text_table
from scaling.accounting import flops_per_token, parameter_counts
from scaling.model_config import ModelConfig


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
    for row in memories():
        ours, band = memory_of(row), device_memory(row.model, row.layout).band
        inside = band[0] <= row.published <= band[1] if row.term == "counted" else None
        document = {"name": row.name, "published_bytes": row.published, "ours_bytes": ours, "error": ours / row.published - 1}
        rows.append(document | {"band_bytes": band, "inside": inside, "source": row.source})
    return rows


def tflops_rows() -> list[dict[str, Any]]:
    """Rows that publish both tokens/s and TFLOP/s, which test FLOP per token alone."""
    both = [row for row in speeds() if math.isfinite(row.tokens_s) and math.isfinite(row.tflops)]
    return [
        {"name": row.name, "published": row.tflops, "ours": ours, "error": ours / row.tflops - 1, "source": row.source}
        for row in both
        for ours in [row.tokens_s * row.flops_per_token / 1e12]
    ]


def mfu_rows() -> list[dict[str, Any]]:
    """Published MFU in per cent of Llama 3 405B: TFLOP/s over the device's peak."""
    published = (43, 41, 38)
    rows = [row for row in speeds() if row.family == "Llama"]
    documents = []
    for row, share in zip(rows, published, strict=True):
        ours = 100 * row.tflops * 1e12 / DEVICES[row.device].peak(row.arithmetic)
        documents.append({"name": row.name, "published": share, "ours": ours, "error": ours / share - 1, "source": row.source})
    return documents


def fixed_share_tokens_s(row: SpeedRow, share: float) -> float:
    """The model that was here before: all computing at one share of the device's peak, whatever its products are; same communication."""
    layout, device = row.layout, DEVICES[row.device]
    tokens = layout.batch_size * row.model.context / layout.devices
    work = flops_per_token(row.model) * tokens * recompute_factor(row.model, layout)
    hidden, open_s = communication_s(row.model, layout, device)
    computing = work / (device.peak(row.arithmetic) * share)
    return tokens * (1 - bubble(layout)) / (computing + open_s + max(0.0, hidden - computing))


def _fixed_share(row: SpeedRow) -> float:
    """The share of the peak at which the fixed model makes the row's speed, hidden communication left out."""
    tokens = row.layout.batch_size * row.model.context / row.layout.devices
    work = flops_per_token(row.model) * tokens * recompute_factor(row.model, row.layout)
    _, open_s = communication_s(row.model, row.layout, DEVICES[row.device])
    busy = tokens / row.measured_tokens_s * (1 - bubble(row.layout)) - open_s
    return work / busy / DEVICES[row.device].peak(row.arithmetic) if busy > 0 else math.nan


def _own_efficiency(row: SpeedRow) -> float:
    return efficiency_of(row.model, row.layout, DEVICES[row.device], row.measured_tokens_s, row.arithmetic)


def family_medians(rows: Sequence[SpeedRow], own: Sequence[float], arithmetic: str | None = None) -> dict[str, float]:
    """Median of what the rows of each source imply; of one arithmetic alone where it is given."""
    found: dict[str, list[float]] = {}
    for row, value in zip(rows, own, strict=True):
        if math.isfinite(value) and arithmetic in (None, row.arithmetic):
            found.setdefault(row.family, []).append(value)
    return {family: median(values) for family, values in found.items()}


def speed_rows() -> list[dict[str, Any]]:
    """Published tokens/s a device beside ours and the fixed share's, each with what all other sources imply; and the row's own efficiency.

    A source's rows count as one: the middle of the sources' medians is used. The fixed share has one for each arithmetic.
    """
    rows = speeds()
    own, fixed = [_own_efficiency(row) for row in rows], [_fixed_share(row) for row in rows]
    medians = family_medians(rows, own)
    shares = {kind: family_medians(rows, fixed, kind) for kind in ("bf16", "fp8")}
    documents = []
    for row, efficiency in zip(rows, own, strict=True):
        usual = _left_out(medians, row.family)
        ours, measured = tokens_s(row.model, row.layout, DEVICES[row.device], row.arithmetic, usual), row.measured_tokens_s
        simple = fixed_share_tokens_s(row, _left_out(shares[row.arithmetic], row.family))
        flops = flops_per_token(row.model) / DEVICES[row.device].peak(row.arithmetic)
        document: dict[str, Any] = {"name": row.name, "family": row.family, "device": row.device, "arithmetic": row.arithmetic}
        document |= {"published_tokens_s": measured, "ours_tokens_s": ours, "error": ours / measured - 1}
        document |= {
            "fixed_share_error": simple / measured - 1,
            "mfu": flops * measured,
            "inside": 1 / BAND <= ours / measured <= BAND,
        }
        documents.append(document | {"efficiency": efficiency, "source": row.source})
    return documents


def _left_out(medians: dict[str, float], family: str) -> float:
    return median(value for name, value in medians.items() if name != family)


def summary_rows(rows: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """How well left-out speeds are predicted, by source and in all: root mean square of the logarithm, worst, and how many in the band."""
    rows = rows or speed_rows()
    families = [*dict.fromkeys(row["family"] for row in rows), "all"]
    found = []
    for family in families:
        chosen = [row for row in rows if family in ("all", row["family"])]
        document: dict[str, Any] = {"name": family, "rows": len(chosen)}
        for key in ("error", "fixed_share_error"):
            ratios = [1 + row[key] for row in chosen]
            document[key] = {
                "log_rms": math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios)),
                "lowest": min(ratios) - 1,
                "highest": max(ratios) - 1,
                "inside": sum(1 / BAND <= ratio <= BAND for ratio in ratios),
            }
        found.append(document)
    return found


def nested_band_rows(share: float = 0.9) -> list[dict[str, Any]]:
    """A band that the predicted source has no say in: `share` of the other sources' own left-out errors lie in it; how many of its do."""
    rows = speeds()
    medians = family_medians(rows, [_own_efficiency(row) for row in rows])

    def distance(row: SpeedRow, without: set[str]) -> float:
        usual = median(value for name, value in medians.items() if name not in without)
        ours = tokens_s(row.model, row.layout, DEVICES[row.device], row.arithmetic, usual)
        return abs(math.log(ours / row.measured_tokens_s))

    found = []
    for family in medians:
        others = sorted(distance(row, {family, row.family}) for row in rows if row.family != family)
        band = others[math.ceil(share * len(others)) - 1]
        own = [distance(row, {family}) for row in rows if row.family == family]
        found.append({"name": family, "rows": len(own), "band": math.exp(band), "inside": sum(size <= band for size in own)})
    return found


def order_rows() -> list[dict[str, Any]]:
    """Pairs of one source's layouts of one model, device and arithmetic whose published speeds differ by over 2 %: how many we order
    alike. Efficiency is the shipped one; it moves all rows alike."""
    rows = speeds()
    speed = [tokens_s(row.model, row.layout, DEVICES[row.device], row.arithmetic) for row in rows]
    simple = [fixed_share_tokens_s(row, 0.45) for row in rows]
    found: dict[str, dict[str, Any]] = {}
    for first, one in enumerate(rows):
        for second, other in list(enumerate(rows))[first + 1 :]:
            same = (one.family, one.model, one.device, one.arithmetic) == (
                other.family,
                other.model,
                other.device,
                other.arithmetic,
            )
            faster = one.measured_tokens_s / other.measured_tokens_s
            if not same or 1 / 1.02 < faster < 1.02:
                continue
            row = found.setdefault(one.family, {"name": one.family, "pairs": 0, "right": 0, "fixed_share_right": 0})
            row["pairs"] += 1
            for key, found_speed in (("right", speed), ("fixed_share_right", simple)):
                ours = found_speed[first] / found_speed[second]
                # Equal speeds are no order, for either model.
                row[key] += not math.isclose(ours, 1.0, rel_tol=1e-9) and (ours > 1) == (faster > 1)
    return list(found.values())


def smallest_width() -> int:
    """Of the models behind the efficiency."""
    return min(row.model.width for row in speeds())


def expert_rows() -> list[dict[str, Any]]:
    """Parameters of published models with experts, in all and active, in 1e9, as their papers state them."""

    def model(width: int, depth: int, groups: int, vocabulary: int, **more: Any) -> ModelConfig:
        return ModelConfig(
            width=width, depth=depth, head_dim=128, queries_per_kv=groups, activation="swiglu", norm_gain=True,
            vocab_size=vocabulary, context=4096, **more,
        )  # fmt: skip

    published = (
        ("Mixtral 8x7B", with_experts(model(4096, 32, 4, 32000), 8, 2, 14336), 46.7, 12.9, "2401.04088 and its model card"),
        ("Mixtral 8x22B", with_experts(model(6144, 56, 6, 32768), 8, 2, 16384), 141.0, 39.0, "its announcement"),
        ("OLMoE 1B-7B", with_experts(model(2048, 16, 1, 50304, qk_norm=True), 64, 8, 1024), 6.9, 1.3, "2409.02060"),
        ("Phi-3.5-MoE", with_experts(model(4096, 32, 4, 32064), 16, 2, 6400), 41.9, 6.6, "its model card"),
    )
    rows = []
    for name, shape, total, active, source in published:
        counts = planned_parameters(shape)
        for word, key, value in (("", "total", total), (", active", "active", active)):
            ours = counts[key] / 1e9
            rows.append({"name": f"{name}{word}", "published": value, "ours": ours, "error": ours / value - 1, "source": source})
    return rows


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
        "experts": expert_rows(),
        "tflops": tflops_rows(),
        "mfu": mfu_rows(),
        "memory": memory_rows(),
        "estimators": estimator_rows(),
        "speed": speed_rows(),
        "nested": nested_band_rows(),
        "order": order_rows(),
    }


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _text(found: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    named = (("parameters, 1e9", "parameters"), ("with experts, 1e9", "experts"))
    for title, key in (*named, ("TFLOP/s from tokens/s", "tflops"), ("MFU from TFLOP/s, %", "mfu")):
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
    rows = [_speed_cells(row) for row in found["speed"]]
    header = ["tokens/s a device", "published", "ours, left out", "error", "in band", "fixed share", "MFU, %", "efficiency"]
    parts.append(text_table(header, rows))
    rows = [_summary_cells(row) for row in summary_rows(found["speed"])]
    header = ["left-out speeds", "rows", "log rms", "errors, %", "in band", "fixed share: log rms", "errors, % ", "in band "]
    parts.append(text_table(header, rows))
    rows = [[row["name"], str(row["rows"]), number(row["band"]), str(row["inside"])] for row in found["nested"]]
    parts.append(text_table(["band set by the others", "rows", "factor", "in band"], rows))
    rows = [[row["name"], *(str(row[key]) for key in ("pairs", "right", "fixed_share_right"))] for row in found["order"]]
    parts.append(text_table(["order of layouts", "pairs", "right", "fixed share"], rows))
    return "\n\n".join(parts)


def _speed_cells(row: dict[str, Any]) -> list[str]:
    speed = [number(row["published_tokens_s"], 0), number(row["ours_tokens_s"], 0), _percent(row["error"])]
    more = [
        "yes" if row["inside"] else "no",
        _percent(row["fixed_share_error"]),
        number(100 * row["mfu"], 1),
        number(row["efficiency"]),
    ]
    return [f"{row['name']} ({row['arithmetic']})", *speed, *more]


def _summary_cells(row: dict[str, Any]) -> list[str]:
    cells = [row["name"], str(row["rows"])]
    for key in ("error", "fixed_share_error"):
        found = row[key]
        cells += [
            f"{found['log_rms']:.3f}",
            f"{100 * found['lowest']:+.0f} to {100 * found['highest']:+.0f}",
            str(found["inside"]),
        ]
    return cells


def main(arguments: Sequence[str]) -> int:
    """Print the tables, or with --json one document."""
    import json

    found = tables()
    print(json.dumps(json_safe(found), indent=1) if "--json" in arguments else _text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
