"""What a large run costs: its FLOPs, and on named devices the layout that the planner ranks first, with its memory and hours.

Owns `plan_layout`, `micro_batch` and `compute_step`. Nothing is assumed about a device that is not named.
"""

from __future__ import annotations

from collections.abc import Callable

from analysis.hardware import GIB, Device, device_called
from analysis.layout_of_run import plan_of_run
from analysis.layouts import LayoutPlan, LayoutSearch
from analysis.memory_plan import gib
from analysis.recommendation import Step
from analysis.target import TargetGpus
from scaling.accounting import flops_per_token, run_flops
from scaling.config import RunConfig
from scaling.errors import ConfigError, Fault

SHOWN_REASONS = 3
OPTIONS = {
    "--device": "device",
    "--peak-tflops": "peak_tflops",
    "--memory-gib": "memory_gib",
    "--link-gb-s": "link_gb_s",
    "--network-gb-s": "network_gb_s",
    "--memory-gb-s": "memory_gb_s",
    "--node-gpus": "node_gpus",
}
"""The planner's options by the keys of a target file."""


def plan_layout(run: RunConfig, gpus: TargetGpus | None, place: Callable[[str], str]) -> LayoutPlan | None:
    """Layouts of `run` on the target's devices, best first; None where they are not named. Raises ConfigError for an unknown device."""
    if gpus is None or gpus.device is None:
        return None
    device = device_of(gpus, place)
    return plan_of_run(run, run.model, device, gpus.count, LayoutSearch(micro_batch_size=gpus.micro_batch_size))


def device_of(gpus: TargetGpus, place: Callable[[str], str], memory_is_read: bool = True) -> Device:
    """The target's device. Raises ConfigError, in the words of the target file, for one that is not known."""
    # Where memory is not read, a device that is not listed may state none.
    memory_gib = gpus.memory_gib if memory_is_read else gpus.memory_gib or 1.0
    try:
        return device_called(
            gpus.device or "gpu",
            peak_tflops=gpus.peak_tflops,
            memory_gib=memory_gib,
            link_gb_s=gpus.link_gb_s,
            network_gb_s=gpus.network_gb_s,
            memory_gb_s=gpus.memory_gb_s,
            node_devices=gpus.node_gpus,
        )
    except ConfigError as error:
        raise ConfigError(*(_in_target(fault, place) for fault in error.faults)) from None


def in_target(text: str) -> str:
    """The planner's words with a target file's keys in place of its options."""
    for option, key in OPTIONS.items():
        text = text.replace(option, f"gpus.{key}")
    return text


def _in_target(fault: Fault, place: Callable[[str], str]) -> Fault:
    return Fault(f"{place('gpus')}: {in_target(fault.where)}", in_target(fault.what), in_target(fault.cure))


def micro_batch(batch_size: int, gpus: TargetGpus | None, plan: LayoutPlan | None) -> tuple[int | None, list[str]]:
    """Sequences a forward pass for the run's config: the first layout's, else the target's where its GPUs can share the batch so;
    and why the target's is left out."""
    if plan is not None and plan.ranked:
        return plan.ranked[0].layout.micro_batch_size, []
    stated = gpus.micro_batch_size if gpus else None
    if gpus is None or stated is None:
        return None, []
    if batch_size % stated == 0 and (plan is not None or batch_size % (gpus.count * stated) == 0):
        return stated, []
    what = f"gpus.micro_batch_size {stated} does not share out a batch of {batch_size} sequences over {gpus.count} GPUs"
    return None, [f"{what}: it is left out of the config"]


def compute_step(run: RunConfig, gpus: TargetGpus | None, plan: LayoutPlan | None) -> tuple[Step, list[str]]:
    """The step that says what the run costs, and warnings."""
    flops = run_flops(run)
    value = f"{flops:.3g} training FLOPs ({flops_per_token(run.model):.3g} a token)"
    formula, source = "6 per matmul parameter and token, and causal attention", "scaling.accounting.flops_per_token"
    warnings = []
    if gpus is not None and gpus.mfu and (peak := gpus.peak_tflops or (plan and plan.device.peak("bf16") / 1e12)):
        value += f"; {_time(flops / (gpus.count * peak * 1e12 * gpus.mfu) / 3600)} on {gpus.count} GPUs"
        value += f" at {gpus.mfu:.0%} of {peak:g} TFLOP/s"
    elif gpus is not None and plan is None:
        value += "; give gpus.device, or gpus.peak_tflops and gpus.mfu, for a time"
    if plan is not None:
        layout, doubts = _layout(plan)
        value, source = f"{value}; {layout}", f"{source}; analysis.layouts, {plan.device.source}"
        warnings += doubts
    return Step("Compute" if plan is None else "Compute and layout", formula, value, source), warnings


def _layout(plan: LayoutPlan) -> tuple[str, list[str]]:
    """The best layout in words, and what speaks against it."""
    if not plan.ranked:
        return "no layout fits", [_why_none(plan), *_notes(plan)]
    best = plan.ranked[0]
    middle, slowest, fastest = plan.hours(best)
    low, high = (f"{bound / GIB:.0f}" for bound in best.memory.band)
    memory = f"{low} to {high} of {gib(plan.device.memory_bytes)}"
    text = f"first of {len(plan.ranked)} layouts: {best.layout}, {memory}, {_time(middle)} ({_time(fastest)} to {_time(slowest)})"
    doubt = [] if best.fits == "yes" else [f"the best layout fits only perhaps: {memory}"]
    return text, [*doubt, *_notes(plan)]


def _notes(plan: LayoutPlan) -> list[str]:
    return [f"layout: {in_target(note)}" for note in plan.notes]


def _why_none(plan: LayoutPlan) -> str:
    """Memory that lacks, where some layout is possible at all; else what makes all of them impossible, most frequent first."""
    devices = f"{plan.devices} x {plan.device.name}"
    if plan.nearest is not None:
        what = f"no layout of {plan.candidates} fits {devices} of {gib(plan.device.memory_bytes)}; the nearest is {plan.nearest.layout}"
        return f"{what}: more devices, or a smaller target (`mutransfer layout` says what lacks)"
    reasons = "; ".join(reason.removeprefix("impossible: ") for reason, _ in plan.reasons()[:SHOWN_REASONS])
    cure = "another number of devices or batch_tokens, or no gpus.micro_batch_size" if reasons else "more devices"
    return f"no layout of {plan.candidates} is possible on {devices}: {reasons}: {cure}"


def _time(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{3600 * hours:,.0f} s"
