"""A study of seconds for the tests: synthetic data, one core a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

SMALL: dict[str, Any] = {
    "name": "small",
    "widths": [16, 32],
    "log2_lr": {"low": -8, "high": -6, "step": 1},
    "follow_up": {"margin_points": 0},
    "parametrizations": {"mup": {}, "sp": {}},
    "model": {"depth": 1, "head_dim": 8, "context": 16},
    "base": {"width": 16},
    "data": {"source": "zipf-markov", "synthetic_tokens": 40_000, "synthetic_vocab": 32},
    "training": {"steps": 8, "batch_size": 4, "validation_sequences": 8},
}


def write_study(folder: Path, **changes: Any) -> Path:
    """A YAML file with SMALL and `changes` of its top-level keys."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return path
