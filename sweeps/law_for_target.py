"""The scaling law that a recommendation splits a budget or predicts a loss by: fitted to the runs at the template's batch.

Owns `law_of_table` and `kind_in`. Kept apart from `fit`'s own command, whose options `recommend` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaling.errors import ConfigError, DataError, Fault

if TYPE_CHECKING:
    import pandas as pd

    from analysis.fit_result import ScalingLawFit
    from scaling.config import RunConfig


def law_of_table(
    table: Path, law: str, columns: Sequence[str], template: RunConfig, runs: pd.DataFrame, params_include: str | None
) -> ScalingLawFit:
    """A law of the final loss, fitted to the table's runs of the template's parametrization and, where batches differ, at its batch.

    runs: the table as it was judged. Raises ConfigError for a law that is not of the loss, DataError for a table that gives none.
    """
    from analysis.fit import fit
    from analysis.fit_search import OTHER_LAWS
    from analysis.fit_table import KNOWN

    if law in OTHER_LAWS:
        raise ConfigError(Fault(f"--law {law}", "is no law of the final loss over sizes", "auto, chinchilla, kaplan, ..."))
    pairs = dict(text.split("=", 1) for text in columns)
    # No law reads the batch: one fitted over several would be of a mixture.
    several = runs["batch_tokens"].nunique() > 1
    where = [f"{pairs.get('batch_tokens', 'batch_tokens')}={template.batch_tokens}"] if several else []
    read = {name: actual for name, actual in pairs.items() if name in KNOWN}
    kind = kind_in(table, template.parametrization.kind, pairs)
    return fit(table, law, columns=read, where=where, parametrization=kind, params_include=params_include)


def kind_in(table: Path, kind: str, pairs: Mapping[str, str] | None = None) -> str | None:
    """How `table` spells the parametrization `kind`; None where it has no such column, so that all its rows are taken.

    Raises DataError where the column names others alone.
    """
    from analysis.table import SPELLINGS, read_frame

    frame, place = read_frame(table, None, [])
    column = (pairs or {}).get("parametrization", "parametrization")
    if column not in frame:
        return None
    there = sorted({str(name) for name in frame[column].dropna()})
    for name in there:
        if SPELLINGS.get(name.strip().lower(), name.strip()) == kind:
            return name
    what = f"has runs under {', '.join(there) or 'nothing'}, and the recommendation is made under {kind}"
    raise DataError(Fault(f"{place}: column {column!r}", what, "give a table that has runs of it"))
