"""What torchrun tells a process about itself, by environment variables. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping


def started_by_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that torchrun, or a launcher that does as it does, started together."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in environment for name in names) and world_size(environment) > 1


def world_size(environment: Mapping[str, str]) -> int:
    return int(environment["WORLD_SIZE"])


def follows(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of torchrun's that rank 0 leads."""
    return started_by_torchrun(environment) and environment["RANK"] != "0"
