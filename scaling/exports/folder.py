"""The folder of an export: what stands there, and what a further export may write over. Torch-free.

export.json names the engine, the run and, for each file, the SHA-256 of what the export itself wrote. An export writes over a file only
where it stands as an export left it. Files that the user is told to replace are kept as they stand, and so are the patterns of plan.json,
beside the new run's numbers; everything else that differs is refused by name, and no file is removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scaling.config_base import Frozen
from scaling.errors import ConfigError, Fault, raise_all
from scaling.exports.plan import PLAN, plan_text
from scaling.records import write_atomic

MANIFEST = "export.json"
CURE = "move it away, or export to another --out"


class Manifest(Frozen):
    """What an export wrote."""

    schema_version: int = 1
    engine: str
    run_id: str
    files: dict[str, str]
    """Name -> SHA-256 of the export's own text, also of a file that was kept as the user's."""
    patterns: tuple[str, ...] = ()
    """The rows' patterns in plan.json, as the export itself has them."""


@dataclass(frozen=True)
class Made:
    """An export that is to be written. replaceable: files that a user is told to put their own in place of."""

    engine: str
    run_id: str
    files: Mapping[str, str]
    replaceable: Sequence[str] = ()

    def manifest(self) -> Manifest:
        hashes = {name: _hash(text.encode()) for name, text in self.files.items()}
        patterns = _patterns(self.files[PLAN]) if PLAN in self.files else ()
        return Manifest(engine=self.engine, run_id=self.run_id, files=hashes, patterns=patterns)


def put(folder: Path, made: Made) -> dict[str, str]:
    """Write the files and the manifest; return what was kept of the user's: file name -> how.

    Raises ConfigError, with nothing written, for all that stands in the way.
    """
    before = _read_manifest(folder)
    faults = _of_another_export(folder, made, before)
    texts, kept = dict(made.files), {}
    for name, text in made.files.items() if not faults else ():
        standing = _standing(folder / name)
        if standing is None or standing == text.encode() or (before and _hash(standing) == before.files.get(name)):
            continue
        if before and name in before.files and name in made.replaceable:
            del texts[name]
            kept[name] = "as it stands; without it, the export's is written"
        elif before and name == PLAN and (own := _with_own_patterns(standing, before, made)):
            texts[name] = own
            kept[name] = "your patterns, with this run's numbers"
        else:
            faults.append(Fault(str(folder / name), _why(name, before), CURE))
    raise_all(faults)
    for name, text in texts.items():
        write_atomic(folder / name, text)
    # Last: cut short, the same command finds each file as it was or as it will be.
    write_atomic(folder / MANIFEST, made.manifest().model_dump_json(indent=1) + "\n")
    return kept


def _why(name: str, before: Manifest | None) -> str:
    if before is None or name not in before.files:
        return "stands there, differs from what would be written, and no export says that it wrote it"
    beyond = " beyond its patterns, or for other tensors than this run's" if name == PLAN else ""
    return f"was changed after it was exported{beyond}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _standing(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _read_manifest(folder: Path) -> Manifest | None:
    content = _standing(folder / MANIFEST)
    if content is None:
        return None
    try:
        return Manifest.model_validate_json(content)
    except ValidationError:
        raise ConfigError(Fault(str(folder / MANIFEST), "is not what an export writes", "export to another --out")) from None


def _of_another_export(folder: Path, made: Made, before: Manifest | None) -> list[Fault]:
    """Faults where the folder has another engine's export, or files of one that this one would leave beside its own."""
    if before is None:
        return []
    if before.engine != made.engine:
        what = f"holds an export for {before.engine}, and its files would stand beside those for {made.engine}"
        return [Fault(f"--out {folder}", what, "export to another --out")]
    left = sorted(name for name in before.files if name not in made.files and (folder / name).exists())
    what = f"is of the {before.engine} export that stands there, and this one has no such file"
    return [Fault(str(folder / name), what, CURE) for name in left]


def _patterns(plan: str) -> tuple[str, ...]:
    return tuple(row["pattern"] for row in json.loads(plan)["tensors"])


def _with_own_patterns(standing: bytes, before: Manifest, made: Made) -> str | None:
    """The new plan with the user's patterns; None where more than patterns was changed, or the rows are not those of before."""
    if _patterns(made.files[PLAN]) != before.patterns:
        return None
    try:
        theirs = json.loads(standing)
        own = [row["pattern"] for row in theirs["tensors"]]
        restored = plan_text(_with_patterns(theirs, before.patterns))
    except (ValueError, TypeError, KeyError):
        return None
    if _hash(restored.encode()) != before.files[PLAN]:
        return None
    return plan_text(_with_patterns(json.loads(made.files[PLAN]), own))


def _with_patterns(plan: dict[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """Raises ValueError where the numbers of rows differ."""
    rows = [row | {"pattern": pattern} for row, pattern in zip(plan["tensors"], patterns, strict=True)]
    return plan | {"tensors": rows}
