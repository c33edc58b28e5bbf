"""`train --parallel`: the command starts the processes of a mesh, and says all that is wrong with one without starting any."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from scaling.ranks import Team
from sweeps.cli import main
from tests.scaling.test_parallel import TOLERANCE, laid, trained


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["mutransfer", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(laid(None).model_dump(mode="json", exclude={"runtime"}, exclude_none=True)))
    return path


@pytest.mark.slow
def test_train_on_a_mesh_of_four_processes_has_the_loss_of_one(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(laid(None), tmp_path / "one")
    out = ("--json", "--out", tmp_path / "four")
    assert command(monkeypatch, "train", config, *out, "--parallel", "fsdp=2,tp=2,sp=on") == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(alone[len(alone) // 2], abs=TOLERANCE)


def test_train_says_all_that_is_wrong_with_a_layout_and_starts_nothing(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Team, "_assemble", lambda *_: pytest.fail("a process was started"))
    assert command(monkeypatch, "train", config, "--out", tmp_path / "run", "--parallel", "tp=3,fsdp=3") == 2
    said = capsys.readouterr().err
    for part in ("8 attention heads", "inner width 256", "batch_size 8"):
        assert part in said
    assert not (tmp_path / "run").exists()
