"""Checkpoints of sharded runs: each process writes its own part, and any number of them takes it up again.

Owns the folder `checkpoint.shards/` of a run directory: tensors by name, as torch.distributed.checkpoint writes them, one folder for each
step, and `state.json`, which names the folder that counts and is written last. Settings of groups (LRs, decays) are the config's and
are not kept. `scaling.checkpoint` has the checkpoints of one process; a sharded run takes those up too.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from scaling.checkpoint import SHARDS
from scaling.errors import Fault, StudyError
from scaling.optimizer import AnyOptimizer, inner_optimizers
from scaling.ranks import once_a_group

STATE = "state.json"
ALONE = "torch.distributed is disabled"
"""torch warns of one process also where it is told of it."""


def new_folder(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` is to be written, empty of what a run left there that ended before it counted. Rank 0's alone."""
    folder = directory / SHARDS / f"step-{step}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def held(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """All that the next step depends on, by name; the tensors themselves, of which this process may hold a part."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for inner in inner_optimizers(optimizer):
        for parameter, state in inner.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return tensors


class ShardWriter:
    """Writes this process's parts of one checkpoint after the other; every process of the run has one, and starts the same."""

    def __init__(self, background: bool) -> None:
        """background: from a copy in memory, by another thread and a process group of its own."""
        self._background = background
        self._pending: Future[None] | None = None
        if background:
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
            self._group = once_a_group("checkpoints", lambda: dist.new_group(backend="gloo"))

    def start(self, folder: Path, tensors: Mapping[str, Tensor], done: Callable[[], None] | None = None) -> None:
        """Write `tensors`, and call `done` when all processes have. Waits for the write before, and raises what `wait` does."""
        self.wait()
        if not self._background:
            write_shards(folder, tensors)
            if done is not None:
                done()
            return
        with _os_errors():
            written = async_save(dict(tensors), checkpoint_id=folder, process_group=self._group, async_stager=self._stager)
        assert isinstance(written, Future)
        self._pending = _then(written, done)

    def wait(self) -> None:
        """Wait for what was started last. Raises OSError when it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with _os_errors():
                pending.result()


def _then(written: Future[Any], done: Callable[[], None] | None) -> Future[None]:
    """`written` and `done` after it, in the thread that writes: a kill after that leaves the new checkpoint."""
    both: Future[None] = Future()

    def finish(first: Future[Any]) -> None:
        try:
            first.result()
            if done is not None:
                done()
        except BaseException as error:  # torch's failures of a checkpoint are no Exceptions
            both.set_exception(error)
        else:
            both.set_result(None)

    written.add_done_callback(finish)
    return both


@contextmanager
def _os_errors() -> Iterator[None]:
    """A rank's error of the disk as such, in all ranks."""
    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise failure from error
        raise RuntimeError(str(error)) from error


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ALONE)
        yield


def write_shards(folder: Path, tensors: Mapping[str, Tensor], alone: bool = False) -> None:
    """Write this process's part of `tensors`; every process of the run calls it, unless `alone`. Raises OSError."""
    with _alone_without_warning(), _os_errors():
        save(dict(tensors), checkpoint_id=folder, no_dist=alone)


def read_shards(
    folder: Path, model: nn.Module, optimizer: AnyOptimizer, whole: Mapping[str, tuple[int, ...]], alone: bool = False
) -> None:
    """Fill `model` and `optimizer`, as sharded as they are, from a folder that any number of processes wrote.

    whole: the shapes of all tensors of the run's model, of which `model` may hold some.
    Raises StudyError when the folder cannot be read or holds other tensors.
    """
    cure = f"delete {folder.parent}: the run then starts from its first step"
    try:
        kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a torn file makes the unpickler fail in any of its opcodes, with any exception
        raise StudyError(Fault(str(folder), f"cannot be read: {error}", cure)) from None
    parameters = dict(model.named_parameters())
    sizes = {name: tuple(item.size) for name, item in kept.items() if isinstance(item, TensorStorageMetadata)}
    own = {f"model.{name}": shape for name, shape in whole.items()}
    found = {name: size for name, size in sizes.items() if name.startswith("model.")}
    if found != own:
        raise StudyError(Fault(str(folder), f"holds other tensors: {sorted(dict(found.items() ^ own.items()))[:3]}", cure))
    _make_states(sizes, parameters, optimizer)
    with _alone_without_warning():
        load(held(model, optimizer), checkpoint_id=folder, no_dist=alone)


def _make_states(sizes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, nn.Parameter], optimizer: AnyOptimizer) -> None:
    """Room for the optimizer's state: a tensor of a parameter's shape is sharded as that is."""
    owner = {
        id(tensor): inner for inner in inner_optimizers(optimizer) for group in inner.param_groups for tensor in group["params"]
    }
    for full, size in sizes.items():
        kind, _, rest = full.partition(".")
        if kind != "optimizer":
            continue
        name, _, key = rest.rpartition(".")
        if name not in parameters:
            continue  # another stage's
        parameter = parameters[name]
        room = (
            torch.zeros_like(parameter.detach()) if size == tuple(parameter.shape) else torch.zeros(size, device=parameter.device)
        )
        owner[id(parameter)].state[parameter][key] = room


def write_state(directory: Path, folder: Path, state: Mapping[str, Any]) -> None:
    """Have `folder` count from now on, with what else the run needs to go on, and remove those before it."""
    path = directory / SHARDS / STATE
    temporary = path.with_name(f".{STATE}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        json.dump({"folder": folder.name, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    for other in path.parent.glob("step-*"):
        if other != folder:
            shutil.rmtree(other)


def read_state(directory: Path, run_id: str) -> dict[str, Any] | None:
    """What `write_state` kept, or None when there is nothing. Raises StudyError when it is unreadable or another run's."""
    path = directory / SHARDS / STATE
    cure = f"delete {path.parent}: the run then starts from its first step"
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        state["folder"] = path.parent / str(state["folder"])
    except (ValueError, KeyError, TypeError) as error:
        raise StudyError(Fault(str(path), f"cannot be read: {error}", cure)) from None
    if state.get("run_id") != run_id:
        raise StudyError(Fault(str(path), f"belongs to run {state.get('run_id')}, not to {run_id}", cure))
    return state


def of_one_process(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint of `scaling.checkpoint`, by their names here."""
    tensors = {f"model.{name}": tensor for name, tensor in saved["model"].items()}
    for inner in saved["optimizer"].get("optimizers", [saved["optimizer"]]):
        names = [name for group in inner["param_groups"] for name in group["names"]]
        for place, state in inner["state"].items():
            tensors |= {f"optimizer.{names[place]}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return tensors
