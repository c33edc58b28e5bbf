"""From a study's transfer fit to the config of a large run: numbered steps, each with formula, source, value and assumption.

Owns Recommendation. Pure: the target run's config is computed from the study's own run config through `scaling.parametrization`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.axes import AxisFit
from analysis.loss_by_width import predict_loss
from analysis.results import interval_text, number
from analysis.target import TargetConfig
from analysis.transfer import TransferFit
from scaling.accounting import flops_per_token, parameter_counts, run_flops
from scaling.config import RunConfig
from scaling.errors import ConfigError, Fault
from scaling.hyperparameters import HYPERPARAMETERS, with_values
from scaling.parametrization import HORIZON_SOURCE, TensorRule, at_horizon, horizon_betas, tensor_rules
from scaling.schedule import warmup_steps

Interval = tuple[float, float]
NO_INTERVAL: Interval = (math.nan, math.nan)
MAX_STEPS = 2**31 - 1
FAR = 10.0
"""Extrapolation beyond this factor is warned about."""


@dataclass(frozen=True)
class Quantity:
    """A recommended value; the interval is at 90 %, NaN when the study does not determine one."""

    value: float
    interval: Interval = NO_INTERVAL

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "interval": list(self.interval)}


@dataclass(frozen=True)
class Step:
    """One line of the derivation."""

    title: str
    formula: str
    value: str
    source: str
    assumption: str = ""


@dataclass(frozen=True)
class Recommendation:
    """What to type into the large run, how it was derived, and how far to trust it."""

    run: RunConfig
    """The large run; its optimizer holds the values at the base shape, as `mutransfer train` and `explain` take them."""
    target: TargetConfig
    parametrization: str
    hyperparameters: Mapping[str, Quantity]
    tensors: tuple[TensorRule, ...]
    predicted_loss: Quantity
    extrapolation: Mapping[str, float]
    """Target over the largest measured, an axis each."""
    warnings: tuple[str, ...]
    steps: tuple[Step, ...]
    wrong_lr_costs: Mapping[str, float] = field(default_factory=dict)
    """Loss given up at twice and at half the LR, nats, measured at the largest width."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target.model_dump(mode="json"),
            "parametrization": self.parametrization,
            "hyperparameters": {name: quantity.to_dict() for name, quantity in self.hyperparameters.items()},
            "tensors": [rule.to_dict() for rule in self.tensors],
            "predicted_loss": self.predicted_loss.to_dict(),
            "extrapolation": dict(self.extrapolation),
            "wrong_lr_costs": dict(self.wrong_lr_costs),
            "warnings": list(self.warnings),
            "steps": [vars(step) for step in self.steps],
            "run": self.run.model_dump(mode="json"),
        }

    def __str__(self) -> str:
        lr = self.hyperparameters["lr"]
        lines = [
            f"Recommended for {self.target.name} (width {self.run.model.width}, depth {self.run.model.depth}, "
            f"{self.run.tokens:,} tokens): base LR 2^{math.log2(lr.value):.2f} = {lr.value:.3g} "
            f"({lr_range(lr.interval)}: the study's 90 % interval and the horizon exponent's range), {self.parametrization}",
            "",
        ]
        for index, step in enumerate(self.steps, start=1):
            lines.append(f"{index:2}. {step.title}: {step.value}")
            lines.append(f"      {step.formula}   [{step.source}]")
            if step.assumption:
                lines.append(f"      assumes: {step.assumption}")
        if self.warnings:
            lines += ["", "Warnings", *(f"  ! {warning}" for warning in self.warnings)]
        return "\n".join(lines)


def lr_range(interval: Interval) -> str:
    """Ends of an interval of learning rates in words; an end of 0 or infinity is no bound."""
    low, high = interval
    return f"{f'{low:.2g}' if low > 0 else 'unbounded'} to {f'{high:.2g}' if math.isfinite(high) else 'unbounded'}"


def _factor(ratio: float) -> str:
    """A ratio in three or four digits, without an exponent of ten."""
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.4g}"


def check_target(target: TargetConfig, template: RunConfig, place: Callable[[str], str] = str) -> None:
    """Raise ConfigError with every reason why the study cannot speak about this target.

    place: key -> where it was written, for the message.
    """
    faults = []
    base = template.base.width
    if target.width < base:
        cure = f"give a width of at least {base}, or train the small model directly: a sweep at its own width is cheap"
        faults.append(Fault(place("width"), f"target width {target.width} is smaller than the base width {base}", cure))
    reason = template.model.check_width(target.width)
    if reason:
        faults.append(Fault(place("width"), reason))
    context = target.context or template.model.context
    if target.batch_tokens is not None and target.batch_tokens % context:
        near = max(round(target.batch_tokens / context), 1) * context
        what = f"batch_tokens {target.batch_tokens} is not a multiple of the context {context}"
        faults.append(Fault(place("batch_tokens"), what, f"for example {near}"))
    batch_tokens = target.batch_tokens or template.batch_tokens
    if target.tokens < batch_tokens:
        faults.append(Fault(place("tokens"), f"{target.tokens} tokens are less than one batch of {batch_tokens}"))
    elif target.tokens // batch_tokens > MAX_STEPS:
        faults.append(Fault(place("tokens"), f"{target.tokens} tokens are more than {MAX_STEPS} steps of {batch_tokens} tokens"))
    if target.gpus is not None and not faults:
        sequences = batch_tokens // context
        if sequences % target.gpus.count:
            near = max(round(sequences / target.gpus.count), 1) * target.gpus.count * context
            what = f"a batch of {sequences} sequences does not divide over {target.gpus.count} GPUs"
            faults.append(Fault(place("gpus"), what, f"batch_tokens: {near}, or another number of GPUs"))
    if faults:
        raise ConfigError(*faults)


def recommend(
    template: RunConfig,
    fit: TransferFit,
    target: TargetConfig,
    losses: Mapping[int, Quantity],
    lines: Sequence[AxisFit] = (),
) -> Recommendation:
    """The recommendation for `target`, from runs like `template` whose optimum over widths is `fit`.

    template: any run of the study in the recommended parametrization; losses: width -> best loss; lines: other hyperparameters that
    were varied, whose best values replace the template's. `check_target` first.
    Raises ConfigError when no width has an optimum to start from.
    """
    usable = [optimum for optimum in fit.optima if optimum.censored is None]
    if not usable:
        cure = "extend the LR range of the study"
        raise ConfigError(Fault("", f"no width has an interior best LR under {fit.parametrization}", cure))
    derivation = _Derivation(template, fit, target, losses)
    derivation.take(lines)
    return derivation.recommendation()


class _Derivation:
    """Builds the steps in the order in which a person would."""

    def __init__(self, template: RunConfig, fit: TransferFit, target: TargetConfig, losses: Mapping[int, Quantity]) -> None:
        self.template, self.fit, self.target, self.losses = template, fit, target, losses
        self.steps: list[Step] = []
        self.lines: list[Step] = []
        self.warnings: list[str] = []
        usable = [optimum for optimum in fit.optima if optimum.censored is None]
        self.largest = max(usable, key=lambda optimum: optimum.width)
        # The nearest measured width; of two equally near ones the larger.
        self.start = min(usable, key=lambda optimum: (abs(math.log2(target.width / optimum.width)), -optimum.width))
        context = target.context or template.model.context
        batch_size = (target.batch_tokens or template.batch_tokens) // context
        self.train_steps = max(target.tokens // (batch_size * context), 1)
        shape = {"depth": target.depth or template.model.depth, "context": context, "width": target.width}
        self.model = template.model.model_copy(update=shape | ({"vocab_size": target.vocab_size} if target.vocab_size else {}))
        self.batch_size, self.batch_tokens = batch_size, batch_size * context
        self.tokens_ratio = self.train_steps * self.batch_tokens / template.tokens
        self.batch_ratio = self.batch_tokens / template.batch_tokens
        self.steps_ratio = self.tokens_ratio / self.batch_ratio

    def take(self, lines: Sequence[AxisFit]) -> None:
        """Start from the best measured values of other hyperparameters, those of the width nearest to the target's."""
        values = {}
        for line in lines:
            own = HYPERPARAMETERS[line.name].of(self.template)
            widths = [width for width in line.log2_lrs if (best := line.best(width)) and all(map(math.isfinite, best[1]))]
            if not widths:
                self.warnings.append(
                    f"{line.name} was varied, and no width bounds its optimum on both sides: the study's own {own:.4g} is kept"
                )
                continue
            width = min(widths, key=lambda width: (abs(math.log2(self.target.width / width)), -width))
            best = line.best(width)
            assert best is not None, "chosen for having one"
            values[line.name] = best[0]
            self.lines.append(
                Step(
                    f"{line.name} at the study's tokens and batch",
                    f"optimum of a line through the best LR at width {width}, 2^{line.log2_lrs[width]:g}; the study's own: {own:.4g}",
                    f"{best[0]:.4g}, 90 % interval {best[1][0]:.3g} to {best[1][1]:.3g}",
                    f"this study: {line.transfer.verdict} over widths, slope {number(line.transfer.slope.value)} octaves a doubling",
                    "near its optimum it can be chosen apart from the LR",
                )
            )
            if line.transfer.verdict != "transfers":
                self.warnings.append(f"the best {line.name} is not shown to transfer: '{line.transfer.verdict}'")
        self.template = with_values(self.template, values)

    def recommendation(self) -> Recommendation:
        self._shape()
        self.steps += self.lines
        base_lr = self._base_lr()
        lr = self._horizon_lr(base_lr)
        run = self._run(lr.value)
        rules = tuple(tensor_rules(run))
        self._width_rule(rules)
        self._rest(run)
        predicted = self._predicted_loss()
        costs = self._wrong_lr()
        self._time(run)
        optimizer = run.optimizer
        quantities = {
            "lr": lr,
            "batch_tokens": Quantity(float(self.batch_tokens)),
            "tokens": Quantity(float(run.tokens)),
            "steps": Quantity(float(run.training.steps)),
            "warmup_steps": Quantity(float(warmup_steps(run.schedule, run.training.steps))),
            "weight_decay": Quantity(optimizer.weight_decay),
            "beta1": Quantity(optimizer.beta1),
            "beta2": Quantity(optimizer.beta2),
            "eps": Quantity(optimizer.eps),
            "clip_norm": Quantity(math.nan if optimizer.clip_norm is None else optimizer.clip_norm),
        }
        extrapolation = {
            "width": self.model.width / self.largest.width,
            "depth": self.model.depth / self.template.model.depth,
            "tokens": self.tokens_ratio,
            "batch": self.batch_ratio,
        }
        self._warn(extrapolation)
        kind = self.fit.parametrization
        return Recommendation(
            run, self.target, kind, quantities, rules, predicted, extrapolation, tuple(self.warnings), tuple(self.steps), costs
        )

    def _shape(self) -> None:
        counts = parameter_counts(self.model)
        value = f"width {self.model.width}, depth {self.model.depth}, {self.model.heads} heads of {self.model.head_size}, "
        value += f"{counts.total:,} parameters ({counts.non_embedding:,} without embeddings)"
        ratio = self.model.width / self.template.base.width
        self.steps.append(
            Step("Shape", f"m_N = {self.model.width} / {self.template.base.width} = {ratio:g}", value, "the target file")
        )

    def _base_lr(self) -> Quantity:
        """The optimum of the nearest measured width, and an interval that lets the measured slope go on to the target."""
        optimum, slope = self.start, self.fit.slope
        doublings = math.log2(self.model.width / optimum.width)
        low, high = optimum.interval
        if doublings:
            # Two widths give no slope: nothing bounds where the optimum goes.
            slowest, fastest = (-math.inf, math.inf) if math.isnan(slope.value) else slope.interval
            ends = (slowest * doublings, fastest * doublings)
            low, high = low + min(*ends, 0.0), high + max(*ends, 0.0)
        self.steps.append(
            Step(
                "Base LR",
                f"optimum measured at width {optimum.width}; interval + slope's interval x {doublings:.2f} doublings",
                f"2^{optimum.log2_lr:.2f} = {2**optimum.log2_lr:.3g}, 90 % interval 2^{interval_text((low, high))}",
                f"this study, {self.fit.parametrization}: {self.fit.verdict}, slope {number(slope.value)} a doubling",
                "the optimum goes on as it did over the measured widths" if doublings else "",
            )
        )
        if self.fit.verdict != "transfers":
            self.warnings.append(f"the study's verdict is '{self.fit.verdict}', not 'transfers': do not rely on this LR")
        smallest = min(item.width for item in self.fit.optima)
        if self.model.width < smallest:
            self.warnings.append(f"width {self.model.width} lies below the smallest measured one, {smallest}")
        return Quantity(2**optimum.log2_lr, (2**low, 2**high))

    def _horizon_lr(self, base_lr: Quantity) -> Quantity:
        ratio, exponent, ends = self.steps_ratio, self._horizon_exponent(), self.target.horizon_exponent_range
        if self.template.optimizer.horizon_fault:
            ends = (exponent, exponent)
        factors = [ratio**-power for power in (exponent, *ends)]
        if self.template.base.steps:
            # The run's own rule carries its base LR to its number of steps: what is left is how far off that rule's exponent may be.
            factors = [factor / factors[0] for factor in factors]
        low, high = base_lr.interval[0] * min(factors), base_lr.interval[1] * max(factors)
        value = base_lr.value * factors[0]
        steps = f"S = tokens x{_factor(self.tokens_ratio)} / batch x{_factor(self.batch_ratio)} = {_factor(ratio)}"
        self.steps.append(
            Step(
                "LR at the target's tokens and batch",
                f"base LR * S^-{exponent:g}; {steps}",
                f"{value:.3g}; {lr_range((low, high))} with the study's 90 % interval and exponents {ends[0]:g} to {ends[1]:g}",
                HORIZON_SOURCE,
                "" if ratio == 1 else "a published rule, not measured in this study; the batch stays below the critical batch",
            )
        )
        return Quantity(value, (low, high))

    def _horizon_exponent(self) -> float:
        """The target's; 0 where no rule is known for the optimizer, whose LR then stays."""
        return 0.0 if self.template.optimizer.horizon_fault else self.target.horizon_exponent

    def _run(self, lr: float) -> RunConfig:
        """The large run, with everything that the study holds fixed taken over."""
        optimizer = self.template.optimizer
        if self.target.betas == "scale":
            base_steps = self.template.base.steps
            ratio = self.train_steps / base_steps if base_steps else self.steps_ratio
            try:
                beta1, beta2 = horizon_betas((optimizer.beta1, optimizer.beta2), ratio)
            except ValueError as error:
                raise ConfigError(Fault("betas", str(error), "betas: keep, or a smaller batch")) from None
            update = {"betas_rule": "horizon"} if base_steps else {"beta1": beta1, "beta2": beta2}
            optimizer = optimizer.model_copy(update=update)
        if self.template.base.steps:
            optimizer = optimizer.model_copy(update={"lr": lr, "horizon_exponent": self._horizon_exponent()})
        else:
            optimizer = at_horizon(optimizer, self.steps_ratio, self._horizon_exponent()).model_copy(update={"lr": lr})
        training = self.template.training.model_copy(
            update={"steps": self.train_steps, "batch_size": self.batch_size, "micro_batch_size": self._micro_batch(), "seed": 0}
        )
        base = self.template.base.model_copy(update={"depth": self.template.base.depth or self.template.model.depth})
        updates = {"model": self.model, "optimizer": optimizer, "training": training, "base": base}
        return RunConfig.model_validate(self.template.model_copy(update=updates).model_dump())

    def _micro_batch(self) -> int | None:
        gpus = self.target.gpus
        if gpus is None or gpus.micro_batch_size is None:
            return None
        per_gpu = self.batch_size // gpus.count
        if per_gpu % gpus.micro_batch_size:
            self.warnings.append(f"{per_gpu} sequences a GPU are no multiple of its micro_batch_size; left out")
            return None
        return gpus.micro_batch_size

    def _width_rule(self, rules: tuple[TensorRule, ...]) -> None:
        lrs = {rule.role: rule for rule in reversed(rules)}
        for role, rule in reversed(lrs.items()):
            value = f"LR {rule.lr:.3g}, multiplier {rule.multiplier:.3g}, eps {rule.eps:.2g}, lr * weight decay "
            value += (
                f"{rule.lr * rule.weight_decay:.2g}, init std {'ones' if math.isnan(rule.init_std) else f'{rule.init_std:.3g}'}"
            )
            parts = (f"LR = {rule.formulas['lr']}", f"A = {rule.formulas['multiplier']}", f"std = {rule.formulas['init_std']}")
            self.steps.append(Step(f"{role} tensors, {rule.name} first", ", ".join(parts), value, rule.source))

    def _rest(self, run: RunConfig) -> None:
        schedule, optimizer, steps = run.schedule, run.optimizer, run.training.steps
        same = "as in the study"
        value = f"{steps:,} steps of {self.batch_tokens:,} tokens"
        self.steps.append(
            Step("Steps and batch", f"{self.target.tokens:,} tokens / {self.batch_tokens:,}", value, "the target file")
        )
        fraction = f"warm-up {schedule.warmup_fraction:g} of the steps"
        value = f"{warmup_steps(schedule, steps):,} steps of warm-up, then {schedule.kind}"
        value += f" (decay over the last {schedule.decay_fraction:g})" if schedule.kind == "wsd" else ""
        self.steps.append(Step("Schedule", fraction, value, same, "the shares of warm-up and decay stay right"))
        value = f"betas {optimizer.beta1:g}, {optimizer.beta2:g}; eps {optimizer.eps:.2g}; "
        value += f"weight decay {optimizer.weight_decay:g}; clipping at {optimizer.clip_norm}; {run.training.precision}"
        exponent = self._horizon_exponent()
        rule = f"eps * S^{exponent:g}, weight decay * S^-{exponent:g}, betas: {self.target.betas}"
        self.steps.append(Step(f"{optimizer.kind} at the base shape", rule, value, f"{same}; {HORIZON_SOURCE}"))

    def _predicted_loss(self) -> Quantity:
        study = self.template.model
        same = {
            "tokens": abs(self.tokens_ratio - 1) <= 0.01,
            "batch": abs(self.batch_ratio - 1) <= 0.01,
            "depth": self.model.depth == study.depth,
            "vocabulary": self.model.vocab_size == study.vocab_size,
            "context": self.model.context == study.context,
        }
        others = [name for name, equal in same.items() if not equal]
        if others:
            words = (
                f"{', '.join(others)} of the target differ{'s' if len(others) == 1 else ''} from the study's, which measured one"
            )
            self.warnings.append(f"no loss is predicted: {words}")
            return Quantity(math.nan)
        measured = self.losses.get(self.model.width)
        if measured is not None and math.isfinite(measured.value):
            value = f"{measured.value:.3f}, 90 % interval {interval_text(measured.interval, 3)} nats per token"
            self.steps.append(Step("Predicted loss", "the best loss at this width", value, "this study, measured at this width"))
            return measured
        prediction = predict_loss({width: loss.value for width, loss in self.losses.items()}, self.model.width)
        quantity = Quantity(prediction.value, prediction.interval)
        low, high = quantity.interval
        value = (
            "unknown"
            if math.isnan(quantity.value)
            else f"between {low:.3f} and {high:.3f} nats per token (a bracket, not a 90 % interval)"
        )
        self.steps.append(
            Step("Predicted loss", prediction.formula, value, "this study's best losses by width", prediction.assumption)
        )
        return quantity

    def _wrong_lr(self) -> dict[str, float]:
        costs = {f"x{factor:g}": self.fit.cost_at(self.largest.width, math.log2(factor)) for factor in (0.5, 2.0)}
        text = ", ".join(
            f"LR {name}: {cost:+.3f} nats" if math.isfinite(cost) else f"LR {name}: not measured" for name, cost in costs.items()
        )
        where = f"width {self.largest.width} and {self.template.tokens:,} tokens"
        formula = f"loss curve at {where}, read an octave off its optimum"
        self.steps.append(Step(f"What a wrong LR costs, at {where}", formula, text, "this study", "the curve keeps its shape"))
        return costs

    def _time(self, run: RunConfig) -> None:
        flops, gpus = run_flops(run), self.target.gpus
        value = f"{flops:.3g} training FLOPs ({flops_per_token(run.model):.3g} a token)"
        if gpus is not None and gpus.peak_tflops and gpus.mfu:
            hours = flops / (gpus.count * gpus.peak_tflops * 1e12 * gpus.mfu) / 3600
            time = f"{hours:,.1f} h" if hours >= 1 else f"{3600 * hours:,.0f} s"
            value += f"; {time} on {gpus.count} GPUs at {gpus.mfu:.0%} of {gpus.peak_tflops:g} TFLOP/s"
        elif gpus is not None:
            value += "; give gpus.peak_tflops and gpus.mfu for a time"
        formula = "6 per matmul parameter and token, and causal attention"
        self.steps.append(Step("Compute", formula, value, "scaling.accounting.flops_per_token"))

    def _warn(self, extrapolation: Mapping[str, float]) -> None:
        for axis, factor in extrapolation.items():
            if factor > FAR or factor < 1 / FAR:
                self.warnings.append(f"{axis} lies x{_factor(factor)} from what was measured, beyond x{FAR:g}")
        if extrapolation["depth"] != 1 and self.fit.parametrization != "completep":
            self.warnings.append("muP carries the LR over width only; depth differs from the study's: study the target's depth")
        if self.model.vocab_size != self.template.model.vocab_size:
            self.warnings.append("the vocabulary differs from the study's, and with it the data: the study's LR is a guess there")
        if self.model.context != self.template.model.context:
            self.warnings.append("the context differs from the study's")
        unknown = self.template.optimizer.horizon_fault
        if unknown and self.steps_ratio != 1:
            self.warnings.append(f"{unknown}: its values are left as they are")
        gpus = self.target.gpus
        if gpus is not None and self.template.runtime.device == "cpu":
            self.warnings.append("data, context, precision and device are the study's: set those of the large run in its config")
        if self.fit.parametrization == "sp":
            self.warnings.append("recommended under a parametrization without transfer rules")


__all__ = ["Quantity", "Recommendation", "Step", "check_target", "recommend"]
