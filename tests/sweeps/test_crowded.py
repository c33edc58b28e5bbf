"""A run that is spread over more processes than there are cores says so before it starts."""

from __future__ import annotations

from sweeps.cli_run import _crowded
from tests.conftest import tiny_run


def test_more_processes_than_cores_are_said() -> None:
    run = tiny_run()
    crowded = run.model_copy(update={"runtime": run.runtime.model_copy(update={"processes": 1024})})
    assert _crowded(run) == ""
    assert "1024 processes share" in _crowded(crowded)
