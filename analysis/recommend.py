"""From a study's transfer fit to the config of a large run: numbered steps, each with formula, source, value and assumption.

Owns `recommend`. Pure: the target run's config is computed from the study's own run config through
`scaling.parametrization`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from analysis.axes import AxisFit
from analysis.batch_choice import BatchChoice
from analysis.budget_shape import BudgetShape
from analysis.decay_timescale import timescale_step
from analysis.layout_choice import compute_step, micro_batch, plan_layout
from analysis.loss_at_target import loss_at_target
from analysis.lr_exponents import LrExponent, lr_exponents
from analysis.lr_step import carried_lr, horizon_rule, own_rule_step
from analysis.measured import extrapolation, far_warnings, measured_of
from analysis.optimizer_step import optimizer_step, optimizer_values
from analysis.recommendation import NO_INTERVAL, Quantity, Recommendation, Step, lr_range
from analysis.results import interval_text, number
from analysis.target import TargetConfig
from analysis.target_check import check_target
from analysis.transfer import TransferFit
from scaling.accounting import parameter_counts
from scaling.config import RunConfig
from scaling.errors import ConfigError, Fault
from scaling.hyperparameters import HYPERPARAMETERS, with_values
from scaling.parametrization import TensorRule, at_horizon, horizon_betas, tensor_rules
from scaling.schedule import warmup_steps

if TYPE_CHECKING:
    from analysis.fit_result import ScalingLawFit

DROPPED = 0.01
"""Share of the target's tokens that whole steps may leave over without a warning."""


def recommend(
    template: RunConfig,
    fit: TransferFit,
    target: TargetConfig,
    losses: Mapping[int, Quantity],
    axes: Sequence[AxisFit] = (),
    batch: BatchChoice | None = None,
    budget: BudgetShape | None = None,
    law: ScalingLawFit | None = None,
    place: Callable[[str], str] = str,
) -> Recommendation:
    """The recommendation for `target`, from runs like `template` whose optimum over widths is `fit`.

    template: any run of the study in the recommended parametrization; losses: width -> best loss; axes: what else was varied:
    other hyperparameters, whose best values replace the template's, and tokens, batch and depth, whose LR exponents replace the rule's.
    batch: what was measured of the batch; taken where the target states none. budget: where the target's width and tokens come from.
    law: of the loss, for targets that differ from the study in tokens or depth. place: as in `check_target`.
    Raises ConfigError when no width has an optimum to start from, and for devices that are not known.
    """
    usable = [optimum for optimum in fit.optima if optimum.censored is None]
    if not usable:
        finite = any(math.isfinite(optimum.best_loss) for optimum in fit.optima)
        what = "an interior best LR" if finite else "a finite loss"
        cure = "extend the LR range of the study" if finite else "look at the runs: all of them diverged, or lost their losses"
        raise ConfigError(Fault("", f"no width has {what} under {fit.parametrization}", cure))
    chosen = chosen_batch(target, template, batch)
    check_target(target.model_copy(update={"batch_tokens": chosen}), template, place)
    derivation = _Derivation(template, fit, target, losses, batch, budget, law, place)
    derivation.take([axis for axis in axes if axis.is_line])
    return derivation.recommendation([axis for axis in axes if not axis.is_line])


def chosen_batch(target: TargetConfig, template: RunConfig, batch: BatchChoice | None) -> int:
    """Tokens a step: as the target states, else as was measured, rounded to the devices, else the study's."""
    if target.batch_tokens is not None or batch is None:
        return target.batch_tokens or template.batch_tokens
    gpus, context = target.gpus, target.context or template.model.context
    return batch.rounded(context, gpus.count if gpus else None, gpus.micro_batch_size if gpus else None)


class _Derivation:
    """Builds the steps in the order in which a person would."""

    def __init__(
        self, template: RunConfig, fit: TransferFit, target: TargetConfig, losses: Mapping[int, Quantity],
        batch: BatchChoice | None, budget: BudgetShape | None, law: ScalingLawFit | None, place: Callable[[str], str],
    ) -> None:  # fmt: skip
        self.template, self.fit, self.target, self.losses = template, fit, target, losses
        self.batch, self.law, self.place = batch, law, place
        self.rule = horizon_rule(template.optimizer, template.base.steps, target)
        self.exponents: dict[str, LrExponent] = {}
        self.steps: list[Step] = [budget.step] if budget else []
        self.lines: list[Step] = []
        self.warnings: list[str] = [*budget.warnings] if budget else []
        self.sized_by = "the budget" if budget else "the target file"
        usable = [optimum for optimum in fit.optima if optimum.censored is None]
        self.largest = max(usable, key=lambda optimum: optimum.width)
        # The nearest measured width; of two equally near ones the larger.
        self.start = min(usable, key=lambda optimum: (abs(math.log2(target.width / optimum.width)), -optimum.width))
        context = target.context or template.model.context
        batch_size = chosen_batch(target, template, batch) // context
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

    def recommendation(self, levels: Sequence[AxisFit]) -> Recommendation:
        measured = measured_of(self.template, self.fit, levels)
        self._shape()
        self._batch()
        self.steps += self.lines
        lr = self._lr_at_target(self._base_lr(), levels)
        run = self._run(lr.value)
        own = own_rule_step(run, lr.value)
        self.steps += [own] if own else []
        rules = tuple(tensor_rules(run))
        self._width_rule(rules)
        self._rest(run)
        self._decay(run)
        found = loss_at_target(self.template, self.model, run.tokens, self.batch_tokens, self.losses, measured, self.law)
        self.steps += found.steps
        self.warnings += found.warnings
        costs = self._wrong_lr()
        layout = plan_layout(run, self.target.gpus, self.place)
        step, doubts_of_layout = compute_step(run, self.target.gpus, layout)
        self.steps.append(step)
        micro, doubts_of_micro = micro_batch(self.batch_size, self.target.gpus, layout)
        run = run.model_copy(update={"training": run.training.model_copy(update={"micro_batch_size": micro})})
        factors = extrapolation(measured, self.model.width, self.model.depth, run.tokens, self.batch_tokens)
        self.warnings += [*doubts_of_layout, *doubts_of_micro, *far_warnings(factors)]
        self._warn()
        return Recommendation(
            run, self.target, self.fit.parametrization, self._quantities(run, lr), rules, found.loss, factors,
            tuple(self.warnings), tuple(self.steps), costs, self.exponents, self.batch, layout,
        )  # fmt: skip

    def _quantities(self, run: RunConfig, lr: Quantity) -> dict[str, Quantity]:
        numbers = {
            "tokens": run.tokens,
            "steps": run.training.steps,
            "warmup_steps": warmup_steps(run.schedule, run.training.steps),
            **optimizer_values(run),
        }
        chosen = self.batch is not None and self.target.batch_tokens is None
        batch = Quantity(float(self.batch_tokens), self.batch.interval if self.batch and chosen else NO_INTERVAL)
        found = {name: Quantity(math.nan if value is None else float(value)) for name, value in numbers.items()}
        return {"lr": lr, "batch_tokens": batch, **found}

    def _shape(self) -> None:
        counts = parameter_counts(self.model)
        value = f"width {self.model.width}, depth {self.model.depth}, {self.model.heads} heads of {self.model.head_size}, "
        value += f"{counts.total:,} parameters ({counts.non_embedding:,} without embeddings)"
        ratio = self.model.width / self.template.base.width
        self.steps.append(
            Step("Shape", f"m_N = {self.model.width} / {self.template.base.width} = {ratio:g}", value, self.sized_by)
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

    def _batch(self) -> None:
        """Where the batch comes from; what was measured stands beside a batch that the target states."""
        batch, stated = self.batch, self.target.batch_tokens is not None
        if batch is None:
            return
        size = f"{self.batch_tokens:,} tokens ({self.batch_size:,} sequences)"
        rounding = "down" if batch.ceiling else "to the nearest"
        how = "" if stated else f", rounded {rounding} to what the devices share"
        value = f"{size}, as the target file states" if stated else size
        self.steps.append(Step("Batch", f"{batch.text()}{how}", value, batch.source, batch.assumption))
        self.warnings += batch.warnings(self.batch_tokens)

    def _lr_at_target(self, base_lr: Quantity, levels: Sequence[AxisFit]) -> Quantity:
        """By exponents that the study measured over tokens, batch and depth, and the rule's for what it did not vary."""
        ratios = {"tokens": self.tokens_ratio, "batch_tokens": self.batch_ratio}
        ratios["depth"] = self.model.depth / self.template.model.depth
        use_measured, known = self.target.exponents == "measured", not self.rule.fault
        self.exponents, unused = lr_exponents(ratios, self.rule.exponent, levels, use_measured, known)
        lr, step, doubts = carried_lr(base_lr, self.exponents, self.rule)
        self.steps.append(step)
        self.warnings += [*unused, *doubts]
        return lr

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
            optimizer = optimizer.model_copy(update={"lr": lr})
        else:
            optimizer = at_horizon(optimizer, self.steps_ratio, self.rule.carried).model_copy(update={"lr": lr})
        training = self.template.training.model_copy(
            update={"steps": self.train_steps, "batch_size": self.batch_size, "micro_batch_size": None, "seed": 0}
        )
        base = self.template.base.model_copy(update={"depth": self.template.base.depth or self.template.model.depth})
        updates = {"model": self.model, "optimizer": optimizer, "training": training, "base": base, "recommended": None}
        return RunConfig.model_validate(self.template.model_copy(update=updates).model_dump())

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
        schedule, steps = run.schedule, run.training.steps
        formula = f"{self.target.tokens:,} tokens / {self.batch_tokens:,}"
        left = self.target.tokens - run.tokens
        value = f"{steps:,} steps of {self.batch_tokens:,} tokens = {run.tokens:,} tokens"
        self.steps.append(Step("Steps and batch", formula, value, self.sized_by))
        if left > DROPPED * self.target.tokens:
            what = f"{left:,} of the target's {self.target.tokens:,} tokens are left over: {value}"
            self.warnings.append(f"{what}; give tokens that are a multiple of the batch, or a smaller batch")
        fraction = f"warm-up {schedule.warmup_fraction:g} of the steps"
        value = f"{warmup_steps(schedule, steps):,} steps of warm-up, then {schedule.kind}"
        value += f" (decay over the last {schedule.decay_fraction:g})" if schedule.kind == "wsd" else ""
        self.steps.append(Step("Schedule", fraction, value, "as in the study", "the shares of warm-up and decay stay right"))
        self.steps.append(optimizer_step(run, self.rule, self.target.betas))

    def _decay(self, run: RunConfig) -> None:
        optimizer = self.template.optimizer.model_copy(update={"lr": 2**self.start.log2_lr})
        model = self.template.model.model_copy(update={"width": self.start.width})
        step, warnings = timescale_step(run, self.template.model_copy(update={"optimizer": optimizer, "model": model}))
        self.steps += [step] if step else []
        self.warnings += warnings

    def _wrong_lr(self) -> dict[str, float]:
        costs = {f"x{factor:g}": self.fit.cost_at(self.largest.width, math.log2(factor)) for factor in (0.5, 2.0)}
        text = ", ".join(
            f"LR {name}: {cost:+.3f} nats" if math.isfinite(cost) else f"LR {name}: not measured" for name, cost in costs.items()
        )
        where = f"width {self.largest.width} and {self.template.tokens:,} tokens"
        formula = f"loss curve at {where}, read an octave off its optimum"
        self.steps.append(Step(f"What a wrong LR costs, at {where}", formula, text, "this study", "the curve keeps its shape"))
        return costs

    def _warn(self) -> None:
        deeper = self.model.depth != self.template.model.depth
        if deeper and not self.exponents["depth"].measured and self.fit.parametrization != "completep":
            self.warnings.append("muP carries the LR over width only; depth differs from the study's: study the target's depth")
        if self.model.vocab_size != self.template.model.vocab_size:
            self.warnings.append("the vocabulary differs from the study's, and with it the data: the study's LR is a guess there")
        if self.model.context != self.template.model.context:
            self.warnings.append("the context differs from the study's")
        if self.rule.fault and self.steps_ratio != 1:
            lr = "" if all(self.exponents[axis].measured for axis in ("tokens", "batch_tokens")) else "LR, "
            self.warnings.append(f"{self.rule.fault}: its {lr}decay and eps are left as they are")
        if self.target.gpus is not None and self.template.runtime.device == "cpu":
            self.warnings.append("data, context, precision and device are the study's: set those of the large run in its config")
        if self.fit.parametrization == "sp":
            self.warnings.append("recommended under a parametrization without transfer rules")


__all__ = ["Quantity", "Recommendation", "Step", "check_target", "chosen_batch", "lr_range", "recommend"]
