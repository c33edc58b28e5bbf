"""`mutransfer coord` as users call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT.parent / "shared" / "examples" / "coord_targets.py"
HIDDEN = {"up.0.weight", "up.1.weight", "down.0.weight", "down.1.weight"}


def coord(folder: Path, *arguments: str) -> tuple[int, Any, str]:
    command = [sys.executable, "-m", "sweeps.cli", "coord", *arguments, "--json"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, json.loads(result.stdout), result.stderr


@pytest.mark.skipif(not EXAMPLES.exists(), reason="no examples beside the repository")
@pytest.mark.parametrize(
    ("name", "verdict", "required", "allowed"),
    [
        ("Mup", "pass", set(), set()),
        ("Standard", "fail", HIDDEN, HIDDEN | {"readout.weight"}),
        ("HiddenLrNotScaled", "fail", HIDDEN, HIDDEN),
        ("EmbeddingFrozen", "fail", {"embed.weight"}, {"embed.weight"}),
    ],
)
def test_the_examples_get_their_answers(tmp_path: Path, name: str, verdict: str, required: set[str], allowed: set[str]) -> None:
    code, document, _ = coord(tmp_path, "--target", f"{EXAMPLES}:{name}", "--widths", "64,128,256,512")
    assert document["verdict"] == verdict
    assert code == (0 if verdict == "pass" else 1)
    assert required <= {item["tensor"] for item in document["culprits"]} <= allowed
    for item in document["culprits"]:
        assert set(item) >= {"tensor", "statistic", "slope", "interval", "expected"}
        assert item["interval"][0] <= item["slope"] <= item["interval"][1]


def run_file(folder: Path, **changes: Any) -> str:
    values = {
        "model": {"width": 32, "depth": 1, "head_dim": 8, "context": 16},
        "base": {"width": 32},
        "data": {"source": "zipf-markov", "synthetic_tokens": 40_000, "synthetic_vocab": 32},
        "optimizer": {"lr": 0.015625, "eps": 1e-12},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values | changes))
    return "run.yaml"


def test_the_own_model_passes_under_mup_and_fails_under_sp(tmp_path: Path) -> None:
    code, document, _ = coord(tmp_path, run_file(tmp_path), "--widths", "32,64,128,256", "--out", "check")
    assert (code, document["verdict"], document["culprits"]) == (0, "pass", [])
    assert (tmp_path / "check" / "coord.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "check" / "coord.json").read_text()) == document
    arguments = ("--widths", "32,64,128,256", "--parametrization.kind", "sp")
    code, document, _ = coord(tmp_path, run_file(tmp_path), *arguments)
    assert (code, document["verdict"]) == (1, "fail")
    named = {(item["tensor"], item["statistic"]) for item in document["culprits"]}
    assert ("blocks.0.mlp.up.weight", "update") in named
    assert ("readout.weight", "multiplier") in named


def test_depth_passes_under_completep_and_fails_under_mup(tmp_path: Path) -> None:
    arguments = ("--depths", "2,4,8,16", "--out", "check")
    code, document, _ = coord(tmp_path, run_file(tmp_path), *arguments, "--parametrization.kind", "completep")
    assert (code, document["verdict"], document["axis"], document["depths"]) == (0, "pass", "depth", [2, 4, 8, 16])
    assert (tmp_path / "check" / "coord.svg").read_text().startswith("<svg")
    assert "Slopes against log2(depth)" in (tmp_path / "check" / "coord.html").read_text()
    rows = {(item["tensor"], item["statistic"]): item["slope"] for item in document["rows"]}
    assert rows["blocks.*.mlp.up.weight", "sensitivity"] == pytest.approx(-1, abs=0.15)
    code, document, _ = coord(tmp_path, run_file(tmp_path), *arguments)
    assert (code, document["verdict"]) == (1, "fail")
    assert all("(completep)" in item["message"] for item in document["culprits"])
    assert {item["statistic"] for item in document["culprits"]} == {"multiplier"}


def test_a_target_of_the_users_own_is_given_depths(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.coordinates.depth_targets import DeepMlp, DepthFault\n"
        "right = DeepMlp()\nfrozen = DeepMlp(fault=DepthFault(lr={'embed.weight': -1}))\n"
    )
    for name, verdict, named in (("right", "pass", set()), ("frozen", "fail", {"embed.weight"})):
        _, document, _ = coord(tmp_path, "--target", f"{tmp_path / 'mine.py'}:{name}", "--depths", "2,4,8,16")
        assert document["verdict"] == verdict
        assert {item["tensor"] for item in document["culprits"]} == named


def test_wider_models_train_no_worse(tmp_path: Path) -> None:
    code, document, _ = coord(tmp_path, run_file(tmp_path), "--widths", "32,64,128", "--train-steps", "20")
    assert (code, document["verdict"], document["wider"]["verdict"]) == (0, "pass", "pass"), document["wider"]
    assert [item["width"] for item in document["wider"]["losses"]] == [32, 64, 128]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give a run's YAML file or --target"),
        (("--target", "nowhere.py:Net"), "no such file"),
        (("--target", "mine.py:Nte"), "targets in it: Net"),
        (("--target", "mine.py:Half"), "has no optimizer, batch, loss"),
        (("--target", "mine.py:Needs"), "give it defaults, or name an object"),
        (("--target", "mine.py:Raises"), "ValueError: no such width"),
        (("--target", "mine.py"), "is not of the form"),
        (("--target", "broken.py:Net"), "cannot be imported: ZeroDivisionError"),
        (("run.yaml", "--widths", "32,x"), "needs at least two whole numbers"),
        (("run.yaml", "--widths", "32,33"), "width 33 is not divisible"),
        (("run.yaml", "--depths", "2"), "needs at least two whole numbers"),
        (("run.yaml", "--depths", "2,4,8", "--widths", "32,64"), "--widths or --depths, one of the two"),
        (("run.yaml", "--depths", "2,4,8", "--train-steps", "5"), "--depths has one width"),
    ],
)
def test_wrong_use_is_explained(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    run_file(tmp_path)
    methods = "".join(f"    def {name}(self, *_): ...\n" for name in ("build", "optimizer", "batch", "loss"))
    raises = "class Raises(Net):\n    def build(self, width):\n        raise ValueError('no such width')\n"
    needs = "class Needs(Net):\n    def __init__(self, size): ...\n"
    (tmp_path / "mine.py").write_text(f"class Net:\n{methods}\nclass Half:\n    def build(self, width): ...\n\n{raises}{needs}")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    code, document, _ = coord(tmp_path, *arguments)
    assert code == 2
    texts = [f"{error['what']} {error['cure']}" for error in document["errors"]]
    assert any(expected in text for text in texts), texts


TARGET = """
import torch
from torch import nn
from beside_it import SIZE

class Net:
    def build(self, width):
        return nn.Sequential(nn.Linear(SIZE, width), nn.Tanh(), nn.Linear(width, 2))
    def optimizer(self, model, width):
        return torch.optim.SGD(model.parameters(), lr=0.0)
    def batch(self, step):
        import later_beside_it
        return torch.ones(8, SIZE)
    def loss(self, model, batch):
        return model(batch).square().mean()

class Broken(Net):
    def loss(self, model, batch):
        return 1.0
"""


@pytest.mark.parametrize("stem", ["scaling", "analysis", "random", "statistics"])
def test_a_file_of_any_name_is_a_target(tmp_path: Path, stem: str) -> None:
    """Its name hides neither the toolkit's modules nor Python's; files beside it are imported, later ones too."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"{stem}.py").write_text(TARGET)
    (tmp_path / "mine" / "beside_it.py").write_text("SIZE = 4\n")
    (tmp_path / "mine" / "later_beside_it.py").write_text("")
    arguments = ("--widths", "8,16,32", "--seeds", "1", "--out", "check")
    code, document, _ = coord(tmp_path, "--target", f"mine/{stem}.py:Net", *arguments)
    assert (code, document["verdict"]) == (1, "fail")
    assert "frozen" in {item["statistic"] for item in document["culprits"]}
    code, document, _ = coord(tmp_path, "--target", f"mine/{stem}.py:Broken", *arguments)
    assert code == 2
    assert document["errors"][0]["where"] == f"--target mine/{stem}.py:Broken: Broken.loss()"
    assert "returned a float, not a tensor" in document["errors"][0]["what"]


def test_a_learning_rate_that_is_far_too_high_is_named(tmp_path: Path) -> None:
    code, document, _ = coord(tmp_path, run_file(tmp_path), "--widths", "32,64,128", "--optimizer.lr", "1e30", "--seeds", "1")
    assert (code, document["verdict"]) == (1, "fail")
    assert {item["statistic"] for item in document["culprits"]} == {"not_finite"}
    assert "lower the learning rate" in document["culprits"][0]["message"]
