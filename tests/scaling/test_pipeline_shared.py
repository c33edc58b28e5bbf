"""Four processes: stages of a pipeline that several processes share, and replicas of shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling.ranks import Team
from scaling.records import read_record
from tests.scaling.test_parallel import TOLERANCE, laid, trained


@pytest.mark.slow
def test_stages_of_several_processes_and_replicas_of_shards_have_the_losses_and_norms_of_one(tmp_path: Path) -> None:
    """And what four processes wrote, one goes on from."""
    one = trained(laid(None), tmp_path / "one")
    with Team() as four:
        for layout in ("pp=2,dp=2", "pp=2,tp=2,sp=on", "dp=2,fsdp=2"):
            assert trained(laid(layout), tmp_path / layout, four) == pytest.approx(one, abs=TOLERANCE)
        shards = trained(laid("pp=2,fsdp=2", every=4), tmp_path / "shards", four, copy_to=tmp_path / "cut")
    assert shards == pytest.approx(one, abs=TOLERANCE)
    assert trained(laid(None), tmp_path / "cut") == pytest.approx(one, abs=TOLERANCE)
    record = read_record(tmp_path / "cut")
    assert record is not None
    assert record.resumed_from_step == 4
