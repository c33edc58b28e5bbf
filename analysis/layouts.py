"""Which layouts a run may have on given devices: those that are impossible and why, those that fit, and their order. Torch-free.

Owns `layout_faults` (all that is wrong with one layout), `search_layouts` and `LayoutPlan`. Every candidate is accounted for: it fits, it
fits perhaps, it does not fit, or it is impossible, with the reason counted.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from analysis.hardware import Arithmetic, Device
from analysis.layout_experts import experts_of, model_flops, planned_parameters
from analysis.layout_time import StepTime, step_time
from analysis.memory_plan import SCHEMES, TWO_MOMENTS, Checkpointing, DeviceMemory, Layout, device_memory, gib, part_layers
from analysis.results import text_table
from scaling.errors import Fault
from scaling.model_config import ModelConfig

Fits = Literal["yes", "perhaps", "no"]
"""perhaps: with the least overhead it does, with the most it does not."""
LONG_CONTEXT_TOKENS = 8192
"""Below it the search leaves context parallelism out: tensor parallel splits the sequence already."""
SMALLEST_WIDTH = 2048
"""Of the published runs behind EFFICIENCY; below it, starting kernels takes time that is not counted."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
VIRTUAL_STAGES = (1, 2, 4, 8)
SHARDINGS = ("megatron-dist", "fsdp")
"""Searched by default: the optimizer's states split, and everything split."""
SEARCHED_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "full")


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with what it needs and how fast it is."""

    layout: Layout
    memory: DeviceMemory
    time: StepTime
    fits: Fits
    tokens_s: float
    """Of one device."""

    def to_dict(self) -> dict[str, Any]:
        document = self.layout.to_dict() | {"fits": self.fits, "memory": self.memory.to_dict()}
        return document | {"time": self.time.to_dict(), "tokens_per_s_device": self.tokens_s}


@dataclass(frozen=True)
class LayoutPlan:
    """What was searched, best first. rejected: reason -> how many candidates, `nearest`: the one that lacks least where none fits."""

    model: ModelConfig
    device: Device
    devices: int
    batch_size: int
    tokens: int
    arithmetic: Arithmetic
    ranked: tuple[PlannedLayout, ...]
    rejected: Mapping[str, int] = field(default_factory=dict)
    nearest: PlannedLayout | None = None
    unplanned: tuple[str, ...] = ()
    """What the run states and this plan does not read."""

    @property
    def candidates(self) -> int:
        return len(self.ranked) + sum(self.rejected.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What casts doubt on the times."""
        device = self.device
        unknown = [
            option
            for option, bandwidth, needed in (
                ("--link-gb-s", device.link_bandwidth, self.devices > 1),
                ("--network-gb-s", device.network_bandwidth, self.devices > device.node_devices),
            )
            if needed and math.isnan(bandwidth)
        ]
        if math.isnan(device.memory_bandwidth):
            unknown.append("--memory-gb-s")
        untimed = "not given: what they bound is counted and not timed, and MFU is at most what stands here"
        notes = [f"{', '.join(unknown)} {untimed}"] if unknown else []
        if self.model.width < SMALLEST_WIDTH:
            small = (
                f"width {self.model.width} is below {SMALLEST_WIDTH}, the smallest of the published runs that MFU is taken from"
            )
            notes.append(f"{small}: MFU and hours are too good for it")
        if experts_of(self.model)[0]:
            notes.append(
                "no published run checks the hours of a model with experts; the known ones are far slower (docs/planner.md)"
            )
        return (*notes, *self.unplanned)

    def hours(self, planned: PlannedLayout) -> tuple[float, float, float]:
        """Hours of the whole run at the middle, the lowest and the highest MFU."""
        total = model_flops(self.model) * self.tokens / (self.devices * self.device.peak(self.arithmetic)) / 3600
        time = planned.time
        return total / time.mfu, total / time.mfu_low, total / time.mfu_high

    def to_dict(self, shown: int) -> dict[str, Any]:
        """`shown`: layouts that are listed."""
        layouts = []
        for planned in self.ranked[:shown]:
            hours = self.hours(planned)
            more = {"hours": hours[0], "hours_interval": [hours[2], hours[1]], "gpu_hours": hours[0] * self.devices}
            layouts.append(planned.to_dict() | more)
        return {
            "parameters": planned_parameters(self.model),
            "flops_per_token": model_flops(self.model),
            "flops_convention": FLOPS_CONVENTION,
            "tokens": self.tokens,
            "devices": self.devices,
            "device": self.device.to_dict(),
            "arithmetic": self.arithmetic,
            "candidates": self.candidates,
            "fitting": sum(planned.fits == "yes" for planned in self.ranked),
            "layouts": layouts,
            "rejected": dict(self.rejected),
            "notes": list(self.notes),
            "nearest": self.nearest.to_dict() if self.nearest else None,
        }

    def text(self, shown: int) -> str:
        counts, device = planned_parameters(self.model), self.device
        peak = device.peak(self.arithmetic) / 1e12
        active = f", {counts['active']:,} of them active" if "active" in counts else ""
        lines = [
            f"{counts['total']:,} parameters{active}, {model_flops(self.model):.4g} FLOP a token ({FLOPS_CONVENTION})",
            f"{self.devices} x {device.name}: {peak:g} TFLOP/s ({self.arithmetic}), {gib(device.memory_bytes)} [{device.source}]",
            f"{self.candidates} layouts: {sum(p.fits == 'yes' for p in self.ranked)} fit, "
            f"{sum(p.fits == 'perhaps' for p in self.ranked)} fit perhaps, {sum(self.rejected.values())} do not",
        ]
        if self.ranked:
            lines += ["", self._table(shown), "", _terms(self.ranked[0])]
        if self.rejected:
            lines += ["", "left out:", *(f"{count:6}  {reason}" for reason, count in self.reasons())]
        lines += ["", *(f"? {note}" for note in self.notes)] if self.notes else []
        if self.nearest is not None:
            lines += [
                "",
                f"nothing fits. Nearest: {self.nearest.layout}",
                _terms(self.nearest),
                f"    cure: {_cure(self.nearest)}",
            ]
        elif not self.ranked:
            cure = "a number of devices that heads, layers and the batch share out evenly, or another batch"
            lines += ["", "nothing is possible", f"    cure: {cure}"]
        return "\n".join(lines)

    def reasons(self) -> list[tuple[str, int]]:
        """Reasons with their counts, those of one kind as one: the numbers in them are the layouts'."""
        kinds: dict[str, list[str]] = {}
        for reason in self.rejected:
            kinds.setdefault(re.sub(r"\d+", "#", reason), []).append(reason)
        totals = [(reasons, sum(self.rejected[reason] for reason in reasons)) for reasons in kinds.values()]
        totals.sort(key=lambda pair: -pair[1])
        return [(f"{group[0]}{', and the like' if len(group) > 1 else ''}", total) for group, total in totals]

    def _table(self, shown: int) -> str:
        header = [
            "",
            "DP",
            "TP",
            "PP",
            "CP",
            *(["EP"] if experts_of(self.model)[0] else []),
            "parts",
            "micro",
            "sharding",
            "checkpointing",
            "GiB",
            "fits",
            "MFU %",
            "hours",
            "GPU-hours",
        ]
        rows = []
        for rank, planned in enumerate(self.ranked[:shown], start=1):
            layout, time = planned.layout, planned.time
            low, high = (size / 2**30 for size in planned.memory.band)
            hours, slow, fast = self.hours(planned)
            spread = [layout.dp, layout.tp, layout.pp, layout.cp, *([layout.ep] if experts_of(self.model)[0] else [])]
            sizes = [*spread, layout.virtual_stages, layout.micro_batch_size]
            mfu = f"{100 * time.mfu:.0f} ({100 * time.mfu_low:.0f}-{100 * time.mfu_high:.0f})"
            words = [layout.sharding, layout.checkpointing, f"{low:.0f}-{high:.0f}", planned.fits, mfu]
            rows.append(
                [str(rank), *map(str, sizes), *words, f"{hours:,.3g} ({fast:,.3g}-{slow:,.3g})", f"{hours * self.devices:,.4g}"]
            )
        return text_table(header, rows)


FLOPS_CONVENTION = "6 a matmul parameter, readout included, and causal attention; what checkpointing makes again is not counted"


def _terms(planned: PlannedLayout) -> str:
    memory, time = planned.memory, planned.time
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in memory.terms.items() if size)
    low, high = memory.band
    sent = ", ".join(f"{name.removesuffix('_bytes')} {gib(size)}" for name, size in time.volume.to_dict().items() if size)
    return (
        f"{planned.layout}: {sizes}; with overhead {gib(low)} to {gib(high)} (stage {memory.stage})\n"
        f"    a step {time.step_s:.3g} s, pipeline bubble {time.bubble:.1%}, exposed communication {time.exposed_s:.3g} s; "
        f"sent a step and device: {sent or 'nothing'}"
    )


def _cure(planned: PlannedLayout) -> str:
    largest = planned.memory.largest
    cures = {
        "weights": "more devices, or sharding that splits weights (fsdp, zero3)",
        "gradients": "more devices, or sharding that splits gradients (fsdp, zero2)",
        "optimizer": "more devices, or sharding that splits the optimizer (megatron-dist, zero1, fsdp)",
        "activations": "checkpointing full, a smaller micro-batch, or more tensor or context parallelism",
        "logits": "a smaller micro-batch, more tensor parallelism, or a loss in chunks",
        "unsharded": "more tensor parallelism, or sharding that gathers no weights (megatron-dist)",
    }
    if planned.layout.devices == 1 and largest in ("weights", "gradients", "optimizer"):
        return f"more devices, or a larger one: nothing is shared on one, and memory for {largest} is the most"
    return f"{cures[largest]}: memory for {largest} is the most"


def layout_faults(model: ModelConfig, layout: Layout) -> list[Fault]:
    """Everything that makes the layout impossible; empty when it is possible."""
    faults = _shape_faults(model, layout)
    per_pass = layout.micro_batch_size * layout.dp
    if layout.batch_size % per_pass:
        what = (
            f"a batch of {layout.batch_size} sequences is no multiple of micro-batch {layout.micro_batch_size} x dp {layout.dp}"
        )
        near = max(round(layout.batch_size / per_pass), 1) * per_pass
        faults.append(Fault("training.batch_size", what, f"for example {near}"))
    elif layout.virtual_stages > 1 and layout.pp > 1 and layout.micro_batches % layout.pp:
        what = f"interleaving needs micro-batches ({layout.micro_batches} a step and rank) in multiples of pp {layout.pp}"
        faults.append(Fault("--virtual-stages", what, "1, or another micro-batch"))
    return faults


def _shape_faults(model: ModelConfig, layout: Layout) -> list[Fault]:
    faults, tp, cp = [], layout.tp, layout.cp
    experts, _, expert_width = experts_of(model)
    mlp = {"the experts' width": expert_width} if experts else {"the MLP's width": model.mlp_width}
    parts = {"attention heads": model.heads, "key/value heads": model.kv_heads, **mlp}
    for name, size in parts.items():
        if size % tp:
            faults.append(
                Fault("--tp", f"{name}, {size}, cannot be split by tp {tp}", f"tp that divides {math.gcd(*parts.values())}")
            )
    if model.vocabulary % tp:
        padded = math.ceil(model.vocabulary / (128 * tp)) * 128 * tp
        cure = f"pad it: --set model.vocab_size={padded} (Megatron pads to a multiple of 128 x tp by itself)"
        faults.append(Fault("model.vocab_size", f"{model.vocabulary} is not divisible by tp {tp}", cure))
    stages = layout.pp * layout.virtual_stages
    if min(part_layers(model.depth, stages)) < 1:
        what = f"{model.depth} layers leave a part of pp {layout.pp} x {layout.virtual_stages} parts without one"
        most = max(n for n in range(1, model.depth + 1) if min(part_layers(model.depth, n)) >= 1)
        faults.append(Fault("--pp", what, f"fewer: pp x parts = {most}, for example"))
    faults += _expert_faults(experts, layout)
    if layout.virtual_stages > 1 and layout.pp == 1:
        faults.append(
            Fault("--virtual-stages", f"{layout.virtual_stages} parts a stage need a pipeline, and pp is 1", "leave it out")
        )
    if cp > 1 and model.context % (2 * cp):
        faults.append(Fault("--cp", f"context {model.context} is not a multiple of 2 x cp = {2 * cp}"))
    elif tp > 1 and layout.sequence_parallel and model.context // cp % tp:
        what = f"{model.context // cp} tokens of a sequence cannot be split by tp {tp}, as sequence parallelism does"
        faults.append(Fault("--tp", what, f"tp that divides {model.context // cp}"))
    return faults


def _expert_faults(experts: int, layout: Layout) -> list[Fault]:
    """Expert parallel ranks are ranks of dp x cp, and share the experts evenly."""
    if layout.ep == 1:
        return []
    if not experts:
        return [Fault("--ep", f"ep {layout.ep} splits experts, and the model has none", "--experts, --top-k and --expert-width")]
    faults = []
    if experts % layout.ep:
        faults.append(Fault("--ep", f"{experts} experts are not divisible by ep {layout.ep}"))
    if layout.shards % layout.ep:
        what = f"dp {layout.dp} x cp {layout.cp} = {layout.shards} ranks are not divisible by ep {layout.ep}"
        faults.append(Fault("--ep", what, "experts are split over ranks of dp x cp"))
    return faults


def plan_layout(model: ModelConfig, layout: Layout, device: Device, arithmetic: Arithmetic = "bf16") -> PlannedLayout:
    """Memory and time of one possible layout."""
    memory, time = device_memory(model, layout), step_time(model, layout, device, arithmetic)
    low, high = memory.band
    fits: Fits = "yes" if high <= device.memory_bytes else "perhaps" if low <= device.memory_bytes else "no"
    return PlannedLayout(layout, memory, time, fits, layout.batch_size * model.context / layout.devices / time.step_s)


@dataclass(frozen=True)
class LayoutSearch:
    """What is tried; a value that is given is the only one."""

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    micro_batch_size: int | None = None
    virtual_stages: int | None = None
    shardings: Sequence[str] = SHARDINGS
    checkpointing: Sequence[Checkpointing] = SEARCHED_CHECKPOINTING
    ep: int | None = None
    fused: bool = True
    moment_bytes: tuple[int, int] = TWO_MOMENTS
    """Of the run's optimizer: see `Layout.moment_bytes`."""

    def layouts(self, model: ModelConfig, devices: int, batch_size: int, node: int) -> Iterator[Layout]:
        """Every way of writing `devices` as a product, tensor parallelism within a node."""
        longest = max(model.context // LONG_CONTEXT_TOKENS, 1)
        for tp, pp, cp in itertools.product(
            [self.tp] if self.tp else [n for n in _divisors(devices) if n <= node],
            [self.pp] if self.pp else [n for n in _divisors(devices) if n <= model.depth],
            [self.cp] if self.cp else [n for n in _divisors(devices) if n <= longest and n & (n - 1) == 0],
        ):
            if devices % (tp * pp * cp) or (self.dp and self.dp * tp * pp * cp != devices):
                continue
            dp = devices // (tp * pp * cp)
            for micro, parts, sharding, kept, ep in itertools.product(
                [self.micro_batch_size] if self.micro_batch_size else MICRO_BATCHES,
                [self.virtual_stages] if self.virtual_stages else VIRTUAL_STAGES if pp > 1 else (1,),
                self.shardings,
                self.checkpointing,
                [self.ep] if self.ep else _divisors(math.gcd(experts_of(model)[0], dp * cp)) if experts_of(model)[0] else (1,),
            ):
                options: dict[str, Any] = {"ep": ep, "fused": self.fused, "moment_bytes": self.moment_bytes}
                yield Layout(dp, tp, pp, cp, micro, batch_size, parts, sharding, kept, **options)


def fixed_faults(model: ModelConfig, search: LayoutSearch, devices: int, batch_size: int, node: int) -> list[Fault]:
    """Everything that makes the sizes which are given impossible, whatever those that are searched may be."""
    tp, pp, cp, dp = (value or 1 for value in (search.tp, search.pp, search.cp, search.dp))
    product, complete = tp * pp * cp * dp, None not in (search.tp, search.pp, search.cp, search.dp)
    faults = []
    if complete and product != devices:
        what = f"dp {dp} x tp {tp} x pp {pp} x cp {cp} = {product} devices, and there are {devices}"
        faults.append(Fault("--gpus", what, f"--gpus {product}"))
    elif devices % product:
        faults.append(
            Fault("--gpus", f"{devices} devices are not divisible by dp {dp} x tp {tp} x pp {pp} x cp {cp} = {product}")
        )
    if tp > node:
        faults.append(Fault("--tp", f"tp {tp} is more than the {node} devices of a node", f"{node} at most, or --node-gpus"))
    split = devices // (tp * pp * cp)
    every = search.dp or (split if None not in (search.tp, search.pp, search.cp) and devices % (tp * pp * cp) == 0 else 1)
    # One part a stage where none is asked for; with a pipeline still to be searched, parts say nothing yet.
    parts = search.virtual_stages or 1
    parts = parts if search.pp is not None or parts == 1 else 1
    layout = Layout(every, tp, pp, cp, search.micro_batch_size or 1, batch_size, parts)
    if search.ep:
        # Ranks of dp x cp that are still searched are taken to suit.
        ranks = Layout(every, cp=cp, ep=search.ep) if every > 1 or cp > 1 else Layout(search.ep, ep=search.ep)
        faults += _expert_faults(experts_of(model)[0], ranks)
    return faults + [fault for fault in layout_faults(model, layout) if fault not in faults]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def search_layouts(
    model: ModelConfig,
    device: Device,
    devices: int,
    batch_size: int,
    tokens: int,
    search: LayoutSearch = LayoutSearch(),
    arithmetic: Arithmetic = "bf16",
) -> LayoutPlan:
    """All layouts, those that fit by tokens a second first, then those that perhaps fit; equal speeds by less parallelism and memory."""
    found: list[PlannedLayout] = []
    rejected: Counter[str] = Counter()
    nearest: PlannedLayout | None = None
    for layout in search.layouts(model, devices, batch_size, device.node_devices):
        faults = layout_faults(model, layout)
        if faults:
            rejected[f"impossible: {faults[0].what}"] += 1
            continue
        planned = plan_layout(model, layout, device, arithmetic)
        if planned.fits != "no":
            found.append(planned)
            continue
        rejected[
            f"does not fit: most memory for {planned.memory.largest}, {layout.sharding}, checkpointing {layout.checkpointing}"
        ] += 1
        if nearest is None or planned.memory.counted < nearest.memory.counted:
            nearest = planned
    found.sort(key=_order)
    ordered = dict(sorted(rejected.items(), key=lambda item: -item[1]))
    return LayoutPlan(model, device, devices, batch_size, tokens, arithmetic, tuple(found), ordered, None if found else nearest)


def _order(planned: PlannedLayout) -> tuple[Any, ...]:
    layout = planned.layout
    spread = layout.tp * layout.pp * layout.cp * layout.ep
    return planned.fits != "yes", -round(planned.tokens_s, 6), spread, planned.memory.counted


__all__ = ["SCHEMES", "LayoutPlan", "LayoutSearch", "PlannedLayout", "layout_faults", "plan_layout", "search_layouts"]
