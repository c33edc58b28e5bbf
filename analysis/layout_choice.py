"""What a large run costs: its FLOPs, and on named devices the layout that the planner ranks first, with its memory and hours.

Owns `plan_layout` and `compute_step`. Nothing is assumed about a device that is not named.
"""

from __future__ import annotations

from collections.abc import Callable

from analysis.hardware import GIB, device_called
from analysis.layouts import LayoutPlan, search_layouts
from analysis.memory_plan import gib
from analysis.recommendation import Step
from analysis.target import TargetGpus
from scaling.accounting import flops_per_token, run_flops
from scaling.config import RunConfig
from scaling.errors import ConfigError, Fault

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
    try:
        device = device_called(
            gpus.device,
            peak_tflops=gpus.peak_tflops,
            memory_gib=gpus.memory_gib,
            link_gb_s=gpus.link_gb_s,
            network_gb_s=gpus.network_gb_s,
            memory_gb_s=gpus.memory_gb_s,
            node_devices=gpus.node_gpus,
        )
    except ConfigError as error:
        raise ConfigError(*(_in_target(fault, place) for fault in error.faults)) from None
    return search_layouts(run.model, device, gpus.count, run.training.batch_size, run.tokens)


def _in_target(fault: Fault, place: Callable[[str], str]) -> Fault:
    """A fault of the planner's options in the words of the target file."""
    words = [fault.where, fault.what, fault.cure or ""]
    for option, key in OPTIONS.items():
        words = [text.replace(option, f"gpus.{key}") for text in words]
    return Fault(f"{place('gpus')}: {words[0]}", words[1], words[2])


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
        near = f"; the nearest is {plan.nearest.layout}" if plan.nearest else ""
        what = f"no layout of {plan.candidates} fits {plan.devices} x {plan.device.name} of {gib(plan.device.memory_bytes)}"
        return "no layout fits", [f"{what}{near}: more devices, or a smaller target (`mutransfer layout` says what lacks)"]
    best = plan.ranked[0]
    middle, slowest, fastest = plan.hours(best)
    low, high = (f"{bound / GIB:.0f}" for bound in best.memory.band)
    memory = f"{low} to {high} of {gib(plan.device.memory_bytes)}"
    text = f"first of {len(plan.ranked)} layouts: {best.layout}, {memory}, {_time(middle)} ({_time(fastest)} to {_time(slowest)})"
    doubt = [] if best.fits == "yes" else [f"the best layout fits only perhaps: {memory}"]
    return text, [*doubt, *(f"layout: {note}" for note in plan.notes)]


def _time(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{3600 * hours:,.0f} s"
