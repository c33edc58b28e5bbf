"""A study's directory: created from a config, found again, refused when it was made by another config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scaling.config import DataConfig
from scaling.config_file import ConfigSource, apply_overrides, build, load_config, locate, read_yaml
from scaling.data import prepare, vocabulary_size
from scaling.data.documents import absolute
from scaling.errors import ConfigError, Fault, StudyError, UserError, program
from scaling.locks import driver_lock
from scaling.records import write_atomic
from sweeps.study import StudyConfig
from sweeps.study_layout import check_layout

STUDY_FILE = "study.yaml"
STUDIES = Path("studies")


@dataclass(frozen=True)
class Study:
    """A study and where it lives."""

    directory: Path
    config: StudyConfig
    changes: tuple[str, ...] = ()
    """What differs from how the directory was left: the grid, and how runs are made and judged."""

    def data_arguments(self) -> dict[str, Any]:
        """Arguments of scaling.data.prepare for this study's corpus."""
        return data_arguments(self.config)


def data_arguments(config: StudyConfig) -> dict[str, Any]:
    return {"config": config.data, "context": config.model.context, "vocab_size": config.model.vocab_size}


def open_study(path: Path, out: Path | None = None, overrides: Sequence[str] = (), *, save: bool = True) -> Study:
    """The study of a config file (its directory created when new) or of a study directory.

    The grid (widths, LRs, seeds, follow_up) may differ from what the directory was made with: it then grows or shrinks, and
    finished runs are kept. save: write the config to the directory. Raises ConfigError for a wrong config or target, DataError for
    a wrong corpus, StudyError for a directory made by another config, or one in which a driver works while the config changes.
    """
    if path.is_dir():
        if out is not None and out.resolve() != path.resolve():
            raise StudyError(Fault("--out", f"{path} is a study's directory already", "leave --out out, or give the YAML file"))
        return _existing(path, overrides, save)
    source = read_yaml(path)
    apply_overrides(source, overrides)
    config = resolve(build(StudyConfig, source), path, source)
    directory = out or STUDIES / config.name
    stored_file = directory / STUDY_FILE
    if stored_file.exists():
        return _settle(directory, load_config(stored_file, StudyConfig), config, path, save)
    if directory.exists() and not directory.is_dir():
        raise StudyError(Fault(str(directory), "is a file, and a study's folder is wanted", "give a folder: --out DIR"))
    if directory.exists() and any(directory.iterdir()) and not (directory / "runs").is_dir():
        raise StudyError(Fault(str(directory), f"is not empty and holds no {STUDY_FILE}", "give another folder: --out DIR"))
    if save:
        _write(directory, config)
    return Study(directory, config)


def find_study(path: Path, out: Path | None = None) -> Study:
    """An existing study, by its directory or its config file; nothing is created or changed and no corpus is read."""
    directory = path if path.is_dir() else out or STUDIES / load_config(path, StudyConfig).name
    if not (directory / STUDY_FILE).exists():
        cure = f"start it: {program()} study {path}" if path.is_file() else "give a study's YAML file"
        raise StudyError(Fault(str(directory), f"is no study: it holds no {STUDY_FILE}", cure))
    return Study(directory, load_config(directory / STUDY_FILE, StudyConfig))


def _existing(directory: Path, overrides: Sequence[str], save: bool) -> Study:
    stored = find_study(directory).config
    source = read_yaml(directory / STUDY_FILE)
    apply_overrides(source, overrides)
    config = build(StudyConfig, source)
    check_target_file(config, source)
    check_layout(config, source)
    return _settle(directory, stored, config, directory / STUDY_FILE, save)


def _settle(directory: Path, stored: StudyConfig, config: StudyConfig, file: Path, save: bool) -> Study:
    """Refuse another study; take over what may change, unless a driver works."""
    _require_same(directory, stored, config, file)
    before, now = flatten(stored.model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if changed and save:
        with driver_lock(directory):
            _write(directory, config)
    return Study(directory, config, tuple(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed))


def write_study(directory: Path, config: StudyConfig) -> Study:
    """The study of a resolved config that comes from elsewhere, its directory made or, when it is the same study's, taken over."""
    stored_file = directory / STUDY_FILE
    if stored_file.exists():
        return _settle(directory, load_config(stored_file, StudyConfig), config, stored_file, True)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StudyError(Fault(str(directory), f"is not empty and holds no {STUDY_FILE}", "give another folder: --out DIR"))
    _write(directory, config)
    return Study(directory, config)


def _write(directory: Path, config: StudyConfig) -> None:
    write_atomic(directory / STUDY_FILE, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def check_target_file(config: StudyConfig, source: ConfigSource) -> None:
    """Raise ConfigError for a target that is absent, wrong, or out of this study's reach: before its runs are made, not after."""
    if config.target is None:
        return
    from analysis.recommend import check_target
    from analysis.report import PREFERRED
    from analysis.target import TargetConfig

    file = Path(config.target)
    if not file.is_file():
        cure = "correct the path (relative to the study's file), or remove the key: `recommend` takes --target later"
        raise ConfigError(Fault(f"{source.place(('target',))}: target", f"{file}: no such file", cure))
    target = read_yaml(file)
    given = list(config.parametrizations)
    kind = next((kind for name in PREFERRED for kind in given if kind == name), given[0])
    check_target(build(TargetConfig, target), config.template(kind), lambda key: f"{target.place((key,))}: {key}")


def resolve(config: StudyConfig, file: Path, source: ConfigSource) -> StudyConfig:
    """`config` with everything that depends on the machine made explicit: paths absolute, vocabulary and corpus hash filled in."""
    data = absolute_paths(config.data, file.parent).model_dump()
    target = None if config.target is None else absolute(config.target, file.parent)
    try:
        vocabulary = config.model.vocab_size or vocabulary_size(config.data)
        if vocabulary is None:
            cure = "add it, for example 50257 for GPT-2's tokens"
            raise ConfigError(Fault("model.vocab_size", "is needed with data.source bin", cure))
        model = config.model.model_dump() | {"vocab_size": vocabulary}
        filled = StudyConfig.model_validate(config.model_dump() | {"data": data, "model": model, "target": target})
        check_target_file(filled, source)
        check_layout(filled, source)
        data["sha256"] = prepare(**data_arguments(filled)).sha256
    except UserError as error:
        raise locate(error, source) from None
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
            "give the changed study a folder of its own: --out DIR (or another name); only the grid may change in place",
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
