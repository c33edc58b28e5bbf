"""The rules that carry hyperparameters from a base shape to another: applied, in one place, torch-free.

`scaling.tables` has the powers of the ratios for every parametrization; here they meet a run: its shapes, its optimizer, its init and
its number of steps. The model's init, the optimizer's groups, the forward multipliers, `explain` and the recommendation all read this
file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaling.config import InitConfig, OptimizerConfig, OptimizerKind, ParametrizationConfig, RunConfig
from scaling.horizon import HORIZON_SOURCE, horizon_betas, horizon_factors
from scaling.shapes import Role, TensorSpec, transformer_tensors
from scaling.tables import ABSOLUTE, DECAY_RULES, GRADIENT_DECAY, ONE, Powers, Ratio, Row, formula, rows_of, value

GAINS: tuple[Role, ...] = ("block_gain", "qk_gain", "final_gain")
MUON_EPS = 1e-7
"""torch.optim.Muon's default, which stands beside the Frobenius norm of a gradient."""


@dataclass(frozen=True)
class TensorRule:
    """What the rules say for one tensor: absolute values at the target, and how they came about."""

    name: str
    role: Role
    shape: tuple[int, ...]
    fan_in: int
    fan_out: int
    multiplier: float
    init_std: float
    """NaN for gains, which start at 1."""
    lr: float
    weight_decay: float
    eps: float
    source: str
    formulas: Mapping[str, str]
    optimizer: OptimizerKind = "adamw"
    """What moves it: under muon, AdamW moves all but the hidden matrices."""

    def to_dict(self) -> dict[str, Any]:
        """JSON view; `init_std` is null for gains."""
        keys = ("name", "role", "fan_in", "fan_out", "multiplier", "lr", "weight_decay", "eps", "source", "optimizer")
        std = None if math.isnan(self.init_std) else self.init_std
        lr_weight_decay = self.lr * self.weight_decay
        shape, formulas = list(self.shape), dict(self.formulas)
        values = {key: getattr(self, key) for key in keys}
        return values | {"shape": shape, "init_std": std, "lr_weight_decay": lr_weight_decay, "formulas": formulas}


def tensor_rules(run: RunConfig) -> list[TensorRule]:
    """The rule of every tensor of `run`'s model; `run.optimizer` and `run.parametrization` hold the values at the base shape."""
    bases = {_layer_free(spec.name): spec for spec in transformer_tensors(run.base_model())}
    table, optimizer = rows_of(run.parametrization), carried(run)
    return [
        _tensor_rule(spec, bases[_layer_free(spec.name)], table[spec.role], optimizer, run)
        for spec in transformer_tensors(run.model)
    ]


def _tensor_rule(spec: TensorSpec, base: TensorSpec, row: Row, optimizer: OptimizerConfig, run: RunConfig) -> TensorRule:
    ratios = _ratios(spec, base, run)
    multiplier = base_multiplier(run.parametrization, spec.role)
    init_std, init_formula = _init_std(spec, base, row, ratios, run)
    settings = optimizer_rule(spec, base, row, optimizer, ratios)
    return TensorRule(
        name=spec.name,
        role=spec.role,
        shape=spec.shape,
        fan_in=spec.fan_in,
        fan_out=spec.fan_out,
        multiplier=multiplier * value(row.multiplier, ratios),
        init_std=init_std,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        source=row.source,
        formulas={"multiplier": formula(f"{multiplier:g}", row.multiplier), "init_std": init_formula}
        | {name: _with_steps(name, words, run) for name, words in settings.formulas.items()},
        optimizer=settings.optimizer,
    )


def _with_steps(name: str, words: str, run: RunConfig) -> str:
    """The formula with the factor that the number of steps puts on the base value, where it puts one."""
    power = run.optimizer.horizon_exponent
    if run.base.steps is None or not power or not words.startswith(name):
        return words
    if name == "weight_decay" and run.optimizer.weight_decay_rule == "independent":
        power *= 2
    sign = "" if name == "eps" else "-"
    return f"{name} * S^{sign}{power:g}{words.removeprefix(name)}"


def _ratios(spec: TensorSpec, base: TensorSpec, run: RunConfig) -> dict[Ratio, float]:
    if run.parametrization.kind in ABSOLUTE:
        return {
            "m_in": float(spec.fan_in),
            "m_out": float(spec.fan_out),
            "m_N": float(run.model.width),
            "m_L": float(run.model.depth),
        }
    base_model = run.base_model()
    return {
        "m_in": spec.fan_in / base.fan_in,
        "m_out": spec.fan_out / base.fan_out,
        "m_N": run.model.width / base_model.width,
        "m_L": run.model.depth / base_model.depth,
    }


def moved_by(kind: OptimizerKind, spec: TensorSpec) -> OptimizerKind:
    """Muon orthogonalizes the updates of hidden matrices; all else, convolutions included, stays with AdamW (torch.optim.Muon)."""
    return "adamw" if kind == "muon" and (spec.role != "hidden" or len(spec.shape) != 2) else kind


def muon_adjustment(fan_out: int, fan_in: int) -> float:
    """Factor that torch.optim.Muon puts on a matrix's LR by itself (adjust_lr_fn "original"): sqrt(max(1, fan_out / fan_in))."""
    return math.sqrt(max(1.0, fan_out / fan_in))


@dataclass(frozen=True)
class OptimizerRule:
    """What the optimizer gets for one tensor, and how it came about."""

    optimizer: OptimizerKind
    lr: float
    weight_decay: float
    eps: float
    formulas: dict[str, str]


def optimizer_rule(
    spec: TensorSpec, base: TensorSpec, row: Row, optimizer: OptimizerConfig, ratios: Mapping[Ratio, float]
) -> OptimizerRule:
    """LR, weight decay and eps of a tensor under `row`; `optimizer` holds the values at the base shape."""
    mover = moved_by(optimizer.kind, spec)
    peak, lr, lr_formula = _lr(spec, base, row, optimizer, ratios)
    decay, decay_formula = _decay(spec, row, optimizer, (peak, lr), ratios)
    eps, eps_formula = _eps(row, optimizer, mover, ratios)
    return OptimizerRule(mover, lr, decay, eps, {"lr": lr_formula, "weight_decay": decay_formula, "eps": eps_formula})


def _lr(
    spec: TensorSpec, base: TensorSpec, row: Row, optimizer: OptimizerConfig, ratios: Mapping[Ratio, float]
) -> tuple[float, float, str]:
    """The class's LR at the base shape, the tensor's own, and its formula."""
    mover = moved_by(optimizer.kind, spec)
    powers = row.lr_under(mover)
    assert powers is not None, "RunConfig refuses what has no rule"
    group = "gain" if spec.role in GAINS else spec.role
    factor = getattr(optimizer.lr_multipliers, group)
    words = "lr" if factor == 1 else f"lr * {factor:g}"
    if optimizer.kind == "muon" and mover == "adamw" and optimizer.adamw_lr_factor != 1:
        factor *= optimizer.adamw_lr_factor
        words += f" * {optimizer.adamw_lr_factor:g}"
    peak, words = optimizer.lr * factor, formula(words, powers)
    lr = peak * value(powers, ratios)
    if mover == "muon":
        # The rule is one for the size of the update; torch's own factor, where it changes with the shape, is taken out again.
        own = muon_adjustment(base.fan_out, base.fan_in) / muon_adjustment(spec.fan_out, spec.fan_in)
        lr, words = lr * own, words if own == 1 else f"{words} * {own:.4g}"
    return peak, lr, words


def _decay(
    spec: TensorSpec, row: Row, optimizer: OptimizerConfig, lrs: tuple[float, float], ratios: Mapping[Ratio, float]
) -> tuple[float, str]:
    """The optimizer's weight_decay of a tensor, and its formula. lrs: at the base shape, and the tensor's."""
    base, rule, (peak, lr) = optimizer.weight_decay, optimizer.weight_decay_rule, lrs
    if not row.decays or (rule == "sqrt" and spec.role != "hidden"):
        return 0.0, "0"
    if rule == "independent":
        return base / lr, "weight_decay / lr of the tensor"
    if rule == "constant" and moved_by(optimizer.kind, spec) in ("sgd", "muon"):
        return base * peak / lr, "weight_decay * base lr / lr"
    constant = row.gradient_decay if optimizer.kind == "adam" else row.weight_decay
    rules: dict[str, Powers] = {"constant": constant, "unscaled": ONE, "sqrt": {"m_in": 0.5}}
    powers = rules[rule]
    return base * value(powers, ratios), formula("weight_decay", powers)


def _eps(row: Row, optimizer: OptimizerConfig, mover: OptimizerKind, ratios: Mapping[Ratio, float]) -> tuple[float, str]:
    base, words = (MUON_EPS, f"{MUON_EPS:g}") if mover == "muon" else (optimizer.eps, "eps")
    if optimizer.eps_rule == "constant":
        return base, words
    powers = row.muon_eps if mover == "muon" else row.eps
    return base * value(powers, ratios), formula(words, powers)


def _init_std(spec: TensorSpec, base: TensorSpec, row: Row, ratios: Mapping[Ratio, float], run: RunConfig) -> tuple[float, str]:
    """Init std of a tensor, and its formula."""
    if spec.role in GAINS:
        return math.nan, "ones"
    kind = run.parametrization.kind
    if kind == "umup":
        return 1.0, "1"
    # Under completep the branch multiplier does what GPT-2's 1/sqrt(depth) init is for.
    depth = run.base_model().depth if kind == "completep" else run.model.depth
    std, by_fan_in = _base_std(spec, base.fan_in, run.parametrization.init, depth)
    powers: Powers = {"m_in": -0.5} if by_fan_in else row.init_std
    words = formula(f"{std:.4g}", powers) if std else "0"
    if kind == "spectral" and by_fan_in and spec.fan_out < spec.fan_in:
        std, words = std * math.sqrt(spec.fan_out / spec.fan_in), f"{words} * (fan_out / fan_in)^0.5"
    return std * value(powers, ratios), words


def _base_std(spec: TensorSpec, base_fan_in: int, init: InitConfig, depth: int) -> tuple[float, bool]:
    """Init std of a matrix at the base shape, and whether it is tied to fan_in at every width."""
    if spec.role == "embedding":
        return init.embedding_std, False
    if spec.role == "readout":
        return init.readout_std, False
    if spec.block_output and init.block_output == "zero":
        return 0.0, False
    by_fan_in = init.hidden_std == "fan_in"
    std = 1 / math.sqrt(base_fan_in) if init.hidden_std == "fan_in" else init.hidden_std
    if spec.block_output and init.block_output == "depth_scaled":
        # GPT-2's 1/sqrt(number of branches), so that the residual stream keeps its size at init.
        std /= math.sqrt(2 * depth)
    return std, by_fan_in


def base_multiplier(parametrization: ParametrizationConfig, role: Role) -> float:
    """Forward multiplier of a role at the base shape."""
    if role == "embedding":
        return parametrization.embedding_multiplier
    return parametrization.readout_multiplier if role == "readout" else 1.0


@dataclass(frozen=True)
class ForwardRules:
    """Multipliers that the model applies in its forward pass, beside each hidden matrix's own."""

    embedding: float
    readout: float
    attention_scale: float
    """Factor on query . key."""
    attention_branch: float = 1.0
    """Factor on what attention adds to the residual stream."""
    mlp_branch: float = 1.0
    """Factor on what an MLP adds to the residual stream."""
    attention_output: float = 1.0
    """Factor on the mix of values, before the output projection."""
    mlp_inner: float = 1.0
    """Factor on the MLP's inner activations."""


UNIT_ACTIVATION: Mapping[str, float] = {"gelu": 0.652093, "swiglu": 0.596469}
"""RMS of the MLP's inner activations for inputs from N(0, 1): sqrt(E[gelu(x)^2]), and sqrt(E[silu(x)^2]) for silu(x) * y."""


def forward_rules(run: RunConfig) -> ForwardRules:
    """Forward multipliers of `run`'s model; a tied readout has the readout's multiplier and the embedding's other rules.

    Attention logits: SP divides by sqrt(head_dim); muP by head_dim, normalized to agree at the base shape
    (Tensor Programs V, Definition 4.1). With head_dim held fixed the two are one. u-muP divides by head_dim.
    """
    parametrization = run.parametrization
    spec = transformer_tensors(run.model)[0]
    ratios = _ratios(spec, transformer_tensors(run.base_model())[0], run)
    table = rows_of(parametrization)
    attention, mlp = _branches(run, ratios["m_L"])
    unit = parametrization.kind == "umup"
    return ForwardRules(
        embedding=base_multiplier(parametrization, "embedding") * value(table["embedding"].multiplier, ratios),
        readout=base_multiplier(parametrization, "readout") * value(table["readout"].multiplier, ratios),
        attention_scale=parametrization.attention_multiplier * _attention_scale(run),
        attention_branch=attention,
        mlp_branch=mlp,
        attention_output=_unit_attention(run.model.context) if unit else 1.0,
        mlp_inner=1 / UNIT_ACTIVATION[run.model.activation] if unit else 1.0,
    )


def _attention_scale(run: RunConfig) -> float:
    head_dim = run.model.head_size
    match run.parametrization.kind:
        case "umup":
            return 1 / head_dim
        case "mup" | "completep" | "spectral":
            # 1 / sqrt(head_dim) first: at the base shape it is SP's to the last bit.
            return 1 / math.sqrt(head_dim) * math.sqrt(run.base_model().head_size / head_dim)
        case _:
            return 1 / math.sqrt(head_dim)


def _branches(run: RunConfig, m_L: float) -> tuple[float, float]:
    """Factors on what attention and MLP add to the stream.

    completep: m_L^-alpha. u-muP: depth^-1/2; its own form, x <- (x + t f) / sqrt(1 + t^2) with t_l^2 = 1 / (depth + l) for branch l, is the
    same function, since every branch and the readout read a normed stream (2407.17465, Appendix G).
    """
    parametrization = run.parametrization
    alpha = {"completep": parametrization.alpha, "umup": 0.5}.get(parametrization.kind, 0.0)
    factor, ratio = parametrization.residual_multiplier * m_L**-alpha, parametrization.residual_attention_ratio
    mlp = factor * math.sqrt(2 / (1 + ratio**2))
    return mlp * ratio, mlp


def _unit_attention(context: int) -> float:
    """Factor that brings a causal mean of 1, 2, .., context independent values to mean square 1, as attention starts under u-muP."""
    return math.sqrt(context / math.fsum(1 / length for length in range(1, context + 1)))


def carried(run: RunConfig) -> OptimizerConfig:
    """The optimizer's values at the run's number of steps: as they are without `base.steps`, else by the horizon's rules."""
    if run.base.steps is None:
        return run.optimizer
    ratio = run.training.steps / run.base.steps
    optimizer = at_horizon(run.optimizer, ratio, run.optimizer.horizon_exponent)
    if optimizer.betas_rule == "constant":
        return optimizer
    beta1, beta2 = horizon_betas((optimizer.beta1, optimizer.beta2), ratio)
    return optimizer.model_copy(update={"beta1": beta1, "beta2": beta2})


def at_horizon(optimizer: OptimizerConfig, steps_ratio: float, exponent: float = 0.5) -> OptimizerConfig:
    """The base values carried to another number of tokens or another batch, betas unchanged; `scaling.horizon` says how."""
    factors = horizon_factors(steps_ratio, exponent)
    if optimizer.weight_decay_rule == "independent":
        # An independent decay is the product of LR and decay.
        factors["weight_decay"] *= factors["lr"]
    return optimizer.model_copy(update={name: getattr(optimizer, name) * factor for name, factor in factors.items()})


def _layer_free(name: str) -> str:
    """The name with its layer number removed: blocks of one model share their rules, and depth may differ from the base's."""
    parts = name.split(".")
    return ".".join(part for part in parts if not part.isdigit())


__all__ = [
    "DECAY_RULES", "GRADIENT_DECAY", "HORIZON_SOURCE", "ForwardRules", "TensorRule", "at_horizon", "carried", "forward_rules",
    "horizon_betas",
    "muon_adjustment", "tensor_rules",
]  # fmt: skip
