"""`mutransfer fit`: a scaling law fitted to a table of runs, with predictions, a compute-optimal split and what casts doubt on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaling.errors import ConfigError, Fault, raise_all
from sweeps.cli_common import NOT_OK, OK, answer
from sweeps.cli_fit_other import OTHER_LAWS, answer_other, unread_faults
from sweeps.cli_isoflop import answer_isoflop, isoflop_faults

if TYPE_CHECKING:
    from analysis.fit_result import Draws, Prediction, ScalingLawFit, Split

BOOTSTRAPS = ("pairs", "residuals", "groups", "wild")
PLOTS = (".png", ".svg", ".pdf")


def register(app: typer.Typer) -> None:
    app.command("fit")(fit_command)


def fit_command(
    table: Annotated[Path, typer.Argument(help="A study directory, or a CSV/Parquet table of runs.", show_default=False)],
    law: Annotated[
        str, typer.Option(help="The law's name, or auto: the one that predicts the largest runs best.")
    ] = "chinchilla",
    loss: Annotated[
        str, typer.Option(help="huber-log, l1-log, least-squares-log, least-squares or huber (of raw losses).")
    ] = "huber-log",
    delta: Annotated[float, typer.Option(help="Where Huber's square turns into a line: log loss, or nats for huber.")] = 1e-3,
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="Name of a column: --column params=N.", show_default=False)
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only rows that meet this: --where 'loss<4', --where dataset=c4.", show_default=False),
    ] = None,
    loss_unit: Annotated[str, typer.Option(help="nats or bits, per token.")] = "nats",
    parametrization: Annotated[str | None, typer.Option(help="Only runs of this one.", show_default=False)] = None,
    params_include: Annotated[
        str | None, typer.Option(help="What params count: embedding or non-embedding.", show_default=False)
    ] = None,
    all_lrs: Annotated[bool, typer.Option("--all-lrs", help="Keep every LR of a size, not the best alone.")] = False,
    predict: Annotated[
        list[str] | None,
        typer.Option(help="Predict the loss there: --predict params=7e10,tokens=1.4e12.", show_default=False),
    ] = None,
    optimal: Annotated[
        list[float] | None, typer.Option(help="Split this many FLOP (6 N D) into parameters and tokens.", show_default=False)
    ] = None,
    bootstrap: Annotated[
        str | None,
        typer.Option(
            help="Also refit resampled tables: pairs, residuals, groups, wild, groups:params, wild:params; pairs:400 sets how many.",
            show_default=False,
        ),
    ] = None,
    leave_out: Annotated[
        str | None,
        typer.Option(help="Also predict each level of this size from the others: params, tokens or flops.", show_default=False),
    ] = None,
    isoflop: Annotated[
        bool, typer.Option("--isoflop", help="The best size of each compute budget, and approaches 1, 2 and 3 side by side.")
    ] = False,
    method: Annotated[
        str | None, typer.Option(help="Of an IsoFLOP curve: spline (default), parabola or cubic.", show_default=False)
    ] = None,
    window: Annotated[
        float | None, typer.Option(help="Factor of the best size within which the curve is fitted; inf.", show_default=False)
    ] = None,
    near_sizes: Annotated[
        int | None, typer.Option("--points", help="Or that many sizes about the best.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Share of FLOP by which runs of one budget may differ (0.05).", show_default=False)
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option", help="Of the laws critical-batch, lr-batch, multi-power: --option definition=256.", show_default=False
        ),
    ] = None,
    level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.9,
    save: Annotated[Path | None, typer.Option(help="Write the fit here, for analysis.fit.load_fit.", show_default=False)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw runs, law, residuals and profiles, or IsoFLOP curves: FILE.png, .svg or .pdf.", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Fit a scaling law: parameters, predictions and the compute-optimal split with intervals, and whether to trust them."""
    faults: list[Fault] = []
    mapping = dict(_pair("--column", text, "params=N", faults) for text in columns or ())
    other_law = law in OTHER_LAWS
    points = [_point(text, faults) for text in predict or () if not other_law]
    drawn = _bootstrap(bootstrap, faults)
    if other_law:
        faults += unread_faults(
            law, {"--optimal": optimal, "--bootstrap": bootstrap, "--leave-out": leave_out, "--isoflop": isoflop, "--plot": plot}
        )
    elif options:
        faults.append(Fault("--option", f"does not apply to the law {law}", f"it is for {', '.join(OTHER_LAWS)}"))
    own = {"--method": method, "--window": window, "--points": near_sizes, "--tolerance": tolerance}
    others = {"--predict": predict, "--bootstrap": bootstrap, "--leave-out": leave_out, "--save": save}
    faults += isoflop_faults(isoflop, own, others)
    _plot_faults(plot, faults)
    raise_all(faults, ConfigError)
    from analysis.fit import fit
    from sweeps.outputs import check_out

    check_out(save, lambda head: head.lstrip().startswith("{"), "fit", "--save", ".json")
    reading: dict[str, Any] = {
        "where": where or (),
        "loss_unit": loss_unit,
        "all_lrs": all_lrs,
        "parametrization": parametrization,
        "params_include": params_include,
    }
    if other_law:
        fitting = {"loss": loss, "delta": delta, "level": level, "columns": mapping, **reading}
        return answer_other(table, law, fitting, options or (), predict or (), save, json)
    if isoflop:
        fitting = {"law": law, "loss": loss, "delta": delta, "level": level}
        return answer_isoflop(table, optimal or (), fitting, own, {"columns": mapping, **reading}, plot, json)
    result = fit(table, law, loss, delta, columns=mapping, level=level, **reading)
    predictions = [result.predict(**point)[0] for point in points]
    splits = [result.optimal(flops) for flops in optimal or ()]
    draws = result.bootstrap(drawn[0], drawn[1], by=drawn[2]) if drawn else None
    left_out = result.leave_out(leave_out) if leave_out is not None else None
    if save is not None:
        result.save(save)
    if plot is not None:
        from analysis.fit_plots import figure_fit

        figure_fit(result).savefig(plot, dpi=150)
    document = _document(result, predictions, splits, draws)
    if left_out is not None:
        document["left_out"] = left_out.to_dict()
    more = [*(_draws_text(draws) if draws else []), *([str(left_out)] if left_out else [])]
    answer(document, lambda: "\n".join([str(result), *map(str, [*predictions, *splits]), *more]), json)
    return OK if document["trusted"] else NOT_OK


def _document(
    result: ScalingLawFit, predictions: Sequence[Prediction], splits: Sequence[Split], draws: Draws | None
) -> dict[str, Any]:
    """The fit's own document with what was asked of it; trusted only where everything in it is."""
    document = result.to_dict()
    document["predictions"] = [prediction.to_dict() for prediction in predictions]
    document["optimal"] = [split.to_dict() for split in splits]
    flags = [flag for point in predictions for flag in point.flags] + [flag for split in splits for flag in split.flags]
    document["trusted"] = document["trusted"] and not flags
    document["flags"] += flags
    if draws is not None:
        intervals = {name: list(interval) for name, interval in draws.intervals.items()}
        document["bootstrap"] = {"kind": draws.kind, "draws": len(draws.values), "failed": draws.failed}
        document["bootstrap"] |= {"stderr": draws.stderr, "intervals": intervals}
    return document


def _draws_text(draws: Draws) -> list[str]:
    from analysis.results import text_table

    head = [f"bootstrap of {draws.kind}", "stderr", f"{100 * draws.level:g} % of refits"]
    rows = [[name, f"{draws.stderr[name]:.4g}", f"[{low:.5g}, {high:.5g}]"] for name, (low, high) in draws.intervals.items()]
    return [text_table(head, rows), f"{len(draws.values)} refits converged, {draws.failed} did not"]


def _pair(option: str, text: str, example: str, faults: list[Fault]) -> tuple[str, str]:
    name, separator, value = (part.strip() for part in text.partition("="))
    if not separator or not name or not value:
        faults.append(Fault(f"{option} {text}", "is not of the form NAME=VALUE", f"for example {option} {example}"))
    return name, value


def _point(text: str, faults: list[Fault]) -> dict[str, float]:
    """{"params": 7e10, "tokens": 1.4e12} from "params=7e10,tokens=1.4e12"."""
    point: dict[str, float] = {}
    for part in text.split(","):
        name, value = _pair("--predict", part, "params=7e10,tokens=1.4e12", faults)
        if name in point:
            faults.append(Fault(f"--predict {text}", f"{name!r} is given twice", "leave one out"))
        try:
            point[name] = float(value)
        except ValueError:
            if value:
                faults.append(Fault(f"--predict {text}", f"{value!r} is not a number", "for example params=7e10"))
    return point


def _plot_faults(plot: Path | None, faults: list[Fault]) -> None:
    """Said before the fit, not after it."""
    if plot is None:
        return
    if plot.suffix.lower() not in PLOTS:
        faults.append(Fault(f"--plot {plot}", "is no kind of figure", f"end the name in {', '.join(PLOTS)}"))
    if not plot.parent.is_dir():
        faults.append(Fault(f"--plot {plot}", f"the folder {plot.parent} does not exist", "make it, or name another"))


def _bootstrap(text: str | None, faults: list[Fault]) -> tuple[Any, int, str | None] | None:
    """(kind, draws, size to group by) from "pairs", "pairs:400" or "groups:params:400"."""
    if text is None:
        return None
    kind, *rest = text.split(":")
    draws = int(rest.pop()) if rest and rest[-1].isdigit() else 1000
    by = rest.pop() if rest and kind in ("groups", "wild") else None
    if kind not in BOOTSTRAPS or rest or draws < 2:
        cure = f"{', '.join(BOOTSTRAPS)} or groups:params, wild:params, and how many behind it, as in pairs:400"
        faults.append(Fault(f"--bootstrap {text}", "is no bootstrap", cure))
    return kind, draws, by
