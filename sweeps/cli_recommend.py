"""`mutransfer recommend`: the config of a large run from a study or a table, its batch from what was measured, its size from a budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaling.errors import ConfigError, Fault, raise_all
from sweeps.cli_analysis import Columns, Json, Table, Target, axes_of, exit_code, judge, study_of
from sweeps.cli_common import NOT_OK, answer

if TYPE_CHECKING:
    from analysis.budget_shape import BudgetShape
    from analysis.fit_result import ScalingLawFit
    from analysis.target import TargetConfig
    from scaling.config import RunConfig


def register(app: typer.Typer) -> None:
    app.command("recommend")(recommend_command)


def recommend_command(
    table: Table,
    target: Target = None,
    run: Annotated[
        Path | None, typer.Option(help="For a table of runs: the config of one of them, as for `train`.", show_default=False)
    ] = None,
    columns: Columns = None,
    batch_from: Annotated[
        Path | None,
        typer.Option(
            help="The batch: from a run's noise scale (its directory), or a law of a table or study.", show_default=False
        ),
    ] = None,
    batch_law: Annotated[
        str | None, typer.Option(help="With a table: critical-batch or lr-batch, as for `fit`.", show_default=False)
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="Width and tokens: the best for this many FLOP (6 N D).", show_default=False)
    ] = None,
    gpu_hours: Annotated[
        float | None, typer.Option(help="Or for these hours of the target's GPUs, all together.", show_default=False)
    ] = None,
    law: Annotated[
        str | None,
        typer.Option(
            help="The law that splits a budget (default auto), or predicts the loss of other tokens.", show_default=False
        ),
    ] = None,
    params_include: Annotated[
        str | None, typer.Option(help="With a law: what params count, embedding or non-embedding.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the large run's config here.", show_default=False)] = None,
    json: Json = False,
) -> int:
    """The config of the large run: every hyperparameter with its derivation, interval and how far it extrapolates."""
    from sweeps.law_for_target import law_of_table
    from sweeps.recommending import (
        check_recommended,
        measured_batch,
        read_target,
        recommendation_of,
        sizes_of,
        target_file,
        template_of,
        template_of_table,
        write_recommended,
    )

    asked = flops is not None or gpu_hours is not None
    raise_all(
        _faults(batch_from, batch_law, flops, gpu_hours, params_include if law is None and not asked else None), ConfigError
    )
    check_recommended(out)
    study = study_of(table)
    if study and run is not None:
        what = "is for a table of runs, and a study has the config of its own"
        raise ConfigError(Fault(f"--run {run}", what, "leave it out"))
    at = None if study or run is None else sizes_of(run)
    runs, fits = judge(table, study, columns or (), at=at)
    file = target_file(study, target)
    if file is None:
        raise ConfigError(Fault("--target", "no target is named", "give one: --target configs/targets/large.yaml"))
    template = template_of(study, fits) if study else template_of_table(table, run, fits)
    source = study.directory if study else table
    wanted_law = law or ("auto" if asked else None)
    fitted = law_of_table(source, wanted_law, columns or (), template, runs.frame, params_include) if wanted_law else None
    budget = _budget(fitted, template, file, flops, gpu_hours) if asked and fitted else None
    wanted, place = read_target(file, {"width": budget.width, "tokens": budget.tokens} if budget else None)
    batch = measured_batch(batch_from, batch_law, template, wanted) if batch_from else None
    recommendation = recommendation_of(template, fits, wanted, place, axes_of(runs, study, at=at), batch, budget, fitted)
    if out is not None:
        write_recommended(out, recommendation, source)
    notes = [*(f"table: {note}" for note in runs.notes), *(f"law: {note}" for note in (fitted.notes if fitted else ()))]
    document = recommendation.to_dict() | {"notes": list(runs.notes), "law_notes": list(fitted.notes) if fitted else []}
    answer(document, lambda: "\n".join([str(recommendation), *notes]), json)
    return exit_code(fits) if recommendation.fits and (budget is None or budget.trusted) else NOT_OK


def _faults(
    batch_from: Path | None, batch_law: str | None, flops: float | None, hours: float | None, unread: str | None
) -> list[Fault]:
    """unread: what params count, where no law is fitted."""
    faults = []
    if unread is not None:
        faults.append(
            Fault(f"--params-include {unread}", "is read by a law, and none is asked for", "--law auto, or leave it out")
        )
    if batch_law is not None and batch_from is None:
        faults.append(Fault(f"--batch-law {batch_law}", "is a law of a table, and none is given", "--batch-from TABLE"))
    if flops is not None and hours is not None:
        faults.append(Fault("--flops, --gpu-hours", "both are a budget", "give one of them"))
    for option, value in (("--flops", flops), ("--gpu-hours", hours)):
        if value is not None and not 0 < value < float("inf"):
            faults.append(Fault(f"{option} {value:g}", "is no positive number"))
    return faults


def _budget(law: ScalingLawFit, template: RunConfig, file: Path, flops: float | None, hours: float | None) -> BudgetShape:
    """The size and the tokens that a budget is best spent on, at the target's depth."""
    from analysis.budget_shape import shape_of_budget
    from sweeps.recommending import read_target

    # Any width and tokens: what the rest of the file says is wanted here.
    target, place = read_target(file, {"width": template.base.width, "tokens": template.tokens})
    how = "as given"
    if hours is not None:
        flops, how = _hours(hours, target, place)
    assert flops is not None, "one of the two is given"
    shape = {"depth": target.depth or template.model.depth, "context": target.context or template.model.context}
    model = template.model.model_copy(update=shape | ({"vocab_size": target.vocab_size} if target.vocab_size else {}))
    return shape_of_budget(law, flops, how, model, target.batch_tokens or template.batch_tokens)


def _hours(hours: float, target: TargetConfig, place: Callable[[str], str]) -> tuple[float, str]:
    """FLOP of so many hours of the target's GPUs, and where that comes from. Raises ConfigError with what the file leaves out."""
    from analysis.hardware import budget_flops
    from analysis.layout_choice import device_of

    gpus = target.gpus
    if gpus is None or gpus.mfu is None or (gpus.device is None and gpus.peak_tflops is None):
        what = "does not say what an hour of a GPU is worth"
        cure = "gpus: {count: 8, device: h100, mfu: 0.4}, the mfu as measured, or as `mutransfer layout` expects"
        raise ConfigError(Fault(place("gpus"), what, cure))
    device = device_of(gpus, place, memory_is_read=False)
    return budget_flops(hours, device, gpus.mfu), f"{hours:g} GPU-hours at {gpus.mfu:.0%} of {device.peak_flops / 1e12:g} TFLOP/s"
