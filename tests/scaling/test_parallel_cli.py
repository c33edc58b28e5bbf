"""`train --parallel`: the command starts the processes of a mesh, and says all that is wrong with one without starting any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from scaling.ranks import Team
from tests.scaling.test_parallel import TOLERANCE, laid, trained


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(laid(None).model_dump(mode="json", exclude={"runtime"}, exclude_none=True)))
    return path


@pytest.mark.slow
def test_train_on_a_mesh_of_four_processes_has_the_loss_of_one(
    tmp_path: Path, config: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    alone = trained(laid(None), tmp_path / "one")
    out = ("--json", "--out", tmp_path / "four")
    code, answer, _ = call("train", config, *out, "--parallel", "fsdp=2,tp=2,sp=on")
    assert code == 0
    assert json.loads(answer)["loss"] == pytest.approx(alone[len(alone) // 2], abs=TOLERANCE)


def test_train_says_all_that_is_wrong_with_a_layout_and_starts_nothing(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr(Team, "_assemble", lambda *_: pytest.fail("a process was started"))
    code, _, said = call("train", config, "--out", tmp_path / "run", "--parallel", "tp=3,fsdp=3")
    assert code == 2
    for part in ("8 attention heads", "inner width 256", "batch_size 8"):
        assert part in said
    assert not (tmp_path / "run").exists()
