"""Places of workers on machines that are not here: GPUs, NUMA nodes, masks; and real workers bound to their cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaling.config import RuntimeConfig
from scaling.errors import StudyError
from sweeps.pinning import Gpu, Place, Topology, by_node, crowded, default_jobs, gpus_of, places, visible_gpus

ROOT = Path(__file__).parents[2]
EIGHT = tuple(Gpu(f"GPU-{index}", index // 4) for index in range(8))
SERVER = Topology((tuple(range(16)), tuple(range(16, 32))), EIGHT)
CUDA, CPU = RuntimeConfig(device="cuda"), RuntimeConfig()


def cores(found: list[Place]) -> list[tuple[int, ...]]:
    return [place.cores for place in found]


def test_eight_gpus_get_a_worker_each_on_their_own_numa_node() -> None:
    assert default_jobs(CUDA, SERVER) == 8
    found = places(SERVER, 8, CUDA)
    assert [place.environment for place in found] == [{"CUDA_VISIBLE_DEVICES": f"GPU-{index}"} for index in range(8)]
    assert cores(found) == [SERVER.nodes[0]] * 4 + [SERVER.nodes[1]] * 4
    assert crowded(SERVER, 8, CUDA) is None


def test_more_workers_than_gpus_share_them_and_it_is_said() -> None:
    found = places(SERVER, 12, CUDA)
    assert [place.gpus for place in found[8:]] == [(f"GPU-{index}",) for index in range(4)]
    assert crowded(SERVER, 12, CUDA) == "12 workers share 8 GPUs: up to 2 on each"


def test_a_run_of_two_processes_gets_two_gpus() -> None:
    runtime = RuntimeConfig(device="cuda", processes=2)
    assert default_jobs(runtime, SERVER) == 4
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places(SERVER, 4, runtime)][:2] == [
        "GPU-0,GPU-1",
        "GPU-2,GPU-3",
    ]
    with pytest.raises(StudyError, match="8 GPUs are visible"):
        places(SERVER, 1, RuntimeConfig(device="cuda", processes=9))


def test_a_pool_that_takes_all_cores_is_bound_one_by_one() -> None:
    machine = Topology(((0, 1), (2, 3)))
    assert default_jobs(CPU, machine) == 4
    assert cores(places(machine, 4, CPU)) == [(0,), (1,), (2,), (3,)]
    assert cores(places(machine, 2, RuntimeConfig(threads=2))) == [(0, 1), (2, 3)]


def test_workers_of_several_cores_stay_within_a_node_where_they_can() -> None:
    machine = Topology(((0, 1, 2), (3, 4, 5)))
    assert cores(places(machine, 3, RuntimeConfig(threads=2))) == [(0, 1), (3, 4), (2, 5)]


@pytest.mark.parametrize(("jobs", "expected"), [(1, [0]), (4, [0, 0, 1, 1])])
def test_a_smaller_pool_is_kept_to_nodes(jobs: int, expected: list[int]) -> None:
    assert cores(places(SERVER, jobs, CPU)) == [SERVER.nodes[node] for node in expected]


@pytest.mark.parametrize(
    ("machine", "jobs", "runtime"),
    [
        (Topology(((0, 1),)), 1, CPU),  # beside it another pool may run
        (Topology(((0, 1),)), 3, CPU),  # more workers than cores
        (SERVER, 40, CPU),
        (SERVER, 32, RuntimeConfig(pin=False)),
        (Topology(((0, 1),)), 2, CUDA),  # no GPU: the run itself says so
    ],
)
def test_otherwise_workers_are_left_to_the_kernel(machine: Topology, jobs: int, runtime: RuntimeConfig) -> None:
    assert places(machine, jobs, runtime) == [Place()] * jobs


def test_cores_outside_of_the_mask_are_not_used() -> None:
    nodes = by_node([2, 3, 9], {0: "0-3,8\n", 1: "4-7,9-11\n"})
    assert nodes == ((2, 3), (9,))
    assert default_jobs(CPU, Topology(nodes)) == 3
    assert cores(places(Topology(nodes), 3, CPU)) == [(2,), (3,), (9,)]
    assert by_node([5, 4], {}) == ((4, 5),)


@pytest.mark.parametrize(
    ("value", "names"), [("3,1", ["3", "1"]), ("", []), ("GPU-2,-1,GPU-3", ["GPU-2"]), (" 0 , 4", ["0", "4"])]
)
def test_gpus_are_those_that_the_process_was_given(value: str, names: list[str]) -> None:
    found = visible_gpus({"CUDA_VISIBLE_DEVICES": value}, EIGHT)
    assert [gpu.name for gpu in found] == names
    assert [gpu.node for gpu in found] == [0 if name == "GPU-2" else None for name in names]
    assert visible_gpus({}, EIGHT) == EIGHT


def test_a_gpus_node_is_read_from_the_kernel(tmp_path: Path) -> None:
    for address, node in (("0000:1b:00.0", "1\n"), ("0000:9a:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(node)
    text = "GPU-a, 00000000:1B:00.0\nGPU-b, 00000000:9A:00.0\nGPU-c, 00000000:AA:00.0\n"
    assert gpus_of(text, tmp_path) == (Gpu("GPU-a", 1), Gpu("GPU-b"), Gpu("GPU-c"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are bound on Linux")
def test_a_bound_process_and_its_threads_stay_on_their_core() -> None:
    core = max(os.sched_getaffinity(0))
    code = (
        "import json, os, sys, threading; sys.stdin.readline(); found = [os.sched_getaffinity(0)]\n"
        "thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0))); thread.start(); thread.join()\n"
        "print(json.dumps([sorted(mask) for mask in found]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    Place((core,)).bind(process.pid)
    assert json.loads(process.communicate("\n")[0]) == [[core], [core]]
    Place((core,)).bind(process.pid)  # it has ended
