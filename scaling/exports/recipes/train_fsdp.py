"""Trains plan.json's run by torch's FSDP2 and tensor parallel. Needs torch (2.6 or newer), and the export's other files beside it.

    torchrun --nproc-per-node 8 train_fsdp.py --tokens train.bin --every 500
    torchrun --nproc-per-node 8 train_fsdp.py --tokens train.bin --tp 2 --recompute

As exported it trains the study's transformer, on random tokens where no file is given; model.py and data.py say what yours has to have.
Rank 0 prints one JSON line an update, and writes what every tensor's optimizer holds to OUT/groups.json. Started again it goes on from the
last whole checkpoint in OUT, also on another number of processes; checkpoints of another plan, model or seed are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import param_groups  # before all that imports torch: where there is none it says how to install it

# isort: split
import data
import model as own
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).parent
SHARDABLE = ("adamw", "adam", "sgd")
"""Optimizers whose update of an entry needs that entry alone."""
OF_RUN = "run.json"
"""In each checkpoint: the plan, model and seed of its run."""
SHOWN = 4
"""Differences of two runs that a message has."""


def main(arguments: list[str] | None = None) -> None:
    """Train to the plan's last update, or to --until."""
    options = parse(arguments)
    device = join(options.device)
    plan = param_groups.read_plan(HERE / "plan.json")
    settings = json.loads((HERE / "run.json").read_text())
    micro = check(options, plan, settings)
    run, steps = identity(options, plan, settings), plan["schedule"]["steps"]
    first, last = resume_at(options.out, run), min(steps, options.until or steps)
    if first >= last:
        say(f"{options.out}/step-{first} has the {last} updates that were asked for, of {steps}: nothing to train")
        return
    model, optimizer = build(options, plan, device)
    train(model, optimizer, plan, options, micro, device, range(first, last), run)


def say(text: str) -> None:
    """A message from rank 0; stdout has the updates alone."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options; those of the run's own settings are None where run.json decides."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dp", type=positive, default=1, help="replicas of the sharded model (HSDP)")
    parser.add_argument("--fsdp", type=positive, help="processes that parameters are sharded over; default: all that are left")
    parser.add_argument("--tp", type=positive, default=1, help="processes that share each attention and each MLP")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing, a block at a time")
    parser.add_argument("--micro-batch", type=positive, help="sequences of a process and forward pass")
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=Path, help="what data.py reads")
    parser.add_argument("--seed", type=int, help="of the initial values")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument(
        "--every", type=positive, help="updates between two checkpoints; the last update's is always kept with it"
    )
    parser.add_argument("--until", type=positive, help="stop before this update")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def join(kind: str) -> torch.device:
    """Meet the other processes, unless that is done; this one's device."""
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun: torchrun --nproc-per-node 1 train_fsdp.py")
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


def check(options: argparse.Namespace, plan: dict[str, Any], settings: dict[str, Any]) -> int:
    """Fill the options that were left out, and return the micro-batch. Ends the program with all that cannot be."""
    world, wrong = dist.get_world_size(), []
    options.fsdp = options.fsdp or max(1, world // (options.dp * options.tp))
    options.precision = options.precision or settings["precision"]
    options.seed = settings["seed"] if options.seed is None else options.seed
    if options.dp * options.fsdp * options.tp != world:
        wrong.append(
            f"dp {options.dp} x fsdp {options.fsdp} x tp {options.tp} is not the {world} processes that torchrun started"
        )
    ranks, sequences = options.dp * options.fsdp, plan["batch"]["sequences"]
    if sequences % ranks:
        wrong.append(f"{sequences} sequences do not divide over {ranks} data-parallel processes")
    share = sequences // ranks
    micro: int = options.micro_batch or min(settings["micro_batch_sequences"] or share, share)
    if not wrong and share % micro:
        wrong.append(f"--micro-batch {micro} does not divide the {share} sequences of a process")
    if options.precision == "fp16":
        wrong.append("fp16's loss scaling is not written here: --precision bf16")
    if plan["optimizer"]["kind"] not in SHARDABLE:
        wrong.append(f"{plan['optimizer']['kind']} is not known to make the same update on sharded tensors")
    if wrong:
        raise SystemExit("\n".join(wrong) if dist.get_rank() == 0 else 2)
    return micro


def build(options: argparse.Namespace, plan: dict[str, Any], device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model with the plan's initial values, and its optimizer; settings of every tensor go to OUT/groups.json."""
    model = own.build_model(HERE, plan)
    # Every tensor has its row before anything changes the model; FSDP2 keeps names, and shapes as seen from outside.
    rows = {name: row for name, _, row in param_groups.match(model, plan)}
    shard(model, options, device)
    model.to_empty(device=device)
    param_groups.initialize(model, plan, options.seed)
    optimizer = param_groups.build_optimizer(model, plan)
    held = {name: group for group in optimizer.param_groups for name in group["names"]}
    if held.keys() != rows.keys():
        raise RuntimeError(f"sharding changed the names of {sorted(held.keys() ^ rows.keys())}")
    if dist.get_rank() == 0:
        found = {name: {key: group.get(key) for key in ("peak_lr", "weight_decay", "eps")} for name, group in held.items()}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "groups.json").write_text(json.dumps(found, indent=1) + "\n")
    return model, optimizer


def shard(model: nn.Module, options: argparse.Namespace, device: torch.device) -> None:
    """Tensor parallel, then recomputation, then FSDP2 around each unit and around the rest."""
    mesh = init_device_mesh(device.type, (options.dp, options.fsdp, options.tp), mesh_dim_names=("dp", "fsdp", "tp"))
    units = own.units(model)
    if options.tp > 1:
        own.share(model, mesh["tp"])
    if options.recompute:
        for unit in units:
            unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
    over: DeviceMesh = mesh["dp", "fsdp"] if options.dp > 1 else mesh["fsdp"]
    for unit in units:
        # As autocast does: matrices are rounded to bf16, gains are not.
        low = options.precision == "bf16" and all(tensor.dim() > 1 for tensor in unit.parameters())
        dtype = torch.bfloat16 if low else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(unit, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, reshard_after_forward=False)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: dict[str, Any],
    options: argparse.Namespace,
    micro: int,
    device: torch.device,
    steps: range,
    run: dict[str, Any],
) -> None:
    """Update after update, from the checkpoint before the first of `steps`."""
    load(options.out, steps.start, model, optimizer)
    batch = partial(read_batch, plan, options, settings_of(HERE)["vocabulary"])
    for step in steps:
        value = gradient(model, batch(step).to(device), micro, options.precision)
        norm = param_groups.clip_gradients(model, plan)
        factor = param_groups.lr_factor(plan, step)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "loss": value, "grad_norm": float(norm), "lr_factor": factor}), flush=True)
        if options.every and ((step + 1) % options.every == 0 or step + 1 == steps.stop):
            save(options.out, step + 1, run, model, optimizer)


def settings_of(folder: Path) -> dict[str, Any]:
    """The model's shape in run.json."""
    shape: dict[str, Any] = json.loads((folder / "run.json").read_text())["model"]
    return shape


def read_batch(plan: dict[str, Any], options: argparse.Namespace, vocabulary: int, step: int) -> Tensor:
    """This process's sequences of an update; processes of one tensor-parallel group have the same."""
    sequences, context = plan["batch"]["sequences"], plan["batch"]["context_tokens"]
    share = sequences // (options.dp * options.fsdp)
    first = dist.get_rank() // options.tp * share
    found: Tensor = data.tokens(options.tokens, step, first, share, sequences, context, vocabulary)
    return found


def gradient(model: nn.Module, tokens: Tensor, micro: int, precision: str) -> float:
    """Set every gradient to that of the mean loss over all processes' tokens; return that loss."""
    for parameter in model.parameters():
        parameter.grad = None
    total, parts = torch.zeros((), dtype=torch.float64), torch.split(tokens, micro)
    for index, part in enumerate(parts):
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(index + 1 == len(parts))
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = own.loss(model, part) / len(parts)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def held_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that the next update depends on, by name; of sharded tensors this process's part."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        kept = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        tensors |= {f"optimizer.{names[id(parameter)]}.{key}": value for key, value in kept.items()}
    return tensors


def identity(options: argparse.Namespace, plan: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What makes a run this one: everything but how it is spread over processes, its precision and where its tokens lie."""
    rows = {row["pattern"]: row for row in plan["tensors"]}
    return plan | {"tensors": rows, "made_by": None, "model": settings["model"], "seed": options.seed}


def differing(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """The values that differ, by key."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differing(before.get(key), now.get(key), f"{where}/{key}" if where else key)
    elif isinstance(before, dict) or isinstance(now, dict):
        yield f"{where} is {'gone' if now is None else 'new'}"
    elif before != now:
        yield f"{where} was {before}, is {now}"


def save(out: Path, step: int, run: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write OUT/step-NUMBER, every process its part, and whose it is; torch writes .metadata last."""
    folder = out / f"step-{step}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OF_RUN).write_text(json.dumps(run, indent=1) + "\n")
    state_dict_saver.save(held_tensors(model, optimizer), checkpoint_id=folder)


def resume_at(out: Path, run: dict[str, Any]) -> int:
    """Number of the update after OUT's last whole checkpoint, 0 without one. Ends the program where that is another run's."""
    # One process looks, so that all see the same.
    found = [last_of(out, run) if dist.get_rank() == 0 else (0, "")]
    dist.broadcast_object_list(found, src=0)
    step, wrong = found[0]
    if wrong:
        raise SystemExit(wrong if dist.get_rank() == 0 else 2)
    return step


def last_of(out: Path, run: dict[str, Any]) -> tuple[int, str]:
    """The last whole checkpoint's number of updates, and why this run cannot go on from it."""
    steps = [int(match[1]) for path in out.glob("step-*/.metadata") if (match := re.fullmatch(r"step-(\d+)", path.parent.name))]
    if not steps:
        return 0, ""
    folder, cure = out / f"step-{max(steps)}", "give another --out, or move those checkpoints away"
    if not (folder / OF_RUN).exists():
        return max(steps), f"{folder} has no {OF_RUN}, which says which run it is of: {cure}"
    wrong = list(differing(json.loads((folder / OF_RUN).read_text()), run))
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return max(steps), f"{folder} is of another run: {'; '.join(wrong[:SHOWN])}{more}. To train this one {cure}" if wrong else ""


def load(out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take up the checkpoint after `step` updates; none after 0."""
    if step:
        make_state(optimizer)
        state_dict_loader.load(held_tensors(model, optimizer), checkpoint_id=out / f"step-{step}")


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer allocate its state, by an update that changes nothing."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step: Callable[[], Any] = optimizer.step
    step()
    for parameter in parameters:
        parameter.grad = None


def leave() -> None:
    """End the processes, their work being done. On CPUs at once: an interpreter that tears itself down beside gloo's threads aborts now
    and then (torch 2.13), which torchrun takes for a failure."""
    dist.barrier()
    if dist.get_backend() != "gloo":
        dist.destroy_process_group()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    leave()
