"""Targets of a coordinate check: the toolkit's own transformer, or a user's object named as file.py:Name or module:Name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from scaling.config import RunConfig
from scaling.coordinates import Target
from scaling.data import Corpus, train_batch
from scaling.errors import ConfigError, Fault
from scaling.model import Transformer, build_model
from scaling.model_config import ModelConfig, ModelFamily
from scaling.optimizer import build_optimizer

METHODS = ("build", "optimizer", "batch", "loss")


class RunTarget:
    """A run of the toolkit at other widths: its parametrization, optimizer and data, at its base LR."""

    def __init__(self, run: RunConfig, corpus: Corpus) -> None:
        self.run, self.corpus = run, corpus

    def at(self, width: int) -> RunConfig:
        """The run at `width`, seeded by torch's global seed."""
        return self.sized(ModelFamily(**{name: getattr(self.run.model, name) for name in ModelFamily.model_fields}).at(width))

    def sized(self, model: ModelConfig) -> RunConfig:
        training = self.run.training.model_copy(update={"seed": torch.initial_seed() % 2**31})
        return self.run.model_copy(update={"model": model, "training": training})

    def build(self, width: int) -> nn.Module:
        return build_model(self.at(width))

    def optimizer(self, model: nn.Module, width: int) -> torch.optim.Optimizer:
        # Muon beside AdamW in one object does what is asked of an optimizer here.
        return cast(torch.optim.Optimizer, build_optimizer(model, self.at(width)))

    def batch(self, step: int) -> Tensor:
        training = self.run.training
        tokens = train_batch(
            self.corpus, step=step, data_seed=training.data_seed, batch_size=training.batch_size, context=self.run.model.context
        )
        return torch.from_numpy(tokens)

    def loss(self, model: Transformer, batch: Tensor) -> Tensor:
        return model.loss(batch)


class DepthTarget(RunTarget):
    """The same at other depths; sizes are depths. The base depth is the run's own where it names none."""

    def at(self, width: int) -> RunConfig:
        base = self.run.base if self.run.base.depth else self.run.base.model_copy(update={"depth": self.run.model.depth})
        run = self.sized(self.run.model.model_copy(update={"depth": width}))
        return run.model_copy(update={"base": base})


def load_target(text: str) -> Target:
    """The object that `text` names; a class is instantiated. Raises ConfigError that says what is missing."""
    place, separator, name = text.rpartition(":")
    where = f"--target {text}"
    if not separator or not place or not name:
        raise ConfigError(Fault(where, "is not of the form path/to/file.py:Name or module:Name"))
    module = _module(place, where)
    found = getattr(module, name, None)
    if found is None:
        names = [known for known, value in vars(module).items() if all(hasattr(value, method) for method in METHODS)]
        cure = f"targets in it: {', '.join(names)}" if names else f"define {name} with {', '.join(METHODS)}"
        raise ConfigError(Fault(where, f"{place} has no {name!r}", cure))
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if missing:
        cure = "build(width), optimizer(model, width), batch(step), loss(model, batch)"
        raise ConfigError(Fault(where, f"has no {', '.join(missing)}", cure))
    try:
        target: Any = found() if isinstance(found, type) else found
    except Exception as error:  # whatever the user's class raises
        cure = "give it defaults, or name an object that is made in the file"
        raise ConfigError(Fault(where, f"cannot be made without arguments: {type(error).__name__}: {error}", cure)) from None
    return cast(Target, target)


def _module(place: str, where: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            path = Path(place)
            if not path.is_file():
                raise ConfigError(Fault(where, f"{path}: no such file"))
            return _file(path)
        with _importable(Path.cwd()):
            return importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(Fault(where, f"cannot be imported: {type(error).__name__}: {error}")) from None


def _file(path: Path) -> ModuleType:
    """The file as a module of a name of its own: as `random` or `scaling` it would replace the real one for everybody."""
    name = f"_target_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importable(path.parent.resolve()):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let what lies in `folder` be imported: first of all meanwhile, and last of all from then on, where it hides nothing."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.path.append(str(folder))
