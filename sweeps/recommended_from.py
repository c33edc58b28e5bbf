"""Whether a recommended config still says what its study says: what it was derived from, and a check before it is used.

Owns `origin` and `check_origin`. A recommendation that is older than its runs is refused, since a large run is paid for once.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from scaling.config import Recommended, RunConfig, content_hash
from scaling.errors import ConfigError, Fault, program
from scaling.records import read_records


def origin(source: Path, folder: Path) -> Recommended:
    """What a config in `folder` was derived from: a study's directory or a table of runs."""
    runs, fingerprint = _fingerprint(source)
    # Resolved: through a symlinked folder of another depth, ".." leads elsewhere.
    return Recommended(source=os.path.relpath(source.resolve(), folder.resolve()), runs=runs, fingerprint=fingerprint)


def _fingerprint(source: Path) -> tuple[int, str]:
    """How many runs, and a hash of which and with which losses. Of a table: its rows, and the hash of its bytes."""
    if source.is_dir():
        found = sorted((record.run_id, record.status, record.loss) for record in read_records(source))
        return len(found), f"runs {content_hash(found)}"
    from analysis.table import read_frame

    content = source.read_bytes()
    # A word in front: YAML reads digits with an e among them as a number.
    return max(len(read_frame(source, None, [])[0]), 1), f"bytes {hashlib.sha256(content).hexdigest()[:12]}"


def check_origin(run: RunConfig, path: Path) -> str:
    """Raise ConfigError where the runs that the config at `path` was derived from have changed; a note where that cannot be seen."""
    if run.recommended is None:
        return ""
    was = run.recommended
    source = path.resolve().parent / was.source
    there = (source / "runs").is_dir() if source.is_dir() else source.is_file()
    if not there:
        return f"{path}: not checked against the runs that it was recommended from: {source} is not here"
    runs, fingerprint = _fingerprint(source)
    if fingerprint == was.fingerprint:
        return ""
    what = f"was recommended from {was.runs} runs of {os.path.normpath(source)}, which holds {runs} now, or others"
    again = f"{program()} recommend {os.path.normpath(source)} --target TARGET.yaml --out {path}"
    raise ConfigError(Fault(f"{path}: recommended", what, f"{again}; to use it all the same: --set recommended=null"))
