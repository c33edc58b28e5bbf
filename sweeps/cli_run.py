"""Commands about one run: `train` and `explain`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaling.errors import ConfigError, Fault, StudyError, UserError
from sweeps.cli_common import DOTTED, NOT_OK, OK, answer, messages, overrides

if TYPE_CHECKING:
    from scaling.config import RunConfig
    from scaling.parametrization import TensorRule

RunPath = Annotated[
    Path, typer.Argument(help="A run's YAML file (configs/models/), or config.yaml of a run.", show_default=False)
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Override a config key: --set a.b=value.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def load_run(path: Path, settings: Sequence[str]) -> RunConfig:
    """A RunConfig from YAML, with the vocabulary filled in from the tokenizer when it is not given."""
    from scaling.config import RunConfig
    from scaling.config_file import apply_overrides, build, locate, read_yaml
    from scaling.data import vocabulary_size
    from sweeps.study_dir import absolute_paths

    source = read_yaml(path)
    apply_overrides(source, settings)
    run = build(RunConfig, source)
    if run.model.vocab_size is None:
        try:
            vocabulary = vocabulary_size(run.data)
        except UserError as error:
            raise locate(error, source) from None
        if vocabulary is None:
            raise ConfigError(Fault(f"{path}: model.vocab_size", "is needed with data.source bin", "add it"))
        run = run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": vocabulary})})
    return run.model_copy(update={"data": absolute_paths(run.data, path.parent)})


def register(app: typer.Typer) -> None:
    app.command("train", context_settings=DOTTED)(train_command)
    app.command("explain", context_settings=DOTTED)(explain_command)


def train_command(
    context: typer.Context,
    path: RunPath,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/RUN_ID.", show_default=False)] = None,
    settings: Settings = None,
    json: Json = False,
) -> int:
    """Train one run. Typed again after an interruption it goes on from the last checkpoint (runtime.checkpoint_every_steps)."""
    from scaling.data import prepare
    from scaling.locks import file_lock
    from scaling.train import Progress, train_run
    from sweeps.cli_common import stop_on_sigterm

    stop_on_sigterm()
    run = load_run(path, overrides(settings or [], context.args))
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
    with file_lock(directory / ".lock"):
        record = train_run(run, directory, corpus, show)
    loss = "diverged" if record.loss is None else f"validation loss {record.loss:.4f} nats per token"
    answer(record.model_dump(mode="json"), f"{loss}\n{directory}/record.json", json)
    return OK if record.loss is not None else NOT_OK


def explain_command(context: typer.Context, path: RunPath, settings: Settings = None, json: Json = False) -> int:
    """Print for each tensor its multiplier, init std, LR, weight decay and eps, with formula and source."""
    from scaling.parametrization import forward_rules, tensor_rules

    run = load_run(path, overrides(settings or [], context.args))
    rules, forward = tensor_rules(run), forward_rules(run)
    document: dict[str, Any] = {
        "parametrization": run.parametrization.kind,
        "base_width": run.base.width,
        "width": run.model.width,
        "attention_scale": forward.attention_scale,
        "tensors": [rule.to_dict() for rule in rules],
    }
    answer(document, lambda: _explain_text(run, rules, forward.attention_scale), json)
    return OK


def _explain_text(run: RunConfig, rules: Sequence[TensorRule], attention_scale: float) -> str:
    from rich.table import Table

    from sweeps.plan_table import render

    columns = ("tensor", "role", "shape", "multiplier A", "init std B", "LR C", "weight decay", "eps E", "lr formula")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for rule in rules:
        std = "ones" if rule.init_std != rule.init_std else f"{rule.init_std:.4g}"
        numbers = (f"{rule.multiplier:.4g}", std, f"{rule.lr:.4g}", f"{rule.weight_decay:.4g}", f"{rule.eps:.3g}")
        table.add_row(rule.name, rule.role, "x".join(map(str, rule.shape)), *numbers, rule.formulas["lr"])
    base = run.base_model()
    head = f"{run.parametrization.kind}: width {run.model.width}, base width {base.width}; query . key x {attention_scale:.4g}"
    sources = "\n".join(dict.fromkeys(f"  {rule.role}: {rule.source}" for rule in rules))
    return f"{head}\n\n{render(table, 180)}\n\nsources\n{sources}"
