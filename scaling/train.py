"""Train one run: from a RunConfig to a RunRecord in a run directory.

Owns the training loop. A living worker calls `train_run` again and again; nothing global is left behind but torch's
thread count, denormals taken for zeros, and memory that is kept for the next step.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import scaling
from scaling.accounting import parameter_counts, run_flops
from scaling.checkpoint import SHARDS, kept_name, load_checkpoint, remove_checkpoint, save_checkpoint
from scaling.config import RunConfig
from scaling.data import Corpus, stream_batch, train_batch, validation_batches
from scaling.errors import ConfigError, Fault, StudyError
from scaling.hyperparameters import hyperparameters
from scaling.memory import keep_memory
from scaling.model import build_model
from scaling.noise_scale import GradientNorms, Parts, extra_passes, part_sequences, squared_norm
from scaling.optimizer import build_optimizer, flattened, inner_optimizers, set_lr
from scaling.parallel import Layout
from scaling.ranks import ALONE, Group, Team
from scaling.records import MetricsLog, Pruned, RunRecord, Watch, read_metrics, read_record, write_config, write_record
from scaling.shapes import transformer_tensors

VALIDATION_BATCH = 32
MAX_SHAPES = 256
"""Shapes of compiled models in one process."""
BLOWN_UP = 1.05
"""A final loss above this many times the first batch's, before any update, is a divergence."""


@dataclass(frozen=True)
class Progress:
    """What a running run tells its watcher."""

    run_id: str
    step: int
    steps: int
    loss: float


@dataclass
class _State:
    """What changes during a run."""

    step: int = 0
    initial_loss: float | None = None
    last_finite_loss: float | None = None
    diverged: bool = False
    pruned: Pruned | None = None
    wall_s: float = 0.0
    process_s: float = 0.0


class Trainer:
    """One run's model, optimizer and data, and the step that moves them."""

    def __init__(self, run: RunConfig, corpus: Corpus, group: Group = ALONE) -> None:
        """Build everything at step 0, in every process of `group`; rank 0 leads in what follows.

        Raises ConfigError when the device cannot do what the run asks for.
        """
        check_runtime(run)
        torch.set_num_threads(run.runtime.threads)
        # At a high LR saturated softmaxes fill the backward pass with denormals, which cost a CPU up to twice the time.
        torch.set_flush_denormal(True)
        keep_memory()
        self.run, self.corpus, self.group = run, corpus, group
        self.device = group.device(run.runtime.device)
        layout = run.runtime.parallel or Layout()
        self.sharded, self._stages = layout.sharded, layout.pp
        """Whether this process holds a part of the tensors; in how many stages of a pipeline they are."""
        self.data = group.data(layout.tp, layout.pp)
        if run.runtime.parallel is None:
            self.model = build_model(run).to(self.device)
        else:
            from scaling.parallel_model import build_part  # half a second

            self.model = build_part(run, group.rank, self.device)
        self._pipeline = None
        if layout.pp > 1:
            from scaling.parallel_pipeline import Pipeline

            self._pipeline = Pipeline(self.model, run, group.rank, self.device)
        self.optimizer = build_optimizer(self.model, run)
        self.scaler = torch.amp.GradScaler(run.runtime.device, enabled=run.training.precision == "fp16")
        self._loss: Callable[..., Tensor] = compiled(self.model.loss) if run.training.compile else self.model.loss
        if self.sharded:
            from scaling.parallel_checkpoint import ShardWriter
            from scaling.parallel_model import split_groups

            split_groups(self.optimizer)
            self._writer = ShardWriter(run.runtime.checkpoint_async)
        self._averaging = None if self.sharded else group.averaging(self.model, self._loss)
        self.norms: GradientNorms | None = None
        """The last step's, where it measured them (runtime.noise_scale_every_steps)."""

    def step(self, step: int) -> tuple[float, float]:
        """Do update number `step`; return the batch's loss (nats per token) and the gradient norm before clipping."""
        self.group.tell("step", step)
        training, every = self.run.training, self.run.runtime.noise_scale_every_steps
        tokens = self.data.share(torch.from_numpy(self._batch(step))).to(self.device)
        if every is not None and step % every == 0:
            loss, self.norms = self.measured_gradient(tokens)
        else:
            loss, self.norms = self.gradient(tokens), None
        set_lr(self.optimizer, self.run.schedule, step, training.steps)
        inner = inner_optimizers(self.optimizer)
        for optimizer in inner:
            self.scaler.unscale_(optimizer)
        norm = self._clip()
        for optimizer in inner:
            self.scaler.step(optimizer)
        self.scaler.update()
        assert not flattened(self.optimizer), "a step left groups whose learning rates have lost their ratios"
        return loss, norm

    def _clip(self) -> float:
        limit = self.run.optimizer.clip_norm or math.inf
        if self.sharded:
            from scaling.parallel_model import clip_gradients

            return clip_gradients(self.model.parameters(), limit, self.group, self._stages)
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _batch(self, step: int) -> np.ndarray:
        training, branch, context = self.run.training, self.run.branch, self.run.model.context
        places: dict[str, int] = {"data_seed": training.data_seed, "batch_size": training.batch_size, "context": context}
        if branch is None:
            return train_batch(self.corpus, step=step, **places)
        return stream_batch(self.corpus, step=step, after_step=branch.step, order_of=branch.batch_size, **places)

    def measured_gradient(self, tokens: Tensor) -> tuple[float, GradientNorms]:
        """`gradient`, bit by bit, and its squared norms at two batch sizes: the batch's, and that of its parts."""
        training, parameters = self.run.training, list(self.model.parameters())
        size = part_sequences(training.batch_size, self.group.size, training.micro_batch_size)
        if size == training.micro_batch_size and self.group.size == 1:
            parts = Parts(parameters)
            loss, total = self.gradient(tokens, parts), parts.sum_sq
        else:
            loss = self.gradient(tokens)
            with self._autocast():
                total = extra_passes(self._loss, parameters, tokens, size)
        total = self.group.sum(total)[0]
        batch = squared_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        return loss, GradientNorms(training.batch_size, batch, size, total * size / training.batch_size)

    def gradient(self, tokens: Tensor, parts: Parts | None = None) -> float:
        """Set every gradient to that of the mean loss over `tokens` (B, T + 1), in micro-batches; return that loss.

        In a group `tokens` are this rank's share, and gradient and loss are the mean over the ranks'. `parts` sees each micro-batch's.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self._pipeline is not None:
            return self.group.sum(self._pipeline.gradient(tokens))[0] * self._stages / self.group.size
        micro = self.run.training.micro_batch_size or len(tokens)
        total, pieces = 0.0, torch.split(tokens, micro)
        compute = self._averaging or self._loss
        for index, part in enumerate(pieces):
            # Means are weighted by their sequences; gradients go between ranks with the last micro-batch alone.
            waits = self._averaging is not None and index + 1 < len(pieces)
            if self.sharded:
                from scaling.parallel_model import accumulate

                accumulate(self.model, last=index + 1 == len(pieces))
            with self._averaging.no_sync() if waits and self._averaging is not None else nullcontext():
                with self._autocast():
                    loss = compute(part) * (len(part) / len(tokens))
                torch.autograd.backward(self.scaler.scale(loss))
            if parts is not None:
                parts.see(len(part) / len(tokens))
            total += float(loss.detach())
        return self.group.sum(total)[0] / self.group.size

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the validation windows, nats per token."""
        self.group.tell("validate")
        total, count = 0.0, 0
        sequences = self.run.training.validation_sequences
        batches = validation_batches(
            self.corpus, sequences=sequences, context=self.run.model.context, batch_size=VALIDATION_BATCH
        )
        while round := list(islice(batches, self.data.size)):
            # A rank that is left without a batch computes one with the others, whose tensors it holds a part of, and leaves it out.
            tokens = round[min(self.data.rank, len(round) - 1)]
            loss = self._loss_sum(torch.from_numpy(tokens).to(self.device))
            if self.data.rank < len(round):
                total += loss
                count += tokens.shape[0] * (tokens.shape[1] - 1)
        total, tokens_seen = self.group.sum(total, count)
        return total * self._stages / tokens_seen

    def _loss_sum(self, tokens: Tensor) -> float:
        """nats; under a pipeline 0 but in the last stage."""
        if self._pipeline is not None:
            return self._pipeline.loss_sum(tokens)
        with self._autocast():
            return float(self.model.loss(tokens, reduction="sum"))

    def process_s(self) -> float:
        """Processor time of the group's processes so far, seconds."""
        self.group.tell("process_s")
        return self.group.sum(time.process_time())[0]

    def _autocast(self) -> torch.autocast:
        precision = self.run.training.precision
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=precision != "fp32")

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Checkpoint this run in its directory, with `state`: one file, or each process's part where the layout is sharded."""
        kept = {"run_id": self.run.run_id, "state": state}
        if not self.sharded:
            save_checkpoint(directory, kept | self.state_dict())
            return
        from scaling.parallel_checkpoint import new_folder, write_state

        folder = new_folder(directory, state["step"])
        self.save_shards(folder, lambda: write_state(directory, folder, kept))

    def save_shards(self, folder: Path, done: Callable[[], None] | None = None) -> None:
        from scaling.parallel_checkpoint import held

        self.group.tell("save", folder)
        self._writer.start(folder, held(self.model, self.optimizer), done)

    def written(self) -> None:
        """Wait for the checkpoint that is being written (runtime.checkpoint_async); nothing where none is."""
        if self.sharded:
            self._writer.wait()

    def load_shards(self, folder: Path) -> None:
        from scaling.parallel_checkpoint import read_shards

        self.group.tell("load_shards", folder)
        whole = {spec.name: spec.shape for spec in transformer_tensors(self.run.model)}
        read_shards(folder, self.model, self.optimizer, whole, alone=self.group.size == 1)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        """Go on from the later of the directory's checkpoints, of whatever layout; return its state, None where there is none."""
        whole = load_checkpoint(directory, self.run.run_id)
        if (directory / SHARDS).exists():
            from scaling.parallel_checkpoint import read_state

            shards = read_state(directory, self.run.run_id)
            if shards is not None and (whole is None or shards["state"]["step"] > whole["state"]["step"]):
                self.load_shards(shards["folder"])
                return dict(shards["state"])
        if whole is None:
            return None
        if self.sharded:
            from scaling.parallel_checkpoint import new_folder, of_one_process, write_shards

            folder = new_folder(directory, whole["state"]["step"])
            write_shards(folder, of_one_process(whole), alone=True)
            self.load_shards(folder)
        else:
            self.load_state_dict(whole)
        return dict(whole["state"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.group.tell("load", {name: state[name] for name in ("model", "optimizer", "scaler")})
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


def compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`loss` compiled for its shapes; a process compiles once for all runs of a shape, whatever their learning rates and weights."""
    from torch._dynamo import config

    # Beyond the default of eight shapes torch goes on without compilation, and says so in its log alone.
    config.recompile_limit = max(config.recompile_limit, MAX_SHAPES)
    return torch.compile(loss, dynamic=False)


def check_runtime(run: RunConfig) -> None:
    """Raise ConfigError for a device or precision that this machine does not have."""
    where, device = "runtime.device", run.runtime.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(Fault(where, "is cuda, and this machine's torch sees no CUDA device", "set runtime.device to cpu"))
    if run.training.precision == "fp16" and device != "cuda":
        cure = "use bf16 (same speed where fp16 is fast, no loss scaling) or fp32"
        raise ConfigError(Fault("training.precision", "fp16 with loss scaling needs a CUDA device", cure))


def train_run(
    run: RunConfig,
    directory: Path,
    corpus: Corpus,
    on_progress: Callable[[Progress], None] | None = None,
    watch: Watch | None = None,
    team: Team | None = None,
) -> RunRecord:
    """Train `run` to its end in `directory`, or until `watch` ends it, and return its record; a finished run is returned as it is.

    `team` keeps the processes of runs that are spread over several; without one they live for this run.

    An interrupted run with a checkpoint goes on from there with the same losses, bit by bit on CPU, as if never interrupted.
    """
    finished = read_record(directory)
    if finished is not None:
        _require_same_run(finished, run, corpus, directory)
        return finished
    if team is None:
        with Team() as own:
            return train_run(run, directory, corpus, on_progress, watch, own)
    with team.run(run) as group:
        return _train(Trainer(run, corpus, group), directory, on_progress, watch)


def _train(trainer: Trainer, directory: Path, on_progress: Callable[[Progress], None] | None, watch: Watch | None) -> RunRecord:
    """Train from the last checkpoint, or the first step, to the end."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    run, corpus, state = trainer.run, trainer.corpus, _State()
    saved = trainer.resume(directory)
    if saved is not None:
        state = _State(**saved)
    elif run.branch is not None:
        what = f"holds no checkpoint of step {run.branch.step} of run {run.branch.run_id}, which this run branches off"
        raise StudyError(Fault(str(directory), what, "make it by `mutransfer branch`, which puts it there"))
    resumed_from = state.step
    write_config(directory, run)
    log = MetricsLog(directory, resume_at_step=resumed_from)
    if watch is not None:
        for row in read_metrics(directory / "metrics.jsonl"):
            watch(row)
    try:
        loss = _loop(trainer, state, directory, log, on_progress, watch)
        trainer.written()
    finally:
        log.close()
    record = _record(run, state, loss, corpus.sha256, started_at, resumed_from, trainer.group.size)
    write_record(directory, record)
    remove_checkpoint(directory)
    return record


def _require_same_run(record: RunRecord, run: RunConfig, corpus: Corpus, directory: Path) -> None:
    cure = "give another folder: --out DIR"
    if record.run_id != run.run_id:
        raise StudyError(Fault(str(directory), f"holds another run, {record.run_id}; this config is {run.run_id}", cure))
    if record.data_sha256 != corpus.sha256:
        what = f"holds this run on other data (SHA-256 {record.data_sha256[:12]}; the data are {corpus.sha256[:12]} now)"
        raise StudyError(Fault(str(directory), what, cure))
    lost = [step for step in run.runtime.keep_checkpoints_at_steps if not (directory / kept_name(step)).exists()]
    if lost:
        what = f"holds this run, finished without its checkpoints at steps {lost} (runtime.keep_checkpoints_at_steps)"
        raise StudyError(Fault(str(directory), what, f"delete {directory}/record.json: the run is made again; or --out DIR"))


def start_state(trainer: Trainer, parent: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint in which a branch starts: the parent's weights and moments, this run's learning rates, no step done.

    `trainer`, of the branch, is changed. parent: a checkpoint of the run that it branches off.
    """
    own = [{key: value for key, value in group.items() if key != "params"} for group in trainer.optimizer.param_groups]
    trainer.load_state_dict(parent)
    for group, settings in zip(trainer.optimizer.param_groups, own, strict=True):
        assert group["names"] == settings["names"], "a branch has its parent's tensors in its parent's groups"
        group.update(settings)
    return {"run_id": trainer.run.run_id, "state": vars(_State()), **trainer.state_dict()}


def _loop(
    trainer: Trainer,
    state: _State,
    directory: Path,
    log: MetricsLog,
    on_progress: Callable[[Progress], None] | None,
    watch: Watch | None,
) -> float | None:
    """Run from `state.step` to the end; return the final validation loss, or None when the run diverged or was pruned."""
    run, runtime, training = trainer.run, trainer.run.runtime, trainer.run.training
    clock = _Clock(state, trainer)
    while state.step < training.steps:
        step = state.step
        loss, grad_norm = trainer.step(step)
        state.diverged = not (math.isfinite(loss) and (math.isfinite(grad_norm) or training.precision == "fp16"))
        row: dict[str, Any] = {"step": step, "loss": _finite(loss), "grad_norm": _finite(grad_norm)}
        if state.diverged:
            log.write(row)
            break
        if trainer.norms is not None:
            row["gradient_sq"] = trainer.norms.row()
        if step == 0:
            state.initial_loss = loss
        state.last_finite_loss = loss
        state.step = step + 1
        every = training.validate_every_steps
        if every and state.step % every == 0 and state.step < training.steps:
            row["validation_loss"] = _finite(trainer.validate())
        if step % runtime.log_every_steps == 0 or state.step == training.steps or row.keys() & {"validation_loss", "gradient_sq"}:
            log.write(row)
            if watch is not None and state.step < training.steps:
                state.pruned = watch(row)
        if state.pruned is not None:
            clock.update()
            return None
        if on_progress and step % runtime.log_every_steps == 0:
            on_progress(Progress(run.run_id, state.step, training.steps, loss))
        if runtime.checkpoint_every_steps and state.step % runtime.checkpoint_every_steps == 0:
            clock.update()
            trainer.save(directory, vars(state).copy())
        if state.step in runtime.keep_checkpoints_at_steps:
            clock.update()
            kept = {"run_id": run.run_id, "state": vars(state).copy(), **trainer.state_dict()}
            save_checkpoint(directory, kept, kept_name(state.step))
    final = math.inf if state.diverged else trainer.validate()
    clock.update()
    # A run that ends well above where it began blew up: the same result as a NaN, seen without one. One that ends where it began
    # (LR too low, too few steps) has a loss like any other.
    state.diverged = state.diverged or state.initial_loss is None or not final < BLOWN_UP * state.initial_loss
    log.write({"step": state.step, "validation_loss": None if state.diverged else final})
    return None if state.diverged else final


class _Clock:
    """Adds the time of these processes to what earlier ones spent on the run."""

    def __init__(self, state: _State, trainer: Trainer) -> None:
        self._state, self._trainer = state, trainer
        self._wall, self._process = time.perf_counter(), trainer.process_s()

    def update(self) -> None:
        wall, process = time.perf_counter(), self._trainer.process_s()
        self._state.wall_s += wall - self._wall
        self._state.process_s += process - self._process
        self._wall, self._process = wall, process


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _record(
    run: RunConfig, state: _State, loss: float | None, data_sha256: str, started_at: str, resumed_from: int, processes: int
) -> RunRecord:
    return RunRecord(
        run_id=run.run_id,
        status="diverged" if state.diverged else "pruned" if state.pruned else "complete",
        parametrization=run.parametrization.kind,
        width=run.model.width,
        depth=run.model.depth,
        head_dim=run.model.head_size,
        batch_tokens=run.batch_tokens,
        tokens=run.tokens,
        steps=run.training.steps,
        steps_done=state.step,
        lr=run.optimizer.lr,
        log2_lr=run.log2_lr,
        seed=run.training.seed,
        data_seed=run.training.data_seed,
        precision=run.training.precision,
        loss=loss,
        initial_loss=state.initial_loss,
        last_finite_loss=state.last_finite_loss,
        params=parameter_counts(run.model).to_dict(),
        flops=run_flops(run),
        wall_s=state.wall_s,
        process_s=state.process_s,
        data_sha256=data_sha256,
        versions=versions(),
        host=platform.node(),
        started_at=started_at,
        resumed_from_step=resumed_from,
        processes=processes,
        parallel=run.runtime.parallel,
        hyperparameters=hyperparameters(run),
        pruned=state.pruned,
    )


def versions() -> dict[str, str]:
    return {
        "mutransfer": scaling.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
