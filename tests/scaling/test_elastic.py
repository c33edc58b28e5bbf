"""Ranks that die under torchrun: the restarted ones meet, and the run goes on from its last whole checkpoint as if nothing had been."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scaling.ranks import Team, agree_on_attempt
from scaling.records import read_record
from tests.scaling.elastic import curve, kill, steps_logged, torchrun, wait_for, write_run
from tests.scaling.test_parallel import laid, trained


def meet(port: int, size: int = 3) -> set[str]:
    """The names that `size` ranks agree on, each with a connection of its own to a store that was there before them."""
    names: dict[int, str] = {}

    def rank(number: int) -> None:
        names[number] = agree_on_attempt(TCPStore("127.0.0.1", port, is_master=False), number, size)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(names) == size, f"only ranks {sorted(names)} of {size} have met"
    return set(names.values())


def test_ranks_agree_on_a_new_attempt_whatever_dead_ones_left_in_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("asks/2", "a rank that was killed as it waited for rank 0")
    first = meet(server.port)
    assert len(first) == 1
    server.set("asks/1", "a rank that was killed as it waited for rank 0")
    second = meet(server.port)
    assert len(second) == 1
    assert first != second


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_under_torchrun_ends_bit_by_bit_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Rank 1 is killed between two checkpoints."""
    run = laid("fsdp=2", every=3)
    run = run.model_copy(update={"training": run.training.model_copy(update={"steps": 24})})
    with Team() as team:
        trained(run, tmp_path / "whole", team)
    agent = torchrun(write_run(tmp_path / "run.yaml", run), tmp_path / "killed", "fsdp=2", tmp_path / "log", restarts=1)
    try:
        assert wait_for(lambda: steps_logged(tmp_path / "killed") >= 4, agent), (tmp_path / "log").read_text()
        assert kill(agent.pid, 1) is not None
        assert agent.wait(timeout=60) == 0, (tmp_path / "log").read_text()
    finally:
        agent.terminate()
        agent.wait()
    record = read_record(tmp_path / "killed")
    assert record is not None
    assert record.resumed_from_step > 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
