"""Runs as another tracker kept them, and how a name is looked up among what they hold.

Owns `ForeignRun` and `Source`, which every reader of `analysis.import_*` returns; names are dotted ("config.model.d_model") and keep the
part of the source that they come from as their first word, so that a short name ("d_model") finds them and two parts can disagree.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scaling.errors import Fault

Curve = Sequence[tuple[float, float]]
"""(step, value) of one metric, in the order of steps."""
State = Literal["finished", "diverged", "crashed", "unfinished", "unsaid", "unknown"]
WORDS: Mapping[State, tuple[str, ...]] = {
    "finished": ("finished", "complete", "completed", "done", "success", "succeeded", "ok"),
    "diverged": ("diverged", "nan", "inf", "exploded"),
    "crashed": ("crashed", "failed", "failure", "killed", "error", "preempted", "cancelled", "canceled", "timeout", "oom"),
    "unfinished": ("running", "pending", "scheduled", "queued", "preempting", "suspended", "starting", "pruned", "stopped"),
    "unsaid": ("", "none", "null", "unknown"),
}
MISSING_WORDS = ("", "none", "null", "n/a")


@dataclass(frozen=True)
class ForeignRun:
    """One run. config, metrics and info are flat: dotted name -> what the source holds; metrics are final values.

    state: the source's word for how the run ended, None where it has none. info: names, tags, hosts; never guessed at and never compared.
    curve: the metric of a dotted name over the steps, None where the source keeps final values alone.
    """

    run_id: str
    config: Mapping[str, object]
    metrics: Mapping[str, object]
    state: str | None = None
    name: str = ""
    info: Mapping[str, object] = field(default_factory=dict)
    curve: Callable[[str], Curve] | None = None

    def __str__(self) -> str:
        return self.run_id if self.name in ("", self.run_id) else f"{self.name} ({self.run_id})"

    def get(self, name: str) -> object | None:
        """What the run holds under a dotted name, or None; a word for "missing" is None."""
        for part in (self.config, self.metrics, self.info):
            value = part.get(name)
            if value is not None and not (isinstance(value, str) and value.strip().lower() in MISSING_WORDS):
                return value
        return None


@dataclass(frozen=True)
class Source:
    """Everything that one place holds. kind: what it is, in words; unreadable: (what, why) of runs that could not be read at all."""

    where: str
    kind: str
    runs: tuple[ForeignRun, ...]
    unreadable: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def names(self, *parts: str) -> list[str]:
        """Dotted names that any run has in `parts` (config, metrics, info; default all), in the order of their first appearance."""
        found: dict[str, None] = {}
        for run in self.runs:
            for part in parts or ("config", "metrics", "info"):
                found |= dict.fromkeys(getattr(run, part))
        return list(found)


def state_of(word: str | None) -> State:
    """What a tracker's word for a run's end means; "unknown" is a word that no tracker here uses."""
    text = (word or "").strip().lower()
    return next((state for state, words in WORDS.items() if text in words), "unknown")


def flatten(values: Mapping[str, object], prefix: str) -> dict[str, object]:
    """{"model": {"width": 64}} -> {"config.model.width": 64} under the prefix "config."; lists stay as they are."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten({str(inner): item for inner, item in value.items()}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number(value: object) -> float:
    """A finite or infinite number, NaN included, from a number or its text. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    text = value.strip().lower() if isinstance(value, str) else value
    if text in WORDS["diverged"]:
        return math.nan if text != "inf" else math.inf
    try:
        return float(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a number") from None


def same(one: object, other: object) -> bool:
    """Whether two values say the same: a number and its text, a word in large and small letters."""
    try:
        first, second = number(one), number(other)
    except ValueError:
        return str(one).strip().lower() == str(other).strip().lower()
    return first == second or (math.isnan(first) and math.isnan(second)) or math.isclose(first, second, rel_tol=1e-9)


def lookup(name: str, names: Iterable[str]) -> list[str]:
    """Dotted names that `name` may stand for: itself; or the same key in any part; or, of the nested keys, those that end with it."""
    present = list(names)
    if name in present:
        return [name]
    inside = [full for full in present if full.partition(".")[2] == name]
    return inside or [full for full in present if full.endswith(f".{name}")]


def unknown_name(where: str, name: str, names: Sequence[str]) -> Fault:
    """The fault of a name that no run has, with those that look like it."""
    by_word = {full.lower(): full for full in names} | {full.lower().partition(".")[2] or full.lower(): full for full in names}
    near = [by_word[key] for key in difflib.get_close_matches(name.lower(), by_word, n=3, cutoff=0.5)]
    near += [full for full in names if name.lower() in full.lower()]
    shown = list(dict.fromkeys(near))[:5]
    if not shown:
        return Fault(where, f"no run has {name!r}", f"there are: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}")
    return Fault(where, f"no run has {name!r}", f"nearest: {', '.join(shown)}")
