"""What the engines that are given torch's own optimizer hold: export a run, build it in the engine by the exported files, read it out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from tests.engines.init_trace import InitTrace
from tests.engines.table import Held


@contextmanager
def exported(files: Mapping[str, str], module: str) -> Iterator[tuple[Any, Path]]:
    """The files in a folder of their own, and `module` imported from there as a user would."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text)
        mine = [Path(file).stem for file in files if file.endswith(".py")]
        for stem in mine:
            sys.modules.pop(stem, None)
        sys.path.insert(0, name)
        try:
            yield importlib.import_module(module), folder
        finally:
            sys.path.remove(name)
            for stem in mine:
                sys.modules.pop(stem, None)


def held_of(model: nn.Module, groups: Mapping[str, Mapping[str, Any]], trace: InitTrace, lr: str = "lr") -> dict[str, Held]:
    """Every parameter of `model` with its group's values. groups: name -> group; lr: the key of the peak LR."""
    held = {}
    for name, parameter in model.named_parameters():
        group = groups[name]
        held[name] = Held(group[lr], group["weight_decay"], group["eps"], vars(trace.init_of(parameter)))
    if set(groups) != set(held):
        raise ValueError(f"in a group and not in the model: {sorted(set(groups) - set(held))}")
    return held


def by_name(groups: list[dict[str, Any]], key: str = "names") -> dict[str, dict[str, Any]]:
    """Name of each tensor -> its group."""
    return {name: group for group in groups for name in group[key]}
