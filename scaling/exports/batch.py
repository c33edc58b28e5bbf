"""How a batch is spread over devices and forward passes: sequences = micro-batch x accumulation x devices. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from scaling.config import RunConfig
from scaling.errors import Fault, raise_all


@dataclass(frozen=True)
class Batch:
    """Sequences an update, sequences a device and forward pass, and forward passes an update."""

    sequences: int
    micro: int
    accumulation: int
    devices: int


def make_batch(run: RunConfig, devices: int, micro: int | None) -> Batch:
    """micro: default the run's own micro-batch, or all of a device's share. Raises ConfigError where it does not come out even."""
    sequences = run.training.batch_size
    faults = []
    if sequences % devices:
        below = max(d for d in range(1, devices) if sequences % d == 0)
        what = f"a batch of {sequences} sequences does not divide over {devices} devices"
        faults.append(Fault(f"--devices {devices}", what, f"for example --devices {below}"))
    raise_all(faults)
    share = sequences // devices
    size = micro or min(run.training.micro_batch_size or share, share)
    if share % size:
        fitting = max(m for m in range(1, min(size, share) + 1) if share % m == 0)
        what = f"does not divide the {share} sequences that each of {devices} devices has of a batch of {sequences}"
        raise_all([Fault(f"--micro-batch {size}", what, f"for example --micro-batch {fitting}")])
    return Batch(sequences, size, share // size, devices)
