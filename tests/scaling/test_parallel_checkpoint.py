"""What writing a sharded checkpoint in the background says when it fails, without any process."""

from __future__ import annotations

import errno
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from scaling import parallel_checkpoint
from scaling.parallel_checkpoint import ShardWriter


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Future[Any]:
    """What torch's async_save returns."""
    future: Future[Any] = Future()
    monkeypatch.setattr(parallel_checkpoint, "async_save", lambda *_, **__: future)
    monkeypatch.setattr(parallel_checkpoint, "once_a_group", lambda *_: None)
    return future


def test_a_full_disk_in_the_background_is_an_error_of_the_disk_and_the_checkpoint_does_not_count(
    tmp_path: Path, written: Future[Any]
) -> None:
    writer, counted = ShardWriter(background=True), list[str]()
    writer.start(tmp_path, {}, lambda: counted.append("state.json"))
    # torch gathers the failures of ranks; what it keeps beside each is the rank's own trace.
    written.set_exception(CheckpointException("write", {1: (OSError(errno.ENOSPC, "no space"), None)}))  # type: ignore[dict-item]
    with pytest.raises(OSError, match="no space") as error:
        writer.wait()
    assert error.value.errno == errno.ENOSPC
    assert not counted
    writer.wait()  # said once


def test_a_checkpoint_counts_as_soon_as_it_is_written(tmp_path: Path, written: Future[Any]) -> None:
    writer, counted = ShardWriter(background=True), list[str]()
    writer.start(tmp_path, {}, lambda: counted.append("state.json"))
    assert not counted
    written.set_result(None)
    assert counted
    writer.wait()
