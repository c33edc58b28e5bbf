"""Mid-run checkpoints: everything that the next step depends on, so that a resumed run repeats the uninterrupted one bit by bit.

Batches are a pure function of (data seed, step) and there is no dropout, so no RNG state is needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from scaling.errors import Fault, StudyError

CHECKPOINT_NAME = "checkpoint.pt"
SHARDS = "checkpoint.shards"
"""Folder of a sharded run's checkpoint (scaling.parallel_checkpoint)."""


def kept_name(step: int) -> str:
    """Name of a checkpoint that stays: that after `step` updates (runtime.keep_checkpoints_at_steps)."""
    return f"checkpoint-{step}.pt"


def save_checkpoint(directory: Path, state: dict[str, Any], name: str = CHECKPOINT_NAME) -> None:
    """Write `state` atomically to `directory/name`, over the one before."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(directory: Path, run_id: str, name: str = CHECKPOINT_NAME) -> dict[str, Any] | None:
    """The state saved in `directory/name`, or None when there is none.

    Raises StudyError when the file is unreadable or belongs to another run.
    """
    path = directory / name
    if not path.exists():
        return None
    cure = f"delete {path}: the run then starts from its first step"
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn file makes the unpickler fail in any of its opcodes, with any exception
        raise StudyError(Fault(str(path), f"cannot be read: {error}", cure)) from None
    if state.get("run_id") != run_id:
        raise StudyError(Fault(str(path), f"belongs to run {state.get('run_id')}, not to {run_id}", cure))
    return state


def remove_checkpoint(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        (directory / CHECKPOINT_NAME).unlink()
    shutil.rmtree(directory / SHARDS, ignore_errors=True)
