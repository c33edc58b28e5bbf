"""`mutransfer fit TABLE --isoflop`: the best size of each compute budget, and the three approaches to it side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaling.errors import DataError, Fault
from sweeps.cli_common import NOT_OK, OK, answer

ONLY_WITH = ("--method", "--window", "--points", "--tolerance")
"""Options that say how an IsoFLOP curve is read."""


def isoflop_faults(isoflop: bool, own: Mapping[str, Any], others: Mapping[str, Any]) -> list[Fault]:
    """Options that do not go with --isoflop, or only with it; own, others: {option: its value, None or empty where not given}."""
    if isoflop:
        cure = "leave it out, or fit without --isoflop"
        return [Fault(name, "does not apply with --isoflop", cure) for name, value in others.items() if value]
    return [Fault(name, "says how IsoFLOP curves are read", "add --isoflop") for name, value in own.items() if value is not None]


def answer_isoflop(
    table: Path,
    budgets: Sequence[float],
    fitting: Mapping[str, Any],
    own: Mapping[str, Any],
    reading: Mapping[str, Any],
    plot: Path | None,
    json: bool,
) -> int:
    """Compare the approaches at each budget (none: the table's largest).

    own: options of ONLY_WITH; fitting: law, loss, delta, level; plot: where curves, optima and the first budget's approaches are drawn.
    """
    from analysis.approaches import compare_approaches

    options = {name.removeprefix("--"): value for name, value in own.items() if value is not None}
    found = [compare_approaches(table, flops, **options, **fitting, **reading) for flops in budgets or (None,)]
    minima = found[0].isoflop
    if plot is not None:
        if minima is None:
            cure = "raise the tolerance, or leave --plot out"
            raise DataError(Fault(f"--plot {plot}", "has nothing to draw: no budget has three sizes", cure))
        from analysis.isoflop_plots import figure_isoflop

        figure_isoflop(minima, found[0]).savefig(plot, dpi=150)
    flags = list(dict.fromkeys(flag for item in found for flag in item.flags))
    document = {
        "isoflop": None if minima is None else minima.to_dict(),
        "approaches": [item.to_dict() for item in found],
        "trusted": all(item.trusted for item in found),
        "flags": flags,
    }
    answer(document, lambda: "\n\n".join([*([str(minima)] if minima is not None else []), *map(str, found)]), json)
    return OK if document["trusted"] else NOT_OK
