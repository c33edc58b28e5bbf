"""Which cores and GPUs each worker of a local pool gets: one worker a GPU where runs train on GPUs, else one a core.

Owns `places`, a pure function of a machine's topology, and `topology`, which reads this machine's. What the process was given
(affinity mask, CUDA_VISIBLE_DEVICES) is all that is handed out. Cores are bound on Linux; elsewhere a place names GPUs alone.
Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scaling.config import RuntimeConfig
from scaling.errors import Fault, StudyError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Gpu:
    name: str
    """As CUDA_VISIBLE_DEVICES takes it: an index or a UUID."""
    node: int | None = None
    """NUMA node that it hangs on, where known."""


@dataclass(frozen=True)
class Topology:
    """What a process may use of its machine."""

    nodes: tuple[tuple[int, ...], ...]
    """Cores of each NUMA node; a node without cores stays, so that numbers are the machine's."""
    gpus: tuple[Gpu, ...] = ()

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for node in self.nodes for core in node)


@dataclass(frozen=True)
class Place:
    """A worker's share; without cores it is not bound."""

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """What to start the worker with."""
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}

    def bind(self, pid: int) -> None:
        """Bind a process that has just been started, and so all threads it will have. A process that has ended meanwhile is none."""
        if self.cores and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(pid, self.cores)


def places(machine: Topology, jobs: int, runtime: RuntimeConfig) -> list[Place]:
    """The places of `jobs` workers. Raises StudyError where a run wants more GPUs than there are.

    Cores are bound one by one only when the pool takes all of them: a smaller pool may run beside another, and both would sit on the same
    cores. It is kept to NUMA nodes instead, where there are several.
    """
    if runtime.device == "cuda" and machine.gpus:
        slots = _gpu_slots(machine, runtime.processes)
        return [slots[index % len(slots)] for index in range(jobs)]
    need = runtime.threads * runtime.processes
    if not runtime.pin or runtime.device != "cpu":
        return [Place()] * jobs
    slots = [Place(cores) for cores in _core_slots(machine, need)]
    if len(slots) == jobs and need * (jobs + 1) > len(machine.cores):
        return slots
    nodes = [node for node in machine.nodes if len(node) >= need]
    if len(nodes) < 2 or jobs * need > len(machine.cores):
        return [Place()] * jobs
    return [Place(nodes[index * len(nodes) // jobs]) for index in range(jobs)]


def _gpu_slots(machine: Topology, processes: int) -> list[Place]:
    """One place for every `processes` GPUs, on the cores of their NUMA node where they share one."""
    gpus = machine.gpus
    if len(gpus) < processes:
        what = f"is {processes}, and {len(gpus)} GPUs are visible"
        raise StudyError(Fault("runtime.processes", what, f"set it to {len(gpus)} at most, or show more in {VISIBLE}"))
    slots = []
    for first in range(0, len(gpus) - processes + 1, processes):
        mine = gpus[first : first + processes]
        nodes = {gpu.node for gpu in mine}
        node = nodes.pop() if len(nodes) == 1 else None
        cores = machine.nodes[node] if node is not None and node < len(machine.nodes) else ()
        slots.append(Place(cores, tuple(gpu.name for gpu in mine)))
    return slots


def _core_slots(machine: Topology, need: int) -> list[tuple[int, ...]]:
    """As many groups of `need` cores as there are, within NUMA nodes first; what nodes have left over is put together."""
    slots: list[tuple[int, ...]] = []
    rest: list[int] = []
    for node in machine.nodes:
        whole = len(node) // need * need
        slots += [node[first : first + need] for first in range(0, whole, need)]
        rest += node[whole:]
    return slots + [tuple(rest[first : first + need]) for first in range(0, len(rest) - need + 1, need)]


def default_jobs(runtime: RuntimeConfig, machine: Topology | None = None) -> int:
    """Workers of a pool: as many as there are GPUs, or cores, for the processes and threads of a run each."""
    machine = machine or topology(runtime)
    if runtime.device == "cuda":
        return max(1, len(machine.gpus) // runtime.processes)
    return max(1, len(machine.cores) // (runtime.threads * runtime.processes))


def crowded(machine: Topology, jobs: int, runtime: RuntimeConfig) -> str | None:
    """What to tell the user where workers share GPUs."""
    room = len(machine.gpus) // runtime.processes
    if runtime.device != "cuda" or not room or jobs <= room:
        return None
    return f"{jobs} workers share {len(machine.gpus)} GPUs: up to {-(-jobs // room)} on each"


def topology(runtime: RuntimeConfig) -> Topology:
    """This machine, as far as this process may use it; GPUs are looked for where runs train on them."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    lists = {int(path.parent.name[4:]): path.read_text() for path in NODES.glob("node[0-9]*/cpulist")}
    nodes = by_node(allowed, lists)
    return Topology(nodes, visible_gpus(os.environ, _nvidia_smi()) if runtime.device == "cuda" else ())


def by_node(allowed: Iterable[int], lists: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """The allowed cores by NUMA node; `lists` are the kernel's, as "0-3,8-11". Cores of no known node are the last one."""
    left, nodes = set(allowed), []
    for number in range(max(lists, default=-1) + 1):
        mine = left & _expanded(lists.get(number, ""))
        left -= mine
        nodes.append(tuple(sorted(mine)))
    return (*nodes, tuple(sorted(left))) if left or not nodes else tuple(nodes)


def _expanded(text: str) -> set[int]:
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def visible_gpus(environment: Mapping[str, str], installed: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show: those named in CUDA_VISIBLE_DEVICES up to the first that is negative, or all."""
    if VISIBLE not in environment:
        return installed
    nodes = {gpu.name: gpu.node for gpu in installed}
    found: list[Gpu] = []
    for name in (part.strip() for part in environment[VISIBLE].split(",")):
        if not name or name.startswith("-"):
            break
        # Where a UUID is given its node is known; indices depend on CUDA_DEVICE_ORDER.
        found.append(Gpu(name, nodes.get(name)))
    return tuple(found)


def _nvidia_smi() -> tuple[Gpu, ...]:
    command = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return gpus_of(text)


def gpus_of(text: str, devices: Path = PCI) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's lines of UUID and PCI address, their NUMA node from the kernel's folder of devices."""
    found = []
    for line in text.strip().splitlines():
        uuid, address = (part.strip() for part in line.split(","))
        node = None
        with contextlib.suppress(OSError, ValueError):
            # nvidia-smi writes the PCI domain with eight digits, the kernel with four.
            node = int((devices / address.lower()[-12:] / "numa_node").read_text())
        found.append(Gpu(uuid, node if node is not None and node >= 0 else None))
    return tuple(found)
