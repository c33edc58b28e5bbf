"""Parameter groups, initial values, learning-rate schedule and clipping from plan.json. Needs torch (2.6 or newer) and nothing else.

    plan = read_plan("plan.json")
    initialize(model, plan, seed=0)
    optimizer = build_optimizer(model, plan)
    scheduler = build_scheduler(optimizer, plan)  # scheduler.step() after every optimizer.step()
    clip_gradients(model, plan)  # before optimizer.step()

Every parameter must match exactly one row of the plan and every row a parameter, by name and shape; all that does not is said at once.
Build the groups by name before a wrapper changes names or shapes (DDP, FSDP1, pipeline stages). FSDP2 and tensor parallel change the
parameters and keep names and shapes: build the groups after them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    raise SystemExit('torch is not installed here, and this file needs it. Install it: pip install "torch>=2.6"') from None

KEYS = {"schema", "made_by", "run_id", "form", "optimizer", "schedule", "batch", "forward", "tensors"}
ROW_KEYS = {
    "pattern", "role", "optimizer", "lr", "weight_decay", "eps", "multiplier", "shape", "init_std", "init_constant",
    "folded_multiplier", "source",
}  # fmt: skip


class PlanError(ValueError):
    """The plan is not one that this file reads, or does not fit the model."""


def not_installed(error: ImportError, module: str, command: str) -> SystemExit:
    """What ends a program whose engine is missing or another version: the command that installs it. Raises `error` of another module."""
    if (error.name or "").partition(".")[0] != module:
        raise error
    if error.name == module and isinstance(error, ModuleNotFoundError):
        return SystemExit(f"{module} is not installed here, and this file needs it. Install it: {command}")
    return SystemExit(
        f"the {module} that is installed is another version than this file needs ({error}). Install that: {command}"
    )


def read_plan(path: str | Path) -> dict[str, Any]:
    """The plan, its keys checked."""
    plan: dict[str, Any] = json.loads(Path(path).read_text())
    wrong = [f"unknown or missing key {key!r}" for key in sorted(KEYS ^ plan.keys())]
    for row in plan.get("tensors", []):
        wrong += [f"{row.get('pattern')}: unknown or missing key {key!r}" for key in sorted(ROW_KEYS ^ row.keys())]
    if plan.get("schema") != 1:
        wrong.append(f"schema is {plan.get('schema')}; this file reads 1")
    if wrong:
        raise PlanError(f"{path}: " + "; ".join(wrong))
    return plan


def match(model: nn.Module, plan: dict[str, Any]) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    """Name, parameter and row of each parameter of `model`."""
    found, wrong, used = [], [], set()
    for name, parameter in model.named_parameters():
        rows = [row for row in plan["tensors"] if re.fullmatch(row["pattern"], name)]
        if len(rows) != 1:
            wrong.append(f"{name} matches {len(rows)} rows")
            continue
        # Under ZeRO-3 a parameter is a placeholder that keeps its true shape beside it.
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        if shape != rows[0]["shape"]:
            wrong.append(f"{name} has shape {shape}, the plan {rows[0]['shape']}")
        used.add(rows[0]["pattern"])
        found.append((name, parameter, rows[0]))
    wrong += [f"{row['pattern']} matches no parameter" for row in plan["tensors"] if row["pattern"] not in used]
    if wrong:
        raise PlanError("; ".join(wrong))
    return iter(found)


@torch.no_grad()
def initialize(model: nn.Module, plan: dict[str, Any], seed: int) -> None:
    """Fill every parameter: N(0, init_std), or init_constant; each from a generator of its own, on the CPU in fp32.

    The draws of a seed are those of mutransfer's own models.
    """
    for place, (_, parameter, row) in enumerate(sorted(match(model, plan), key=_place_in(plan))):
        if row["init_std"] is None:
            parameter.fill_(row["init_constant"])
            continue
        values = torch.zeros(row["shape"])
        if row["init_std"]:
            values.normal_(0.0, row["init_std"], generator=torch.Generator().manual_seed(seed * 1_000_003 + place))
        parameter.copy_(_as_sharded(values, parameter))


def _place_in(plan: dict[str, Any]) -> Callable[[tuple[str, Any, dict[str, Any]]], tuple[Any, ...]]:
    """Order of tensors: as the plan's rows, but layer by layer where the rows are those of layers."""
    order = {row["pattern"]: at for at, row in enumerate(plan["tensors"])}
    layered = min((at for pattern, at in order.items() if r"\d+" in pattern), default=0)

    def place(found: tuple[str, Any, dict[str, Any]]) -> tuple[Any, ...]:
        name, _, row = found
        layers = [int(part) for part in name.split(".") if part.isdigit()] if r"\d+" in row["pattern"] else []
        return (layered if layers else order[row["pattern"]], layers, order[row["pattern"]])

    return place


def mesh_of(tensor: Tensor | None) -> Any:
    """The device mesh of a tensor that FSDP2 or tensor parallel sharded (a DTensor), or None."""
    return getattr(tensor, "device_mesh", None)


def _as_sharded(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """`values`, whole on every process, in a form that can be copied to `parameter`, without a word between processes."""
    if mesh_of(parameter) is None:
        return values
    from torch.distributed.tensor import DTensor, Replicate

    whole = [Replicate()] * mesh_of(parameter).ndim
    return DTensor.from_local(values.to(parameter.device), mesh_of(parameter), whole, run_check=False)


def param_groups(model: nn.Module, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: tensors with equal settings together; `names` are theirs, `peak_lr` stays through a schedule.

    Sharded tensors of different meshes are apart, as torch's fused steps need them.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter, row in match(model, plan):
        lr, decay, eps, kind = row["lr"], row["weight_decay"], row["eps"], row["optimizer"]
        values = {"params": [], "names": [], "lr": lr, "peak_lr": lr, "weight_decay": decay}
        values |= {} if kind in ("sgd", "lion") else {"eps": eps}
        values |= {"optimizer": kind} if plan["optimizer"]["kind"] == "muon" else {}
        group = groups.setdefault((lr, decay, eps, kind, mesh_of(parameter)), values)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def build_optimizer(model: nn.Module, plan: dict[str, Any], fused: bool = True) -> torch.optim.Optimizer:
    """torch's AdamW, Adam or SGD over the groups; Lion and Muon from lion_muon.py, which an export has that needs it."""
    groups, settings = param_groups(model, plan), plan["optimizer"]
    if settings["kind"] in ("lion", "muon"):
        import lion_muon

        made: torch.optim.Optimizer = lion_muon.build(groups, settings, fused)
        return made
    if settings["kind"] == "sgd":
        return torch.optim.SGD(groups, momentum=settings["beta1"], fused=fused)
    kinds: dict[str, type[torch.optim.Adam]] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    if settings["kind"] not in kinds:
        raise PlanError(f"optimizer {settings['kind']!r} is not one of {[*kinds, 'sgd', 'lion', 'muon']}")
    return kinds[settings["kind"]](groups, betas=(settings["beta1"], settings["beta2"]), fused=fused)


def lr_factor(plan: dict[str, Any], step: int) -> float:
    """Factor on every group's peak LR at update number `step`, from 0."""
    schedule = plan["schedule"]
    if step < schedule["warmup_steps"]:
        return float((step + 1) / schedule["warmup_steps"])
    start, steps = schedule["decay_start_step"], schedule["steps"]
    if step < start or start >= steps:
        return 1.0
    progress = min((step - start) / (steps - start), 1.0)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule["decay_shape"] == "cosine" else 1 - progress
    return float(schedule["final_factor"] + (1 - schedule["final_factor"]) * left)


def build_scheduler(optimizer: torch.optim.Optimizer, plan: dict[str, Any]) -> torch.optim.lr_scheduler.LambdaLR:
    """One factor for all groups, so that their ratios stay."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(plan, step))


@torch.no_grad()
def clip_gradients(model: nn.Module, plan: dict[str, Any]) -> Tensor:
    """Clip by the global norm that the unfolded tensors' gradients would have, over all shards; return that norm."""
    clip = plan["optimizer"]["clip_norm"]
    limit = math.inf if clip is None else float(clip)
    pairs = [(parameter, row["folded_multiplier"]) for _, parameter, row in match(model, plan) if parameter.grad is not None]
    if any(mesh_of(parameter.grad) is not None for parameter, _ in pairs):
        return _clip_shards([(parameter.grad, factor) for parameter, factor in pairs if parameter.grad is not None], limit)
    if all(factor == 1.0 for _, factor in pairs):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    norm = torch.nn.utils.get_total_norm([parameter.grad * factor for parameter, factor in pairs if parameter.grad is not None])
    torch.nn.utils.clip_grads_with_norm_([parameter for parameter, _ in pairs], limit, norm)
    return norm


def _clip_shards(pairs: list[tuple[Tensor, float]], limit: float) -> Tensor:
    """Gradients and factors, whatever their meshes. Of a part that several of all processes hold each counts its share."""
    parts, total = [], torch.zeros((), dtype=torch.float64, device=pairs[0][0].device)
    for gradient, factor in pairs:
        copies, mesh, part = dist.get_world_size(), mesh_of(gradient), gradient
        if mesh is not None:
            placements = enumerate(gradient.placements)  # type: ignore[attr-defined]
            copies //= math.prod(mesh.size(at) for at, placement in placements if not placement.is_replicate())
            part = gradient.to_local()  # type: ignore[attr-defined]
        total += (torch.linalg.vector_norm(part) * factor).double() ** 2 / copies
        parts.append(part)
    dist.all_reduce(total)
    norm = total.sqrt().float()
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch's own clipping
    for part in parts:
        part.mul_(scale)
    return norm
