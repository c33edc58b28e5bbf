"""Commands about one run: `train` and `explain`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaling.errors import ConfigError, Fault, StudyError, UserError
from scaling.torchrun import follows, started_by_torchrun, world_size
from sweeps.cli_common import DOTTED, NOT_OK, OK, answer, messages, overrides

if TYPE_CHECKING:
    from scaling.config import RunConfig
    from scaling.parametrization import TensorRule

RunPath = Annotated[
    Path, typer.Argument(help="A run's YAML file (configs/models/), or config.yaml of a run.", show_default=False)
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Override a config key: --set a.b=value.", show_default=False)]
Parallel = Annotated[
    str | None,
    typer.Option(help="Lay the run over processes: fsdp=2,tp=1; keys pp, dp, fsdp, tp, sp, zero, recompute.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def load_run(path: Path, settings: Sequence[str]) -> RunConfig:
    """A RunConfig from YAML, with the vocabulary filled in from the tokenizer when it is not given."""
    from scaling.config import RunConfig
    from scaling.config_file import apply_overrides, build, locate, read_yaml
    from scaling.data import vocabulary_size
    from scaling.data.documents import absolute
    from sweeps.recommended_from import check_origin
    from sweeps.study_dir import absolute_paths

    source = read_yaml(path)
    apply_overrides(source, settings)
    run = build(RunConfig, source)
    if note := check_origin(run, path):
        messages().print(note, markup=False, highlight=False)
    if run.recommended is not None:
        kept = run.recommended.model_copy(update={"source": absolute(run.recommended.source, path.parent)})
        run = run.model_copy(update={"recommended": kept})
    if run.model.vocab_size is None:
        try:
            vocabulary = vocabulary_size(run.data)
        except UserError as error:
            raise locate(error, source) from None
        if vocabulary is None:
            raise ConfigError(Fault(f"{path}: model.vocab_size", "is needed with data.source bin", "add it"))
        run = run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": vocabulary})})
    return run.model_copy(update={"data": absolute_paths(run.data, path.parent)})


def _crowded(run: RunConfig) -> str:
    """A note where a run's processes are more than the cores that they may use; empty otherwise."""
    processes, cores = run.runtime.processes, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    elsewhere = run.runtime.device != "cpu" or started_by_torchrun(os.environ)
    if elsewhere or cores is None or processes <= cores:
        return ""
    return f"{processes} processes share {cores} cores: starting them takes long, and steps are slower than on fewer processes"


def laid_out(run: RunConfig, parallel: str | None) -> RunConfig:
    """`run` with the layout of `--parallel` and its number of processes. Raises ConfigError with all that is wrong with the layout."""
    from scaling.parallel import parse_layout, require_layout

    given = world_size(os.environ) if started_by_torchrun(os.environ) else None
    if parallel is not None:
        layout, runtime = parse_layout(parallel), run.runtime
        processes = layout.processes if runtime.processes == 1 else runtime.processes
        run = run.model_copy(update={"runtime": runtime.model_copy(update={"parallel": layout, "processes": processes})})
    require_layout(run, given)
    return run


def register(app: typer.Typer) -> None:
    app.command("train", context_settings=DOTTED)(train_command)
    app.command("explain", context_settings=DOTTED)(explain_command)


def train_command(
    context: typer.Context,
    path: RunPath,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/RUN_ID.", show_default=False)] = None,
    parallel: Parallel = None,
    settings: Settings = None,
    json: Json = False,
) -> int:
    """Train one run. Typed again after an interruption it goes on from the last checkpoint (runtime.checkpoint_every_steps)."""
    from scaling.data import prepare
    from scaling.locks import file_lock
    from scaling.ranks import Team
    from scaling.train import Progress, train_run
    from sweeps.cli_common import follow_rank_0, stop_on_sigterm
    from sweeps.progress import loss_text

    if follows(os.environ):
        return follow_rank_0()
    stop_on_sigterm()
    run = laid_out(load_run(path, overrides(settings or [], context.args)), parallel)
    if note := _crowded(run):
        messages().print(note, markup=False, highlight=False)
    console, started = messages(), time.perf_counter()
    corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
    # The run's name says which data it was trained on.
    run = run.model_copy(update={"data": run.data.model_copy(update={"sha256": corpus.sha256})})
    console.print(f"data: {corpus.description}", markup=False, highlight=False)

    def show(progress: Progress) -> None:
        seconds = time.perf_counter() - started
        console.print(f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  {seconds:.0f}s", highlight=False)

    directory = out or Path("runs") / run.run_id
    if (directory / "study.yaml").exists():
        raise StudyError(Fault(f"--out {directory}", "is a study's directory", "give a run a folder of its own"))
    with file_lock(directory / ".lock"), Team() as team:
        record = train_run(run, directory, corpus, show, team=team)
    loss = loss_text(record) if record.loss is None else f"validation loss {record.loss:.4f} nats per token"
    answer(record.model_dump(mode="json"), f"{loss}\n{directory}/record.json", json)
    return OK if record.loss is not None else NOT_OK


def explain_command(context: typer.Context, path: RunPath, settings: Settings = None, json: Json = False) -> int:
    """Print for each tensor its multiplier, init std, LR, weight decay and eps at the base and here, with formula and source."""
    from scaling.parametrization import DECAY_RULES, GRADIENT_DECAY, carried, forward_rules, tensor_rules

    run = load_run(path, overrides(settings or [], context.args))
    steps = run.base.steps or run.training.steps
    base = run.model_copy(update={"model": run.base_model(), "training": run.training.model_copy(update={"steps": steps})})
    rules, base_rules = tensor_rules(run), {_without_layer(rule.name): rule for rule in tensor_rules(base)}
    pairs = [(rule, base_rules[_without_layer(rule.name)]) for rule in rules]
    forward = forward_rules(run)
    document: dict[str, Any] = {
        "parametrization": run.parametrization.kind,
        "form": run.parametrization.form,
        "base_width": run.base.width,
        "width": run.model.width,
        "depth": run.model.depth,
        "attention_scale": forward.attention_scale,
        "branch_multipliers": {"attention": forward.attention_branch, "mlp": forward.mlp_branch},
        "optimizer": carried(run).kind,
        "betas": [carried(run).beta1, carried(run).beta2],
        "weight_decay_rule": GRADIENT_DECAY if run.optimizer.kind == "adam" else DECAY_RULES[run.optimizer.weight_decay_rule],
        "tensors": [rule.to_dict() | {"base": _at_base(before)} for rule, before in pairs],
    }
    answer(document, lambda: _explain_text(run, pairs, document), json)
    return OK


def _without_layer(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _at_base(rule: TensorRule) -> dict[str, Any]:
    values = rule.to_dict()
    return {key: values[key] for key in ("shape", "multiplier", "init_std", "lr", "weight_decay", "lr_weight_decay", "eps")}


def _explain_text(run: RunConfig, pairs: Sequence[tuple[TensorRule, TensorRule]], document: dict[str, Any]) -> str:
    """One row for each kind of tensor; a value that differs from the base's is shown as base -> here."""
    from rich.table import Table

    from scaling.parametrization import HORIZON_SOURCE
    from sweeps.plan_table import render

    columns = (
        "tensor",
        "role",
        "shape",
        "by",
        "multiplier A",
        "init std B",
        "LR C",
        "weight decay",
        "lr*wd",
        "eps E",
        "lr formula",
    )
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for rule, before in pairs:
        numbers = [
            _change(getattr(before, name), getattr(rule, name)) for name in ("multiplier", "init_std", "lr", "weight_decay")
        ]
        product = _change(before.lr * before.weight_decay, rule.lr * rule.weight_decay)
        eps = _change(before.eps, rule.eps)
        table.add_row(
            rule.name, rule.role, "x".join(map(str, rule.shape)), rule.optimizer, *numbers, product, eps, rule.formulas["lr"]
        )
    base = run.base_model()
    head = f"{document['parametrization']}: width {base.width} -> {run.model.width}, depth {base.depth} -> {run.model.depth}; "
    branches = document["branch_multipliers"]
    head += f"query . key x {document['attention_scale']:.4g}, branches x {branches['attention']:.4g} and {branches['mlp']:.4g}"
    head += "" if run.base.steps is None else f"; {run.base.steps} -> {run.training.steps} steps"
    formulas = _formulas([rule for rule, _ in pairs])
    decay = f"  weight decay, {run.optimizer.weight_decay_rule}: {document['weight_decay_rule']}"
    method = f"{document['optimizer']}, betas {document['betas'][0]:.4g} and {document['betas'][1]:.4g}"
    method += "" if run.base.steps is None else f"; number of steps: {HORIZON_SOURCE}"
    return f"{head}\n{method}\n\n{render(table, 220)}\n\n{formulas}\n{decay}"


def _formulas(rules: Sequence[TensorRule]) -> str:
    """Each distinct set of formulas with its source and the tensors that it stands for; layers are not told apart."""
    groups: dict[tuple[str, ...], list[str]] = {}
    letters = {"multiplier": "A", "init_std": "B", "lr": "C", "weight_decay": "wd", "eps": "E"}
    for rule in rules:
        words = ", ".join(f"{letter} = {rule.formulas[name]}" for name, letter in letters.items())
        names = groups.setdefault((rule.role, words, rule.source), [])
        name = ".".join("*" if part.isdigit() else part for part in rule.name.split("."))
        if name not in names:
            names.append(name)
    lines = [
        "formulas (ratios target / base: m_in and m_out of a tensor's fans, m_N of width, m_L of depth, S of steps) and sources"
    ]
    for (role, words, source), names in groups.items():
        lines += [f"  {role}: {', '.join(names)}", f"    {words}", f"    {source}"]
    return "\n".join(lines)


def _change(before: float, now: float) -> str:
    if now != now:
        return "ones"
    return f"{now:.4g}" if before == now else f"{before:.4g} -> {now:.4g}"
