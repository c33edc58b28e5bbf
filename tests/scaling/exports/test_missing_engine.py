"""An exported file run where its engine is missing, or is another version, ends with the command that installs it, not with a traceback."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from pathlib import Path
from typing import Any

import pytest

from scaling.exports.pytorch import recipe
from sweeps.cli_export import INSTALL


class Missing(importlib.abc.MetaPathFinder):
    """Import of `package` fails as where it is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def import_recipe(folder: Path, file: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import `file` from a folder that has it and param_groups.py, as a user's program does, with `package` not loaded before."""
    for name in ("param_groups.py", file):
        (folder / name).write_text(recipe(name))
    monkeypatch.syspath_prepend(str(folder))
    own, before = ("param_groups", Path(file).stem), dict(sys.modules)
    for name in before:
        if name in own or name.partition(".")[0] == package:
            del sys.modules[name]
    try:
        importlib.import_module(Path(file).stem)
    finally:
        for name in [name for name in sys.modules if name in own or name.partition(".")[0] == package]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.mark.parametrize(
    ("engine", "file", "package"),
    [
        ("pytorch", "param_groups.py", "torch"),
        ("pytorch", "train_fsdp.py", "torch"),
        ("torchtitan", "torchtitan_recipe.py", "torchtitan"),
        ("megatron", "megatron_recipe.py", "megatron"),
        ("olmo-core", "olmo_core_recipe.py", "olmo_core"),
        ("deepspeed", "deepspeed_engine.py", "deepspeed"),
        ("hf", "huggingface_trainer.py", "transformers"),
    ],
)
def test_a_missing_engine_is_said_with_the_command_that_installs_it(
    engine: str, file: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        import_recipe(tmp_path, file, package, monkeypatch)
    assert ended.value.code == f"{package} is not installed here, and this file needs it. Install it: {INSTALL[engine]}"


def torchtitan_of(folder: Path, module: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torchtitan than the recipe's: `module` with `text`, and its parents."""
    (folder / module.replace(".", "/")).mkdir(parents=True)
    (folder / module.replace(".", "/") / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("module", ["torchtitan", "torchtitan.components.optimizer"])
def test_another_version_that_lacks_what_the_recipe_takes_is_said_with_the_command(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchtitan_of(tmp_path / "old", module, "", monkeypatch)
    with pytest.raises(SystemExit) as ended:
        import_recipe(tmp_path, "torchtitan_recipe.py", "torchtitan", monkeypatch)
    assert "another version than this file needs" in str(ended.value.code)
    assert str(ended.value.code).endswith(INSTALL["torchtitan"])


def test_a_module_that_the_engine_itself_lacks_is_not_taken_for_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchtitan_of(tmp_path / "lacking", "torchtitan", "import absent_module_of_its\n", monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="absent_module_of_its"):
        import_recipe(tmp_path, "torchtitan_recipe.py", "torchtitan", monkeypatch)
