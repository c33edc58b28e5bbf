"""A study's directory: created from a config, found again, refused when it was made by another config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scaling.config import DataConfig
from scaling.config_file import load_config
from scaling.data import prepare, vocabulary_size
from scaling.data.documents import absolute
from scaling.errors import ConfigError, Fault, StudyError
from scaling.records import write_atomic
from sweeps.study import StudyConfig

STUDY_FILE = "study.yaml"
STUDIES = Path("studies")


@dataclass(frozen=True)
class Study:
    """A study and where it lives."""

    directory: Path
    config: StudyConfig

    def data_arguments(self) -> dict[str, Any]:
        """Arguments of scaling.data.prepare for this study's corpus."""
        return data_arguments(self.config)


def data_arguments(config: StudyConfig) -> dict[str, Any]:
    return {"config": config.data, "context": config.model.context, "vocab_size": config.model.vocab_size}


def open_study(path: Path, out: Path | None = None, overrides: Sequence[str] = ()) -> Study:
    """The study of a config file (its directory created when new) or of a study directory.

    Raises ConfigError for a wrong config, DataError for a wrong corpus, StudyError for a directory made by another config.
    """
    if path.is_dir():
        return _existing(path, overrides)
    config = resolve(load_config(path, StudyConfig, overrides), path)
    directory = out or STUDIES / config.name
    stored_file = directory / STUDY_FILE
    if stored_file.exists():
        stored = load_config(stored_file, StudyConfig)
        _require_same(directory, stored, config, path)
    elif directory.exists() and any(directory.iterdir()):
        raise StudyError(Fault(str(directory), f"is not empty and holds no {STUDY_FILE}", "give another folder: --out DIR"))
    write_atomic(stored_file, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return Study(directory, config)


def find_study(path: Path, out: Path | None = None) -> Study:
    """An existing study, by its directory or its config file; nothing is created and no corpus is read."""
    directory = path if path.is_dir() else out or STUDIES / load_config(path, StudyConfig).name
    if not (directory / STUDY_FILE).exists():
        cure = f"start it: mutransfer study {path}" if path.is_file() else "give a study's directory or YAML file"
        raise StudyError(Fault(str(directory), "no study here yet", cure))
    return _existing(directory, ())


def _existing(directory: Path, overrides: Sequence[str]) -> Study:
    file = directory / STUDY_FILE
    if not file.exists():
        raise StudyError(
            Fault(str(directory), f"is no study directory: it holds no {STUDY_FILE}", "give a study's YAML file instead")
        )
    stored = load_config(file, StudyConfig)
    config = load_config(file, StudyConfig, overrides)
    _require_same(directory, stored, config, file)
    return Study(directory, config)


def resolve(config: StudyConfig, file: Path) -> StudyConfig:
    """`config` with everything that depends on the machine made explicit: paths absolute, vocabulary and corpus hash filled in."""
    data = absolute_paths(config.data, file.parent).model_dump()
    target = None if config.target is None else absolute(config.target, file.parent)
    vocabulary = config.model.vocab_size or vocabulary_size(config.data)
    if vocabulary is None:
        cure = "add it, for example 50257 for GPT-2's tokens"
        raise ConfigError(Fault(f"{file}: model.vocab_size", "is needed with data.source bin", cure))
    model = config.model.model_dump() | {"vocab_size": vocabulary}
    filled = StudyConfig.model_validate(config.model_dump() | {"data": data, "model": model, "target": target})
    corpus = prepare(**data_arguments(filled))
    data["sha256"] = corpus.sha256
    return StudyConfig.model_validate(filled.model_dump() | {"data": data})


def absolute_paths(data: DataConfig, folder: Path) -> DataConfig:
    """The same corpus with its paths, which are relative to the config's folder, made absolute."""
    bins = {key: absolute(value, folder) for key in ("train_bin", "validation_bin") if (value := getattr(data, key))}
    return data.model_copy(update={"paths": tuple(absolute(text, folder) for text in data.paths), **bins})


def _require_same(directory: Path, stored: StudyConfig, config: StudyConfig, file: Path) -> None:
    """Raise StudyError naming every key in which the two differ."""
    before, now = flatten(stored.identity()), flatten(config.identity())
    faults = [
        Fault(
            f"{directory / STUDY_FILE}: {key}",
            f"the study was made with {before.get(key)!r}, {file} says {now.get(key)!r}",
            "give the changed study a folder of its own: --out DIR (or another name)",
        )
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if faults:
        raise StudyError(*faults)


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
