"""Configs from YAML files and `--set a.b=c`: every fault at once, with file, line, key and cure. Torch-free.

YAML 1.1 reads `1e-3` as a string; here it is a number. A key given twice is a fault, not a silent override.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from scaling.errors import ConfigError, Fault, UserError

Config = TypeVar("Config", bound=BaseModel)
KeyPath = tuple[str | int, ...]

_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's exponents."""


_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


# A date that does not exist, a number of thousands of digits and a node inside itself are not yaml.YAMLErrors.
NOT_YAML = (yaml.YAMLError, ValueError, OverflowError, RecursionError)


def _problem(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or holds itself"
    return str(getattr(error, "problem", None) or error)


@dataclass
class ConfigSource:
    """Plain values of a config, and where each key was written."""

    values: Any
    name: str
    places: dict[KeyPath, str] = field(default_factory=dict)
    """Key path -> "file:line" or "--set a.b=c"."""

    def place(self, path: KeyPath) -> str:
        """Where `path`, or the nearest key above it that was written, stands."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)


def read_yaml(path: Path) -> ConfigSource:
    """Parse a YAML file; raise ConfigError when it is absent, not YAML, no mapping, or has a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(Fault(str(path), "no such file", _similar_files(path))) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Fault(str(path), f"cannot be read: {error}")) from None
    try:
        node = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)
    except NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(Fault(where, f"is not YAML: {_problem(error)}")) from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(Fault(str(path), "holds no mapping of keys to values at its top"))
    source = ConfigSource(values, str(path))
    faults: list[Fault] = []
    try:
        _walk(node, (), str(path), source.places, faults)
    except RecursionError as error:
        faults = [Fault(str(path), f"is not YAML: {_problem(error)}")]
    if faults:
        raise ConfigError(*faults)
    return source


def _walk(node: yaml.Node, path: KeyPath, file: str, places: dict[KeyPath, str], faults: list[Fault]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, child in node.value:
            inner = (*path, key_node.value)
            where = f"{file}:{key_node.start_mark.line + 1}"
            if inner in places:
                faults.append(Fault(f"{where}: {dotted(inner)}", f"key given twice; first at {places[inner]}", "remove one"))
                continue
            places[inner] = where
            _walk(child, inner, file, places, faults)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            places[(*path, index)] = f"{file}:{child.start_mark.line + 1}"
            _walk(child, (*path, index), file, places, faults)


def apply_overrides(source: ConfigSource, overrides: Sequence[str]) -> None:
    """Apply `a.b=value` strings to `source` in place; values are read as YAML."""
    for override in overrides:
        key, separator, text = override.partition("=")
        where = f"--set {override}"
        if not separator or not key.strip():
            raise ConfigError(Fault(where, "is not of the form key.subkey=value"))
        path: KeyPath = tuple(key.strip().split("."))
        target = source.values
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(Fault(where, f"{part!r} holds a value, not keys"))
        try:
            target[path[-1]] = yaml.load(text, Loader=_Loader)
        except NOT_YAML as error:
            raise ConfigError(Fault(where, f"the value is not YAML: {_problem(error)}")) from None
        for length in range(1, len(path) + 1):
            source.places[path[:length]] = where


def build(schema: type[Config], source: ConfigSource) -> Config:
    """Validate `source` as `schema`; raise one ConfigError with every fault."""
    try:
        return schema.model_validate(source.values)
    except ValidationError as error:
        raise _another_kind(schema, source) or ConfigError(*_faults(schema, source, error)) from None
    except (OverflowError, RecursionError) as error:
        raise ConfigError(Fault(source.name, f"holds a number that is too large: {error}")) from None


KINDS = {
    "a study": {"widths", "log2_lr", "parametrizations"},
    "a run": {"model", "parametrization"},
    "a target": {"width", "tokens"},
}
"""Keys that tell the three kinds of files apart."""


def _another_kind(schema: type[BaseModel], source: ConfigSource) -> ConfigError | None:
    """A study given where a run is wanted, and the like: one fault instead of one for every key."""
    given = set(source.values)
    wanted = next((kind for kind, keys in KINDS.items() if keys <= set(schema.model_fields)), None)
    is_kind = next((kind for kind, keys in KINDS.items() if keys <= given), None)
    if wanted is None or is_kind is None or is_kind == wanted or 2 * len(KINDS[wanted] & given) > len(KINDS[wanted]):
        return None
    what = f"holds {is_kind} ({', '.join(sorted(KINDS[is_kind]))}), and {wanted} is wanted here"
    return ConfigError(Fault(source.name, what, f"give the file of {wanted}: it has {', '.join(sorted(KINDS[wanted]))}"))


def _faults(schema: type[BaseModel], source: ConfigSource, error: ValidationError) -> list[Fault]:
    """Every fault once: of a union's members, all refuse a wrong value."""
    faults = {fault.where: fault for fault in reversed([_fault(schema, source, detail) for detail in error.errors()])}
    return list(reversed(faults.values()))


def locate(error: UserError, source: ConfigSource) -> UserError:
    """The same error with every fault about a key ("data.paths") at the line that holds the key."""
    faults = []
    for fault in error.faults:
        key = fault.where.partition(":")[0].partition("[")[0]
        about_key = re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)+", key) and not key.endswith((".yaml", ".yml", ".bin", ".csv"))
        faults.append(replace(fault, where=f"{source.place(tuple(key.split('.')))}: {fault.where}") if about_key else fault)
    return type(error)(*faults)


def load_config(path: Path, schema: type[Config], overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides`, and validate."""
    source = read_yaml(path)
    apply_overrides(source, overrides)
    return build(schema, source)


def _fault(schema: type[BaseModel], source: ConfigSource, detail: ErrorDetails) -> Fault:
    context = detail.get("ctx", {})
    # A validator's key may name a key below another; a name may hold dots itself.
    below = [part for part in str(context.get("key", "")).split(".", 1) if part]
    path = _written_path((*detail["loc"], *below), source.values)
    where = f"{source.place(path)}: {dotted(path)}" if path else source.name
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        allowed = _fields_at(schema, path[:-1])
        near = difflib.get_close_matches(str(path[-1]), allowed, n=1, cutoff=0.5)
        cure = f"did you mean {near[0]!r}? " if near else ""
        return Fault(where, "unknown key", f"{cure}allowed here: {', '.join(sorted(allowed))}")
    if detail["type"] == "missing":
        return Fault(where, "missing", f"add the key {path[-1]!r}")
    given = detail.get("input")
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        inner = _keys_at(schema, path) or _fields_at(schema, path)
        return Fault(where, f"needs keys below it, not the value {given!r}", f"keys: {', '.join(sorted(inner))}")
    if detail["type"] == "invalid_key":
        return Fault(f"{source.name}: {path[-1]!r}", "is no key: keys are words", "write it as a word, or remove it")
    if detail["type"] not in ("value_error", "rule") and not isinstance(given, dict):
        message += f" (given: {given!r})"
    near = difflib.get_close_matches(str(given), re.findall(r"'([^']+)'", str(context.get("expected", ""))), n=1)
    return Fault(where, message, f"did you mean {near[0]!r}?" if near else "")


KEY = "[key]"
"""Pydantic's word for the name of a key, as against its value."""


def _written_path(location: tuple[int | str, ...], values: Any) -> KeyPath:
    """Pydantic's location without the parts that name union members instead of keys."""
    path: list[str | int] = []
    for part in location:
        if part == KEY:
            break
        if isinstance(values, Mapping):
            path.append(part)
            values = values.get(part, values.get(str(part)))
        elif isinstance(values, list | tuple) and isinstance(part, int):
            path.append(part)
            values = values[part] if part < len(values) else None
        elif values is None:
            path.append(part)
    return tuple(path)


def _fields_at(schema: type[BaseModel], path: KeyPath) -> list[str]:
    """Names of the fields allowed at `path`."""
    for part in path:
        inner = schema.model_fields.get(str(part))
        nested = _models_in(inner.annotation) if inner else [schema]
        schema = nested[0] if nested else schema
    return list(schema.model_fields)


def _keys_at(schema: type[BaseModel], path: KeyPath) -> list[str]:
    """Names of the keys allowed in the mapping at `path`, where they are a closed list."""
    field = schema.model_fields.get(str(path[0])) if len(path) == 1 else None
    if field is None or typing.get_origin(field.annotation) is not dict:
        return []
    return [str(name) for name in typing.get_args(typing.get_args(field.annotation)[0])]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, dict, tuple, list, Mapping):
        return [model for argument in typing.get_args(annotation) for model in _models_in(argument)]
    return []


def dotted(path: KeyPath) -> str:
    """a.b[2].c"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _similar_files(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    near = difflib.get_close_matches(path.name, [file.name for file in folder.glob("*.y*ml")], n=1, cutoff=0.5)
    return f"did you mean {folder / near[0]}?" if near else "check the path"
