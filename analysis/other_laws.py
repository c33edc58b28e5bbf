"""Laws of something else than the final loss of a run, behind the same `fit`: critical batch, best LR and batch, loss curves.

Owns `fit_other`, which hands a table to the law's own module and refuses what that law does not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.fit_search import DELTA, OTHER_LAWS, STARTS
from analysis.fit_uncertainty import LEVEL
from analysis.law_fit import LawFit
from scaling.errors import DataError, Fault, raise_all

if TYPE_CHECKING:
    import pandas as pd

LOSS = "huber-log"


def fit_other(
    table: Path | str | pd.DataFrame,
    law: str,
    loss: str = LOSS,
    delta: float = DELTA,
    *,
    columns: Mapping[str, str] | None = None,
    weights: Any = None,
    starts: int = STARTS,
    level: float = LEVEL,
    **options: Any,
) -> LawFit:
    """Fit a law of OTHER_LAWS; options: those of its module. Raises DataError with everything that does not apply to it."""
    assert law in OTHER_LAWS, law
    reading: dict[str, Any] = {"columns": columns, "where": options.pop("where", ()), "level": level}
    unread = {"weights": weights, "all_lrs": options.pop("all_lrs", False), "params_include": options.pop("params_include", None)}
    unread["starts"] = starts if starts != STARTS else None
    parametrization, loss_unit = options.pop("parametrization", None), options.pop("loss_unit", "nats")
    if law != "lr-batch":
        unread["parametrization"] = parametrization
    if law == "critical-batch":
        unread["loss_unit"] = loss_unit if loss_unit != "nats" else None
    if law == "lr-batch":
        unread["delta"] = delta if delta != DELTA else None
    if law != "critical-batch":
        unread["loss"] = loss if loss != LOSS else None
    faults = [
        Fault(f"law {law}: {name}", "does not apply to it", "leave it out")
        for name, value in unread.items()
        if value not in (None, False)
    ]
    if not 0.5 <= level < 1:
        faults.append(Fault(f"level {level:g}", "is no level of an interval", "give a number such as 0.9"))
    raise_all(faults, DataError)
    if law == "critical-batch":
        from analysis.critical_batch import fit_critical_batch

        return fit_critical_batch(table, loss, delta, **reading, **options)
    if law == "lr-batch":
        from analysis.lr_batch_law import fit_lr_batch

        return fit_lr_batch(table, parametrization=parametrization, loss_unit=loss_unit, **reading, **options)
    from analysis.schedule_law import fit_multi_power

    return fit_multi_power(table, delta, loss_unit=loss_unit, **reading, **options)
