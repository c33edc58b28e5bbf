"""The face that fits of other laws than the loss' share with `ScalingLawFit`: parameters with intervals, flags, text, HTML,
JSON.

Owns `LawFit`, which critical batch sizes, laws of the best LR and batch, and loss curves under LR schedules build on, and the
option checks of these laws. Intervals are at `level`; an uncertainty that cannot be known is NaN, an end that the data do not
set is infinite.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.fit_result import Estimate, Estimated
from analysis.fit_search import Starts
from analysis.results import html_table, json_safe, text_table
from analysis.table import nearest
from scaling.errors import DataError, Fault, raise_all

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows, as they are printed."""


@dataclass(frozen=True, eq=False)
class LawFit(Estimated):
    """A fitted law. params: its numbers by name; objective: what was minimized; success: a minimum was reached; flags: what
    casts doubt.
    """

    law: str
    formula: str
    source: str
    level: float
    params: Mapping[str, Estimate]
    objective: float
    starts: Starts
    success: bool
    flags: tuple[str, ...]
    notes: tuple[str, ...]

    def details(self) -> dict[str, Any]:
        """Further keys of the JSON document."""
        return {}

    def tables(self) -> list[Table]:
        """What is printed above the verdict."""
        return [self.parameter_table()]

    def sentences(self) -> list[str]:
        """What is printed below the tables."""
        return []

    def parameter_table(self) -> Table:
        head = ["parameter", "value", "stderr", f"{100 * self.level:g} % interval"]
        return head, [[name, *estimate.cells()] for name, estimate in self.params.items()]

    def to_dict(self) -> dict[str, Any]:
        """The document of `mutransfer fit --json`, without predictions; intervals at `level`."""
        return {
            "law": self.law,
            "formula": self.formula,
            "source": self.source,
            "level": self.level,
            "params": {name: estimate.to_dict() for name, estimate in self.params.items()},
            "objective": self.objective,
            "starts": vars(self.starts),
            "success": self.success,
            "trusted": self.trusted,
            "flags": list(self.flags),
            "notes": list(self.notes),
            **self.details(),
        }

    def _verdict(self) -> list[str]:
        word = "trusted" if self.trusted else "not to be trusted" if self.success else "no minimum was reached"
        return [word, *(f"  ! {flag}" for flag in self.flags), *(f"table: {note}" for note in self.notes)]

    def _head(self) -> str:
        return f"{self.law}: {self.formula}   ({self.source})"

    def __str__(self) -> str:
        return "\n".join([self._head(), *(text_table(*table) for table in self.tables()), *self.sentences(), *self._verdict()])

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in (*self.sentences(), *self._verdict()))
        return f"<div><p>{html.escape(self._head())}</p>{''.join(html_table(*table) for table in self.tables())}{lines}</div>"

    def save(self, path: Path | str) -> None:
        """The JSON document, with the numbers to predict again by hand; `load_fit` does not read it."""
        from scaling.records import write_atomic

        write_atomic(Path(path), json.dumps(json_safe(self.to_dict()), indent=1, allow_nan=False) + "\n")


def checked_options(law: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises DataError for options that the law does not have, with the nearest that it has."""
    faults = [
        Fault(f"law {law}: option {name!r}", "is not known", f"{nearest(name, known)} (it knows {', '.join(known)})")
        for name in given
        if name not in known
    ]
    raise_all(faults, DataError)


def checked_sizes(law: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises DataError where a prediction's sizes are not exactly `known`, or not positive."""
    faults = [
        Fault(f"prediction: {name}", f"the law {law} does not read it", "leave it out") for name in given if name not in known
    ]
    faults += [Fault(f"prediction: {name}", "is missing", f"give {name}=NUMBER") for name in known if name not in given]
    faults += [
        Fault(f"prediction: {name}", f"{value!r} is not a number above 0", f"for example {name}=1e9")
        for name, value in given.items()
        if name in known and not (isinstance(value, (int, float)) and 0 < value < float("inf"))
    ]
    raise_all(faults, DataError)
