"""Coordinate check, measured: one model at several widths, a few real steps, and what can be said of each tensor.

Owns `Target` (the protocol a user's object follows), `measure` and the rows it returns; `analysis.coordinates` judges them. The
batch is the same at every step, so that what is probed was trained on, and the seed is set anew at every width, so that widths
are paired. Everything is measured in the model's own precision, on its own device.

Statistics of a tensor W (W0 before the first step, RMS over entries):

    init         RMS(W0)
    update       RMS of W - W0 over the entries that moved, after the last step; under Muon, whose updates have full rank, their spectral
                 norm over sqrt(entries)
    sensitivity  RMS change of the model's output for a random change of W of RMS 1, everything else at its initial value (a tensor
                 that starts at zero is drawn at random for this): every forward multiplier, wherever the user applied it, and
                 none of the alignment that makes an update's own effect reach its limit slowly. One backward pass gives it for all
                 tensors; where gradients are absent or are not the output's derivatives, a forward pass a tensor does
    curvature    how far the output is from linear in W: 0 for a readout, which is found by it wherever its product is computed
    effect       RMS change of the output when W alone is set back to W0, after the last step; on request
    gradient     RMS of the first gradient, over the entries that are not zero; at the largest width
    lr, weight_decay, eps    as the optimizer's group has them after the last step

Statistics of a module: `activation` (mean |x| of its output before the first step), `change` (RMS of what all steps but the last
changed, over the first eighth of its rows), and, where scaled_dot_product_attention is called, `attention_logits` (RMS of
query . key x scale, in the random model). Of the whole model, named "": `output`, and `loss` at every step and after the last, up to the
first that is not finite, where training ends. A tensor that has not moved, or to which no gradient came, has `reached`:
1 where one came, else 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from scaling.coordinate_faults import check_depths, check_loss, check_model, check_optimizer, check_sizes
from scaling.coordinate_forward import AttentionLogits, Seen, norm, rms, rms_of_nonzero
from scaling.coordinate_rows import NOT_OPTIMIZED, Measurement, Row, TensorFacts
from scaling.layer_names import LayerNames
from scaling.signs import balanced_signs

RELATIVE_NUDGE = 1e-2
"""Size of the random change, relative to the tensor's own."""
NUDGE_ALONG = 1e-3
"""The same for a step along the gradient, where every entry counts."""
DISAGREE = 0.1
"""Relative difference above which gradients are not the output's derivatives; right ones come within 0.004 in float32."""
SHRINK = 2.0**-6
"""Factor on each tensor of a block, of which a branch has two or more in a row."""
NUDGE_SEED = 7_919_000
MIN_ENTRIES = 32
"""Of a batch's first tensor, below which it is not cut."""


class Target(Protocol):
    """A model that can be built at any width, with its optimizer, data and loss."""

    def build(self, width: int) -> nn.Module: ...

    def optimizer(self, model: nn.Module, width: int) -> torch.optim.Optimizer: ...

    def batch(self, step: int) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Tensor: ...


def measure(
    target: Target, widths: Sequence[int], *, seeds: int = 3, steps: int = 3, effects: bool = False, layers: LayerNames | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:  # fmt: skip
    """Train `target` for `steps` steps at every width and seed, and measure.

    effects: measure `effect` too, a forward pass more a tensor. layers: for a check of depth, see `measure_depths`.
    progress: called with (width, seed) before each. Sensitivities are taken on a quarter of the batch where it can be cut: they
    average over all outputs.
    """
    rows: list[Row] = []
    common = _Common(target.batch(0), tuple(sorted(set(widths))), layers)
    for width in reversed(common.widths):
        for seed in range(seeds):
            if progress is not None:
                progress(width, seed)
            rows += _Probe(target, width, seed, common).run(steps, effects=effects)
    if layers is None:
        check_sizes(target, common.facts, common.widths)
    return Measurement(tuple(rows), tuple(common.facts.values()), steps, common.head_dims)


def measure_depths(
    target: Target, depths: Sequence[int], *, seeds: int = 3, steps: int = 3, effects: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Measurement, LayerNames]:  # fmt: skip
    """`measure` of a target whose methods are given depths, and its tensors' names without their layer number.

    Sensitivities are taken with all tensors of blocks made smaller, so that the branches are small beside the stream, as in the
    limit of many layers: where they outweigh it, as they do at first beside an embedding of std 0.02, a norm takes their multiplier out
    again.
    """
    layers = LayerNames(check_depths(target, target.build, depths))
    return measure(target, depths, seeds=seeds, steps=steps, effects=effects, layers=layers, progress=progress), layers


@dataclass
class _Common:
    """What all widths and seeds share."""

    data: Any
    widths: tuple[int, ...]
    layers: LayerNames | None
    facts: dict[str, TensorFacts] = field(default_factory=dict)
    head_dims: dict[str, dict[int, int]] = field(default_factory=dict)
    attention: bool = True
    """Whether scaled_dot_product_attention may be called."""
    by_change: bool = False
    """Gradients are not the output's derivatives: sensitivities by random changes, one tensor after the other."""


class _Probe:
    """One width and seed."""

    def __init__(self, target: Target, width: int, seed: int, common: _Common) -> None:
        _seed(seed)
        self.target, self.width, self.seed, self.common = target, width, seed, common
        self.model = target.build(width)
        check_model(target, self.model, width)
        self.optimizer = target.optimizer(self.model, width)
        check_optimizer(target, self.optimizer)
        self.data = self.probed = common.data
        self.tensors = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        self.start = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.sizes = {name: rms(tensor) for name, tensor in self.start.items()}
        self.rows: list[Row] = []
        self.optimizers: dict[str, str] = {}
        self.reached: set[str] = set()
        """Tensors to which a gradient came."""
        modules = dict(self.model.named_modules())
        for name, tensor in self.tensors.items():
            owner = type(modules[name.rpartition(".")[0]]).__name__
            self.optimizers[name] = _optimizer_of(self.optimizer, tensor)
            known = common.facts.setdefault(name, TensorFacts(name, {}, owner, self.optimizers[name]))
            known.shapes[width] = tuple(tensor.shape)
            if self.optimizers[name] == NOT_OPTIMIZED:
                known.not_optimized.add(width)

    def run(self, steps: int, *, effects: bool) -> list[Row]:
        for name, size in self.sizes.items():
            self._add("tensor", name, "init", size)
        self._sensitivities()
        before, last = self._train(steps)
        self._activations(before)
        for name, output in last.outputs.items():
            if name in before.outputs and before.outputs[name].shape == output.shape:
                self._add("module", name, "change", rms(output - before.outputs[name]))
        if effects:
            self._effects()
        self._updates()
        return self.rows

    def _activations(self, seen: Seen) -> None:
        for name, size in seen.sizes.items():
            self._add("module", name, "activation", size)
        self._add("module", "", "output", rms(seen.output))

    def _add(self, kind: str, name: str, statistic: str, value: float) -> None:
        self.rows.append(Row(self.width, self.seed, kind, name, statistic, value))

    def _forward(self, data: Any) -> Tensor:
        """The model's output, with its graph where gradients are enabled; random numbers are the same every time."""
        _seed(self.seed)
        seen = Seen(self.target, self.model, record=False)
        with seen.watching():
            check_loss(self.target, self.target.loss(self.model, data), trained=False)
        return seen.output

    def _train(self, steps: int) -> tuple[Seen, Seen]:
        """Do the steps; return what the first forward pass and the last one, before the last update, went through.

        It ends before the step whose loss is not finite.
        """
        watched = {step: Seen(self.target, self.model, record=True) for step in (0, steps - 1)}
        for step in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            _seed(self.seed)
            with watched[step].watching() if step in watched else nullcontext():
                loss = check_loss(self.target, self.target.loss(self.model, self.data), trained=True)
            if not self._finite_loss(loss):
                return watched[0], watched[steps - 1]
            loss.backward()  # type: ignore[no-untyped-call]
            self._note_reached()
            if step == 0 and self.width == self.common.widths[-1]:
                for name, tensor in self.tensors.items():
                    if tensor.grad is not None:
                        self._add("tensor", name, "gradient", rms_of_nonzero(tensor.grad))
            self.optimizer.step()
            after_step = getattr(self.target, "after_step", None)
            if after_step is not None:
                after_step(self.model, self.optimizer, step)
        with torch.no_grad():
            _seed(self.seed)
            # On the part that the sensitivities took: whether it is finite is all that is asked.
            self._finite_loss(check_loss(self.target, self.target.loss(self.model, self.probed), trained=False))
        return watched[0], watched[steps - 1]

    def _finite_loss(self, loss: Tensor) -> bool:
        """Record the loss, and say whether it is a finite number."""
        value = float(loss.detach())
        self._add("module", "", "loss", value)
        return math.isfinite(value)

    def _note_reached(self) -> None:
        for name, tensor in self.tensors.items():
            if name not in self.reached and tensor.grad is not None and bool(tensor.grad.any()):
                self.reached.add(name)

    def _sensitivities(self) -> None:
        # Not the seed that the model was initialized from: the same stream again would be correlated with its weights.
        generator = torch.Generator().manual_seed(NUDGE_SEED + self.seed)
        changed = self._draw_zeros(generator) | self._shrink_blocks()
        output, data = self._with_attention_logits() if self.common.attention else self._part()
        self.probed = data
        gradients, signs = self._gradients(output)
        reference = output.detach()
        del output
        finite = bool(reference.isfinite().all())
        with torch.no_grad():
            if self.seed == 0 and self.width == self.common.widths[-1]:
                self.common.by_change = finite and not self._agree(gradients, signs, reference, data, changed)
            norms = {} if self.common.by_change else {name: norm(gradient) for name, gradient in gradients.items()}
            found = {name: value for name, value in norms.items() if math.isfinite(value)}
            scale = math.sqrt(reference.numel())
            for name in self.tensors if finite else ():
                value = found[name] / scale if name in found else self._by_change(name, reference, data, generator)
                self._add("tensor", name, "sensitivity", value)
            if self.seed == 0 and self.width == self.common.widths[0]:
                self._curvatures(reference, data, generator)
            for name in changed:
                self.tensors[name].copy_(self.start[name])

    def _with_attention_logits(self) -> tuple[Tensor, Any]:
        logits = AttentionLogits(self.model, self.common.head_dims, self.width)
        with logits:
            found = self._part()
        for name, value in logits.sizes.items():
            self._add("module", name, "attention_logits", value)
        self.common.attention = bool(logits.sizes)
        return found

    @torch.no_grad()
    def _shrink_blocks(self) -> set[str]:
        """For depth: make the blocks' tensors smaller, and name them."""
        blocks = {name for name in self.tensors if self.common.layers is not None and self.common.layers.in_blocks(name)}
        for name in blocks:
            self.tensors[name].mul_(SHRINK)
        return blocks

    @torch.no_grad()
    def _draw_zeros(self, generator: torch.Generator) -> set[str]:
        """Fill the tensors that start at zero with random numbers, and name them."""
        drawn = {name: tensor for name, tensor in self.tensors.items() if self.sizes[name] == 0}
        for name, tensor in drawn.items():
            # An embedding's rows are inputs, whose entries are of order one at every width.
            fan_in = 1 if self.common.facts[name].owner == "Embedding" else max(1, tensor[0].numel())
            scale = 1.0 / math.sqrt(fan_in) if tensor.dim() > 1 else RELATIVE_NUDGE
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
        return set(drawn)

    def _gradients(self, output: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Every tensor's gradient of (random signs) . (output), and the signs: all sensitivities from one backward pass.

        A random change of RMS 1 of a tensor moves the output by |J|_F / sqrt(outputs), J the output's Jacobian; and the mean of
        |J^T signs|^2 is |J|_F^2 (Hutchinson's estimator of a trace, no noisier than one random change). Tensors that no gradient
        reaches are absent.
        """
        # The same signs at every width.
        generator = torch.Generator(output.device).manual_seed(NUDGE_SEED + self.seed)
        signs = balanced_signs(output, generator)
        if not output.requires_grad:
            return {}, signs
        try:
            gradients = torch.autograd.grad(output, list(self.tensors.values()), signs, allow_unused=True)
        except RuntimeError:  # a checkpoint or function of the user's that this cannot pass
            return {}, signs
        return {name: item for name, item in zip(self.tensors, gradients, strict=True) if item is not None}, signs

    def _agree(self, gradients: Mapping[str, Tensor], signs: Tensor, reference: Tensor, data: Any, changed: set[str]) -> bool:
        """Whether a small step along all gradients moves the output as they say.

        It does not where they are not the output's derivatives: a detached path, multipliers that act one way only.
        """
        steps = {name: NUDGE_ALONG * rms(self.tensors[name]) / max(rms(item), 1e-30) for name, item in gradients.items()}
        kept = {name: self.tensors[name].detach().clone() if name in changed else self.start[name] for name in gradients}
        for name, item in gradients.items():
            self.tensors[name].add_(item, alpha=steps[name])
        moved = self._forward(data) - reference
        for name, tensor in kept.items():
            self.tensors[name].copy_(tensor)
        predicted = sum(steps[name] * norm(item) ** 2 for name, item in gradients.items())
        return abs(float((moved * signs).sum()) - predicted) < DISAGREE * predicted

    def _by_change(self, name: str, reference: Tensor, data: Any, generator: torch.Generator) -> float:
        """The same by a small random change of one tensor."""
        tensor = self.tensors[name]
        kept = tensor.detach().clone()
        nudge = RELATIVE_NUDGE * rms(kept)
        tensor.add_(nudge * torch.randn(tensor.shape, generator=generator).to(tensor))
        change = rms(self._forward(data) - reference)
        tensor.copy_(kept)
        return change / nudge

    def _curvatures(self, reference: Tensor, data: Any, generator: torch.Generator) -> None:
        """Of the tensors that may be a readout: those of which one dimension grows, raw vectors among them."""
        for name, tensor in self.tensors.items():
            facts = self.common.facts[name]
            if facts.growing == 1 and (tensor.dim() > 1 or facts.raw):
                kept = tensor.detach().clone()
                change = rms(kept) * torch.randn(tensor.shape, generator=generator).to(tensor)
                self._add("tensor", name, "curvature", self._curvature(tensor, change, reference, data))
                tensor.copy_(kept)

    def _part(self) -> tuple[Tensor, Any]:
        """The output on a quarter of the batch, and that quarter; on all of it where the model does not take less."""
        part = _quarter(self.data)
        if part is not None:
            try:
                return self._forward(part), part
            except Exception:  # the user's model has its reasons
                pass
        return self._forward(self.data), self.data

    def _curvature(self, tensor: Tensor, change: Tensor, reference: Tensor, data: Any) -> float:
        """How far the output is from linear in this tensor, over a change as large as itself: 0 for a readout."""
        tensor.add_(change)
        once = self._forward(data) - reference
        tensor.add_(change)
        twice = self._forward(data) - reference
        return rms(twice - 2 * once) / max(rms(once), 1e-30)

    @torch.no_grad()
    def _updates(self) -> None:
        groups = {
            id(tensor): group for inner in _inner(self.optimizer) for group in inner.param_groups for tensor in group["params"]
        }
        for name, tensor in self.tensors.items():
            moved = self.start.pop(name).sub_(tensor)
            size = _spectral(moved) if self.optimizers[name] == "Muon" else rms_of_nonzero(moved)
            self._add("tensor", name, "update", size)
            if size == 0 or name not in self.reached:
                self._add("tensor", name, "reached", float(name in self.reached))
            group = groups.get(id(tensor), {})
            for key in ("lr", "weight_decay", "eps"):
                if key in group:
                    self._add("tensor", name, key, float(group[key]))

    @torch.no_grad()
    def _effects(self) -> None:
        after = self._forward(self.data)
        for name, tensor in self.tensors.items():
            now = tensor.detach().clone()
            tensor.copy_(self.start[name])
            self._add("tensor", name, "effect", rms(self._forward(self.data) - after))
            tensor.copy_(now)


def _seed(seed: int) -> None:
    """torch.manual_seed, without the work that it does for devices that are not there."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _quarter(batch: Any) -> Any:
    """The first quarter of a batch of tensors that share their first dimension, or None where that is not what it is."""
    values = list(batch.values()) if isinstance(batch, dict) else list(batch) if isinstance(batch, (tuple, list)) else [batch]
    if not values or not all(isinstance(value, Tensor) and value.dim() for value in values):
        return None
    lengths = {len(value) for value in values}
    count = min(lengths) // 4
    if len(lengths) > 1 or values[0][:count].numel() < MIN_ENTRIES:
        return None
    if isinstance(batch, dict):
        return {key: value[:count] for key, value in batch.items()}
    return batch[:count] if isinstance(batch, Tensor) else type(batch)(value[:count] for value in values)


def _spectral(matrix: Tensor) -> float:
    """Spectral norm over sqrt(entries): the size of an update of full rank, as Muon's, in the units of one of low rank."""
    flat = matrix.detach().double().flatten(1)
    if not flat.isfinite().all():
        return math.nan
    return float(torch.linalg.matrix_norm(flat, 2)) / math.sqrt(flat.numel())


def _optimizer_of(optimizer: torch.optim.Optimizer, tensor: Tensor) -> str:
    """Class of the optimizer that moves `tensor`."""
    for inner in _inner(optimizer):
        if any(tensor is held for group in inner.param_groups for held in group["params"]):
            return type(inner).__name__
    return NOT_OPTIMIZED


def _inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that one object wraps (Muon beside AdamW, say), listed as its `optimizers`; or itself."""
    return list(getattr(optimizer, "optimizers", [optimizer]))
