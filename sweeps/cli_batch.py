"""`mutransfer noise-scale` and `mutransfer branch`: the gradient noise scale of a run, and the critical batch by branched training."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaling.errors import ConfigError, Fault, raise_all
from scaling.torchrun import follows
from sweeps.cli_common import NOT_OK, OK, answer, messages

if TYPE_CHECKING:
    from analysis.noise_scale import NoiseScale, Norms
    from scaling.config import RunConfig

RunDirectory = Annotated[Path, typer.Argument(help="A run's directory, runs/RUN_ID.", show_default=False)]
Level = Annotated[float, typer.Option(help="Of the intervals.", min=0.5, max=0.999)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def register(app: typer.Typer) -> None:
    app.command("noise-scale")(noise_scale_command)
    app.command("branch")(branch_command)


def noise_scale_command(
    run: RunDirectory,
    windows: Annotated[int, typer.Option(help="Equal parts of the run, each with its own value.", min=1, max=1000)] = 4,
    step: Annotated[
        int | None, typer.Option(help="Instead: at this kept checkpoint, from every example's gradient.", show_default=False)
    ] = None,
    batches: Annotated[int, typer.Option(help="With --step: batches that are measured.", min=8)] = 16,
    sequences: Annotated[int, typer.Option(help="With --step: sequences in each.", min=2)] = 32,
    level: Level = 0.9,
    json: Json = False,
) -> int:
    """The gradient noise scale along a run (runtime.noise_scale_every_steps), or at one of its checkpoints, with intervals."""
    config = _config(run)
    context = config.model.context
    found = (
        _at_checkpoint(run, config, step, batches, sequences, level) if step is not None else _along(run, config, windows, level)
    )
    document: dict[str, Any] = {"run_id": config.run_id, "context": context, "windows": [item.to_dict(context) for item in found]}
    lines = [f"{item}\n    {item.sequences * context:,.3g} tokens" if item.sequences < 1e300 else str(item) for item in found]
    answer(document, "\n".join([*lines, f"definition: {_definition()}"]), json)
    return OK if found[-1].bounded else NOT_OK


def _definition() -> str:
    from analysis.noise_scale import DEFINITION

    return DEFINITION


def _config(directory: Path) -> RunConfig:
    from scaling.config import RunConfig
    from scaling.config_file import load_config

    if not (directory / "config.yaml").exists():
        raise ConfigError(Fault(str(directory), "is no run directory: it holds no config.yaml", "give one: runs/RUN_ID"))
    return load_config(directory / "config.yaml", RunConfig)


def _along(directory: Path, config: RunConfig, windows: int, level: float) -> list[NoiseScale]:
    """One value a window that holds a measured step."""
    from analysis.noise_scale import noise_scale, read_norms

    norms, steps = read_norms(directory), config.training.steps
    ends = [round(steps * place / windows) for place in range(windows + 1)]
    parts = [norms.between(first, end) for first, end in pairwise(ends)]
    empty = windows - sum(1 for part in parts if len(part.step))
    if empty:
        messages().print(f"{empty} of {windows} windows hold no measured step", highlight=False)
    return [noise_scale(part, level=level) for part in parts if len(part.step)]


def _at_checkpoint(directory: Path, config: RunConfig, step: int, batches: int, sequences: int, level: float) -> list[NoiseScale]:
    from analysis.noise_scale import noise_scale

    return [noise_scale(_example_norms(directory, config, step, batches, sequences), level=level)]


def _example_norms(directory: Path, config: RunConfig, step: int, batches: int, sequences: int) -> Norms:
    """Norms of `batches` batches of training windows, those that the run itself reads from `step` on, at the weights of that step."""
    import torch

    from analysis.noise_scale import norms_of
    from scaling.checkpoint import kept_name, load_checkpoint
    from scaling.data import prepare, stream_batch
    from scaling.noise_scale import example_norms
    from scaling.train import Trainer

    saved = load_checkpoint(directory, config.run_id, kept_name(step))
    if saved is None:
        cure = (
            f"train the run with --set runtime.keep_checkpoints_at_steps=[{step}] (a finished one in another folder: --out DIR)"
        )
        raise ConfigError(Fault(f"--step {step}", f"{directory} holds no {kept_name(step)}", cure))
    if config.branch is not None:
        raise ConfigError(Fault(str(directory), "is a branch", f"measure its parent, run {config.branch.run_id}"))
    corpus = prepare(config.data, context=config.model.context, vocab_size=config.model.vocab_size)
    trainer = Trainer(config, corpus)
    trainer.load_state_dict(saved)
    order = {"after_step": step, "order_of": config.training.batch_size, "data_seed": config.training.data_seed}
    rows = []
    for place in range(batches):
        tokens = stream_batch(corpus, step=place, batch_size=sequences, context=config.model.context, **order)
        norms, _ = example_norms(trainer.model, torch.from_numpy(tokens).to(trainer.device))
        rows.append({"step": step, "gradient_sq": norms.row()})
    return norms_of(rows)


def branch_command(
    run: RunDirectory,
    step: Annotated[int, typer.Option(help="Updates after which it is branched: a kept checkpoint's.", show_default=False)],
    factors: Annotated[str, typer.Option(help="Batches over the run's own; each divides the largest.")] = "1,2,4,8,16",
    rule: Annotated[str, typer.Option(help="How the LR follows the batch: sqrt, linear or surge.")] = "sqrt",
    b_noise: Annotated[
        float | None, typer.Option(help="surge: the batch at which the LR is largest, sequences.", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Of each branch; default: 32 steps of the largest batch.", show_default=False)
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Nats above the base branch's loss that are allowed.", min=0)] = 0.01,
    noise_every: Annotated[
        int | None, typer.Option(help="Also measure the noise scale in the base branch, every so many steps.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Default RUN/branches/STEP.", show_default=False)] = None,
    level: Level = 0.9,
    json: Json = False,
) -> int:
    """Branch a run into several batch sizes for the same tokens, and find the largest batch that costs at most the tolerance."""
    from scaling.data import prepare
    from sweeps.branch import Branching, branches_of, compare_branches, make_branches, parent_run
    from sweeps.cli_common import follow_rank_0, stop_on_sigterm

    if follows(os.environ):
        return follow_rank_0()
    stop_on_sigterm()
    asked = Branching(run, step, _factors(factors), _rule(rule), b_noise, tokens, noise_every)
    parent = parent_run(asked)
    branches = branches_of(asked, parent)
    corpus = prepare(parent.data, context=parent.model.context, vocab_size=parent.model.vocab_size)
    folder = out or run / "branches" / str(step)
    make_branches(asked, parent, branches, folder, corpus, lambda text: messages().print(text, markup=False, highlight=False))
    found, noise = compare_branches(asked, branches, folder, tolerance=tolerance, level=level)
    document = {"run_id": parent.run_id, "step": step} | found.to_dict()
    document["noise_scale"] = None if noise is None else noise.to_dict(parent.model.context)
    text = str(found) if noise is None else f"{found}\nnoise scale of the base branch: {noise}"
    answer(document, f"{text}\nbranches: {folder}/runs", json)
    return NOT_OK if found.censored else OK


def _factors(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(Fault(f"--factors {text}", "is no list of whole numbers", "for example --factors 1,2,4,8,16")) from None


def _rule(text: str) -> Any:
    from scaling.batch_rules import BATCH_RULES

    if text not in BATCH_RULES:
        raise_all([Fault(f"--rule {text}", "is no rule of LR against batch", ", ".join(BATCH_RULES))], ConfigError)
    return text
