"""Branched training: a run goes on from a kept checkpoint at several batch sizes, each branch an ordinary run with a record of its own.

Owns which branches there are, and making them: `OUT/runs/RUN_ID/{config.yaml, record.json, metrics.jsonl}` as in a study. Typed again,
finished branches are kept and an interrupted one goes on. What they say is `analysis.branched_batch`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from analysis.branched_batch import BranchedBatch, branch_losses, compare
from analysis.noise_scale import NoiseScale, noise_scale, norms_of
from scaling.batch_rules import BatchRule, lr_factor_at_batch
from scaling.config import Branch, OptimizerConfig, RunConfig, ScheduleConfig
from scaling.config_file import load_config
from scaling.errors import Fault, StudyError, UserError, raise_all
from scaling.parametrization import carried
from scaling.records import read_metrics, read_record, run_directory
from scaling.schedule import lr_factor

if TYPE_CHECKING:
    from scaling.data import Corpus
    from scaling.ranks import Team

LEAST_STEPS = 16
"""Of the largest batch: an evaluation each, a quarter of them in the window."""
DEFAULT_STEPS = 32
"""Of the largest batch, where no number of tokens is asked for."""


class BranchError(UserError):
    """A run cannot be branched as asked."""


@dataclass(frozen=True)
class Branching:
    """What is asked for: a run's directory, the step to branch at, and the branches."""

    parent: Path
    step: int
    factors: tuple[int, ...]
    """Batches over the run's own; 1, the base branch, always belongs to them."""
    rule: BatchRule = "sqrt"
    noise_sequences: float | None = None
    """surge: the batch at which the LR is largest."""
    tokens: int | None = None
    """Of each branch; rounded up to whole steps of the largest batch."""
    noise_every_steps: int | None = None
    """Steps between two measurements of the noise scale in the base branch; default: none."""


def parent_run(branching: Branching) -> RunConfig:
    """The config of the run that is branched. Raises BranchError with everything that speaks against it."""
    folder = branching.parent
    if not (folder / "config.yaml").exists():
        raise BranchError(Fault(str(folder), "is no run directory: it holds no config.yaml", "give one: runs/RUN_ID"))
    run = load_config(folder / "config.yaml", RunConfig)
    raise_all(_faults(branching, run), BranchError)
    return run


def _faults(branching: Branching, run: RunConfig) -> list[Fault]:
    from scaling.checkpoint import kept_name

    faults, largest, step = [], max(branching.factors), branching.step
    wrong = [factor for factor in branching.factors if factor < 1 or largest % max(factor, 1)]
    if wrong:
        what = f"{wrong} do not divide the largest factor, {largest}: branches could not be compared after the same tokens"
        faults.append(Fault("--factors", what, "for example --factors 1,2,4,8,16"))
    if run.branch is not None:
        faults.append(Fault(str(branching.parent), "is a branch itself", f"branch its parent, run {run.branch.run_id}"))
    if not (branching.parent / kept_name(step)).exists():
        kept = sorted(int(path.stem.partition("-")[2]) for path in branching.parent.glob("checkpoint-*.pt"))
        what = f"{branching.parent} holds no checkpoint of step {step}; kept: {kept or 'none'}"
        cure = (
            f"train the run with --set runtime.keep_checkpoints_at_steps=[{step}] (a finished one in another folder: --out DIR)"
        )
        faults.append(Fault(f"--step {step}", what, cure))
    if branching.rule == "surge" and branching.noise_sequences is None:
        faults.append(Fault("--rule surge", "needs the batch at which the LR is largest", "add --b-noise SEQUENCES"))
    if branching.rule != "surge" and branching.noise_sequences is not None:
        faults.append(Fault("--b-noise", f"is surge's, and the rule is {branching.rule}", "leave it out, or --rule surge"))
    largest_tokens = largest * run.batch_tokens
    if branching.tokens is not None and branching.tokens < LEAST_STEPS * largest_tokens:
        what = f"is less than {LEAST_STEPS} steps of the largest batch, {largest_tokens:,} tokens"
        faults.append(Fault(f"--tokens {branching.tokens}", what, f"at least {LEAST_STEPS * largest_tokens}, or smaller factors"))
    return faults


def branches_of(branching: Branching, run: RunConfig) -> list[RunConfig]:
    """The runs of all branches, by batch: constant LR, that of the run at the branching point times the rule's factor.

    Base values for another number of steps are written out, so that no rule is applied to a branch's own number of steps.
    Raises BranchError where a branch would be no run.
    """
    largest = max(branching.factors)
    tokens = branching.tokens or DEFAULT_STEPS * largest * run.batch_tokens
    steps = -(-tokens // (largest * run.batch_tokens))
    try:
        return [_branch(branching, run, factor, steps * (largest // factor)) for factor in sorted({1, *branching.factors})]
    except ValidationError as error:
        faults = [Fault("branch", f"{_key(detail['loc'])}{detail['msg']}") for detail in error.errors()]
        raise BranchError(*faults) from None


def _key(location: tuple[int | str, ...]) -> str:
    return f"{'.'.join(map(str, location))}: " if location else ""


def _branch(branching: Branching, run: RunConfig, factor: int, steps: int) -> RunConfig:
    training, batch = run.training, run.training.batch_size
    noise_ratio = None if branching.noise_sequences is None else branching.noise_sequences / batch
    here = lr_factor(run.schedule, min(branching.step, training.steps - 1), training.steps)
    optimizer = carried(run).model_dump() | {"betas_rule": "constant", "horizon_exponent": 0.5}
    optimizer["lr"] *= here * lr_factor_at_batch(branching.rule, float(factor), noise_ratio)
    return RunConfig.model_validate(
        run.model_dump()
        | {
            "base": run.base.model_dump() | {"steps": None},
            "optimizer": OptimizerConfig.model_validate(optimizer),
            "schedule": ScheduleConfig(kind="constant", warmup_fraction=0.0),
            "training": training.model_dump()
            | {
                "steps": steps,
                "batch_size": batch * factor,
                # No more memory than the run itself.
                "micro_batch_size": training.micro_batch_size or (batch if factor > 1 else None),
                "validate_every_steps": max(branching.factors) // factor,
            },
            "runtime": run.runtime.model_dump()
            | {
                "keep_checkpoints_at_steps": (),
                "noise_scale_every_steps": branching.noise_every_steps if factor == 1 else None,
            },
            "branch": Branch(run_id=run.run_id, step=branching.step, batch_size=batch),
        }
    )


def make_branches(
    branching: Branching, run: RunConfig, branches: Sequence[RunConfig], out: Path, corpus: Corpus, say: Callable[[str], None]
) -> None:
    """Train every branch that is not finished, one after the other."""
    from scaling.ranks import Team

    with Team() as team:
        for place, branch in enumerate(branches, start=1):
            directory = run_directory(out, branch.run_id)
            say(f"branch {place} of {len(branches)}: batch {branch.training.batch_size}, {branch.training.steps} steps")
            _make(branching, run, branch, directory, corpus, team)


def _make(branching: Branching, run: RunConfig, branch: RunConfig, directory: Path, corpus: Corpus, team: Team) -> None:
    """Train one branch, from the parent's checkpoint or from where it was interrupted."""
    from scaling.checkpoint import kept_name, load_checkpoint, save_checkpoint
    from scaling.locks import file_lock
    from scaling.train import Trainer, start_state, train_run

    directory.mkdir(parents=True, exist_ok=True)
    with file_lock(directory / ".lock"):
        if read_record(directory) is None and load_checkpoint(directory, branch.run_id) is None:
            saved = load_checkpoint(branching.parent, run.run_id, kept_name(branching.step))
            if saved is None:
                raise StudyError(Fault(str(branching.parent), f"has lost its {kept_name(branching.step)}"))
            save_checkpoint(directory, start_state(Trainer(branch, corpus), saved))
        train_run(branch, directory, corpus, team=team)


def compare_branches(
    branching: Branching, branches: Sequence[RunConfig], out: Path, *, tolerance: float, level: float = 0.9
) -> tuple[BranchedBatch, NoiseScale | None]:
    """What finished branches say, and the noise scale that was measured in the base branch.

    Raises StudyError when the base branch diverged: nothing is left to compare with.
    """
    rows = [read_metrics(run_directory(out, branch.run_id) / "metrics.jsonl") for branch in branches]
    losses = [
        branch_losses(branch.run_id, branch.training.batch_size, branch.optimizer.lr, branch.training.steps, found)
        for branch, found in zip(branches, rows, strict=True)
    ]
    base = branches[0]
    if losses[0].diverged:
        cure = "branch at a smaller LR, or from another step"
        raise StudyError(Fault(str(run_directory(out, base.run_id)), "the base branch diverged: nothing to compare with", cure))
    found = compare(
        losses,
        tolerance=tolerance,
        tokens=base.tokens,
        context=base.model.context,
        lr_rule=branching.rule,
        from_step=branching.step,
        level=level,
    )
    norms = norms_of(rows[0])
    return found, noise_scale(norms, level=level) if len(norms.step) else None
