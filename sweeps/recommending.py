"""From a study or a table to the config of the large run: what the recommendation starts from, and the file that it is written to.

Owns `recommendation_of`, `template_of`, `target_file`, `check_recommended` and `write_recommended`. The derivation itself is
`analysis.recommend`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaling.errors import ConfigError, Fault

if TYPE_CHECKING:
    from analysis.axes import AxisFit
    from analysis.batch_choice import BatchChoice
    from analysis.budget_shape import BudgetShape
    from analysis.fit_result import ScalingLawFit
    from analysis.recommend import Recommendation
    from analysis.target import TargetConfig
    from analysis.transfer import TransferFit
    from scaling.config import RunConfig
    from sweeps.study_dir import Study

Place = Callable[[str], str]
Axes = Mapping[str, Mapping[str, "AxisFit"]]


def target_file(study: Study | None, given: Path | None) -> Path | None:
    """The file that describes the large run: the one that is given, or the study's own."""
    named = study.config.target if study else None
    return given or (Path(named) if named else None)


def read_target(file: Path, values: Mapping[str, Any] | None = None) -> tuple[TargetConfig, Place]:
    """The target of a file, and where its keys stand. values: keys that come from elsewhere, which the file must leave out.

    Raises ConfigError.
    """
    from analysis.target import TargetConfig
    from scaling.config_file import build, read_yaml

    source = read_yaml(file)
    stated = [key for key in values or {} if key in source.values]
    if stated:
        cure = "leave it out of the file, or leave the budget out"
        raise ConfigError(*(Fault(f"{source.place((key,))}: {key}", "is what the budget decides", cure) for key in stated))
    source.values.update(values or {})
    return build(TargetConfig, source), lambda key: f"{source.place((key,))}: {key}"


def recommendation_of(
    template: RunConfig,
    fits: Mapping[str, TransferFit],
    target: TargetConfig,
    place: Place,
    axes: Axes,
    batch: BatchChoice | None = None,
    budget: BudgetShape | None = None,
    law: ScalingLawFit | None = None,
) -> Recommendation:
    """The recommendation for a target. Raises ConfigError where the study cannot speak about it."""
    from analysis.recommend import Quantity, recommend
    from analysis.report import preferred

    fit = preferred(fits)
    losses = {optimum.width: Quantity(optimum.best_loss, optimum.best_loss_interval) for optimum in fit.optima}
    chosen = [found[fit.parametrization] for found in axes.values() if fit.parametrization in found]
    return recommend(template, fit, target, losses, chosen, batch, budget, law, place)


def template_of(study: Study, fits: Mapping[str, TransferFit]) -> RunConfig:
    """A run of the study in the parametrization that the recommendation starts from."""
    from analysis.report import preferred

    preference = preferred(fits).parametrization
    return study.config.template(next(kind for kind in study.config.parametrizations if kind == preference))


def template_of_table(path: Path, run: Path | None, fits: Mapping[str, TransferFit]) -> RunConfig:
    """What a table of runs leaves out (base shape, schedule, betas), from the config of one of its runs.

    Raises ConfigError where the config contradicts the table.
    """
    from analysis.report import preferred
    from sweeps.cli_run import load_run

    if run is None:
        cure = "give the config of one of them: --run configs/models/base.yaml"
        raise ConfigError(Fault(str(path), "a table does not say what its runs have in common", cure))
    template, fit, cure = load_run(run, ()), preferred(fits), "give the config of a run of the table"
    kind, faults = template.parametrization.kind, []
    if fit.parametrization not in (kind, "unknown"):
        what = f"is a run under {kind}, and the table's fit is of {fit.parametrization}"
        faults.append(Fault(f"{run}: parametrization.kind", what, cure))
    stated = {"model.depth": template.model.depth, "training: tokens": template.tokens, "training: batch": template.batch_tokens}
    for (key, value), column in zip(stated.items(), ("depth", "tokens", "batch_tokens"), strict=True):
        measured = {item.cell.size(column) for item in fit.optima} - {float("nan")}
        if not any(size != size or size == value for size in measured):
            faults.append(Fault(f"{run}: {key}", f"is {value}, and the table's {column} is {sorted(measured)[0]:.12g}", cure))
    if faults:
        raise ConfigError(*faults)
    return template


def sizes_of(run: Path) -> dict[str, float]:
    """Depth, batch and tokens of a run's config: the levels at which a table with several is judged."""
    from sweeps.cli_run import load_run

    config = load_run(run, ())
    return {"depth": config.model.depth, "batch_tokens": config.batch_tokens, "tokens": config.tokens}


HEAD = "# The large run, as recommended."


def check_recommended(out: Path | None) -> None:
    """Raise ConfigError where `out` is a folder, or a file that `recommend` did not write: a study's, a table, a target."""
    from sweeps.outputs import check_out

    check_out(out, lambda text: text.startswith(HEAD), "recommended config")


def write_recommended(path: Path, recommendation: Recommendation, source: Path) -> None:
    """The large run as a RunConfig: `mutransfer explain` and `train` take it as it is. source: the study's directory, or the table."""
    import yaml

    from scaling.records import write_atomic
    from sweeps.recommended_from import origin

    head = f"{HEAD} The optimizer's values are those at the base shape; `mutransfer explain` on this file\n"
    head += "# prints what they become for each tensor. Derivation: recommendation.json, or `mutransfer recommend`.\n"
    run = recommendation.run.model_copy(update={"recommended": origin(source, path.parent)})
    write_atomic(path, head + yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))


def measured_batch(source: Path, law: str | None, template: RunConfig, target: TargetConfig) -> BatchChoice:
    """What a run's noise scale, or a law of a table, says of the target's batch. Raises ConfigError or DataError."""
    from analysis.batch_choice import of_noise_scale
    from scaling.config_file import load_config

    context = target.context or template.model.context
    run_directory = (source / "config.yaml").is_file() and (source / "metrics.jsonl").exists()
    laws = ("critical-batch", "lr-batch")
    if not source.exists():
        raise ConfigError(Fault(f"--batch-from {source}", "no such file or directory", "a run's directory, a study or a table"))
    if run_directory:
        from analysis.noise_scale import noise_scale, read_norms
        from scaling.config import RunConfig

        if law is not None:
            raise ConfigError(Fault(f"--batch-law {law}", f"{source} is one run, whose noise scale is read", "leave it out"))
        run = load_config(source / "config.yaml", RunConfig)
        norms = read_norms(source)
        # The last quarter: the noise scale grows along a run, and the large run is to be right at its end.
        last = norms.between(0.75 * run.training.steps, run.training.steps)
        return of_noise_scale(noise_scale(last), run.model.context, str(source))
    if law not in laws:
        given = "is not given, and a table has several" if law is None else "is none of them"
        raise ConfigError(Fault(f"--batch-law {law or ''}".strip(), given, f"one of {', '.join(laws)}"))
    return _batch_by_law(source, law, template, target, context)


def _batch_by_law(source: Path, law: str, template: RunConfig, target: TargetConfig, context: int) -> BatchChoice:
    from analysis.batch_choice import of_critical_batch, of_lr_batch
    from analysis.fit import fit
    from scaling.accounting import parameter_counts
    from sweeps.law_for_target import kind_in

    shape = {"width": target.width, "depth": target.depth or template.model.depth, "context": context}
    shape |= {"vocab_size": target.vocab_size} if target.vocab_size else {}
    params = float(parameter_counts(template.model.model_copy(update=shape)).total)
    sizes = {"params": params, "tokens": float(target.tokens), "flops": 6.0 * params * target.tokens}
    if law == "critical-batch":
        critical = fit(source, "critical-batch")
        return of_critical_batch(critical.predict(**{name: sizes[name] for name in critical.regressors}), context, str(source))
    best = fit(source, "lr-batch", parametrization=kind_in(source, template.parametrization.kind))
    return of_lr_batch(best.predict(**{name: sizes[name] for name in best.line.regressors}), str(source))
