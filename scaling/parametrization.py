"""The rules that carry hyperparameters from a base shape to another: data, in one place, torch-free.

For each tensor the rules give (A, B, C, E, weight decay): forward multiplier, init std, LR, Adam eps and decoupled weight
decay (as torch.optim.AdamW takes it, multiplied by the LR). Each is the base value times powers of ratios target/base:

    m_in, m_out   fan_in and fan_out of the tensor itself
    m_N           width
    m_L           depth

When tokens or batch change, `at_horizon` moves the base values themselves: it is one factor for all tensors.

Identity that tests every row (Tensor Programs V, 2203.03466, Lemma J.1; eps and decay: same argument): A*t, B/t, C/t, E*t,
decay*t leaves training under AdamW unchanged; SGD's LR goes with 1/t^2. `Row.moved` applies it, and muP's forms are made by it.

The model's init, the optimizer's groups, the forward multipliers, `explain` and the recommendation all read this file.
To add a parametrization, add a table of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scaling.config import InitConfig, OptimizerConfig, ParametrizationConfig, RunConfig
from scaling.shapes import Role, TensorSpec, transformer_tensors

Ratio = Literal["m_in", "m_out", "m_N", "m_L"]
Powers = Mapping[Ratio, float]
ONE: Powers = {}


@dataclass(frozen=True)
class Row:
    """One role's rules: exponents of the ratios for A, B, C, E and weight decay, and where they come from."""

    source: str
    multiplier: Powers = field(default_factory=dict)
    init_std: Powers = field(default_factory=dict)
    lr: Powers = field(default_factory=dict)
    eps: Powers = field(default_factory=dict)
    weight_decay: Powers = field(default_factory=dict)
    sgd_lr: Powers | None = None
    """LR under SGD; None: no rule is known."""
    decays: bool = True
    """False: never weight-decayed (gains), whatever the config says."""

    def moved(self, factor: Powers, source: str) -> Row:
        """The same training in another form: `factor` (powers of the ratios) moved into the forward multiplier (Lemma J.1)."""
        back = {ratio: -power for ratio, power in factor.items()}
        return replace(
            self,
            source=source,
            multiplier=times(self.multiplier, factor),
            init_std=times(self.init_std, back),
            lr=times(self.lr, back),
            eps=times(self.eps, factor),
            weight_decay=times(self.weight_decay, factor),
            sgd_lr=None if self.sgd_lr is None else times(self.sgd_lr, back, back),
        )

    def also(self, factors: Mapping[str, Powers], source: str) -> Row:
        """The row with further powers on some of its columns."""
        columns: dict[str, Powers] = {name: times(getattr(self, name), powers) for name, powers in factors.items()}
        return replace(self, source=source, **columns)  # type: ignore[arg-type]  # every key names a column of powers


def times(*factors: Powers) -> Powers:
    """The product: powers added, those of 0 left out."""
    total: dict[Ratio, float] = {}
    for powers in factors:
        for ratio, power in powers.items():
            total[ratio] = total.get(ratio, 0.0) + power
    return {ratio: power for ratio, power in total.items() if power}


_SP = "standard parametrization: same value at every width"
_TP5 = "Tensor Programs V (2203.03466) Table 8"
_EPS = "Complete(d)P (2512.22382) Table 1"
_SIMPLE = "muP-simple (Wortsman et al. 2309.14322 Fig. E.5); LRs as in Everett et al. (2407.05872)"

TABLES: Mapping[str, Mapping[Role, Row]] = {
    "sp": {
        "embedding": Row(_SP, sgd_lr=ONE),
        "hidden": Row(_SP, sgd_lr=ONE),
        "block_gain": Row(_SP, sgd_lr=ONE, decays=False),
        "qk_gain": Row(_SP, sgd_lr=ONE, decays=False),
        "final_gain": Row(_SP, sgd_lr=ONE, decays=False),
        "readout": Row(_SP, sgd_lr=ONE),
    },
    # Table 8 keeps the readout's init and LR equal to the embedding's, so that the two may be tied. eps follows the size of a
    # gradient entry: 1/m_out for a matrix (Qiu et al. 2512.05620), 1/m_N where only the width grows. lr * weight_decay is
    # constant in width (CompleteP 2505.01618 Table 1; Kosson et al. 2510.19093). The final gain's eps is CompleteP's 1/m_N,
    # not Complete(d)P's 1: gradients were measured to fall with slope -0.98.
    "mup": {
        "embedding": Row(f"{_TP5}; eps: {_EPS}", eps={"m_N": -1}, sgd_lr={"m_out": 1}),
        "hidden": Row(
            f"{_TP5}; weight decay: CompleteP (2505.01618) Table 1; eps: Qiu et al. (2512.05620)",
            init_std={"m_in": -0.5},
            lr={"m_in": -1},
            eps={"m_out": -1},
            weight_decay={"m_in": 1},
            sgd_lr={"m_out": 1, "m_in": -1},
        ),
        "block_gain": Row(f"{_TP5}; eps: {_EPS}", eps={"m_N": -1}, sgd_lr={"m_out": 1}, decays=False),
        "qk_gain": Row(f"{_TP5}; eps: {_EPS}", sgd_lr={}, decays=False),
        "final_gain": Row(f"{_TP5}; eps: CompleteP (2505.01618) Table 1", eps={"m_N": -1}, sgd_lr={"m_out": 1}, decays=False),
        "readout": Row(f"{_TP5}; eps: Lemma J.1 applied to {_EPS}", multiplier={"m_N": -1}, eps={"m_N": -1}, sgd_lr={"m_N": 1}),
    },
    # Only the LRs follow muP; the readout starts with fan-in init, so that logits are of order one at the start and their updates
    # keep growing, slowly. Everett et al.'s (2407.05872) per-layer LRs for standard parametrization under full alignment are these.
    "mup-simple": {
        "embedding": Row(f"{_SIMPLE}; eps: {_EPS}", eps={"m_N": -0.5}),
        "hidden": Row(_SIMPLE, init_std={"m_in": -0.5}, lr={"m_in": -1}, eps={"m_out": -1, "m_N": 0.5}, weight_decay={"m_in": 1}),
        "block_gain": Row(_SIMPLE, eps={"m_N": -0.5}, decays=False),
        "qk_gain": Row(_SIMPLE, decays=False),
        "final_gain": Row(_SIMPLE, eps={"m_N": -0.5}, decays=False),
        "readout": Row(_SIMPLE, init_std={"m_in": -0.5}, lr={"m_in": -1}, weight_decay={"m_in": 1}),
    },
}

FORMS: Mapping[str, Mapping[Role, Powers]] = {
    "table8": {},
    "table3": {"readout": {"m_N": 1}},
    "table9": {"readout": {"m_N": 0.5}, "embedding": {"m_N": 0.5}},
}
"""What each of Tensor Programs V's tables moves into the forward multiplier, from Table 8. Gains stay as they are in all of them."""


DECAY_RULES: Mapping[str, str] = {
    "constant": "lr * weight_decay does not change with width (CompleteP 2505.01618 Table 1; Kosson et al. 2510.19093)",
    "unscaled": "weight_decay does not change, lr * weight_decay falls (nanoGPT-mup; Megatron-LM's use_mup)",
    "independent": "weight_decay is the shrinkage of a step itself: torch's is weight_decay / lr (Wortsman et al. 2309.14322)",
    "sqrt": "weight_decay of hidden matrices grows with sqrt(fan_in), vector-like tensors have none (Fan et al. 2510.15262)",
}


def _decay(row: Row, role: Role, optimizer: OptimizerConfig, lr: float, ratios: Mapping[Ratio, float]) -> tuple[float, str]:
    """torch.optim.AdamW's weight_decay of a tensor, and its formula."""
    base, rule = optimizer.weight_decay, optimizer.weight_decay_rule
    if not row.decays or (rule == "sqrt" and role != "hidden"):
        return 0.0, "0"
    if rule == "independent":
        return base / lr, "weight_decay / lr of the tensor"
    if rule == "constant" and optimizer.kind == "sgd":
        return base * optimizer.lr / lr, "weight_decay * base lr / lr"
    rules: dict[str, Powers] = {"constant": row.weight_decay, "unscaled": ONE, "sqrt": {"m_in": 0.5}}
    powers = rules[rule]
    return base * value(powers, ratios), formula("weight_decay", powers)


def completep(alpha: float) -> Mapping[Role, Row]:
    """muP and, over depth, CompleteP (2505.01618 Table 1; Complete(d)P 2512.22382 Table 1): branches times m_L^-alpha.

    In a block the LR goes with m_L^(alpha - 1) and eps with m_L^-alpha, as a gradient entry does; outside nothing changes.
    """
    depth: Powers = {"m_L": alpha - 1}
    # Under SGD the gradient of a block's tensor goes with the branch, m_L^-alpha, and the update must go with m_L^(alpha - 1); at
    # alpha = 1 this is Qiu et al.'s (2512.05620) factor m_L.
    sgd: Powers = {"m_L": 2 * alpha - 1}
    eps: Powers = {"m_L": -alpha}
    source = "CompleteP (2505.01618) Table 1 and Complete(d)P (2512.22382) Table 1"
    inside: tuple[Role, ...] = ("hidden", "block_gain", "qk_gain")
    changed = {
        role: TABLES["mup"][role].also({"lr": depth, "eps": eps, "sgd_lr": sgd}, f"{TABLES['mup'][role].source}; depth: {source}")
        for role in inside
    }
    return {**TABLES["mup"], **changed}


def rows_of(parametrization: ParametrizationConfig) -> Mapping[Role, Row]:
    """The rows of a parametrization, in its form."""
    rows = completep(parametrization.alpha) if parametrization.kind == "completep" else TABLES[parametrization.kind]
    moves = FORMS[parametrization.form]
    source = f"Tensor Programs V (2203.03466) Table {parametrization.form[-1]}, from Table 8 by Lemma J.1"
    return {role: row.moved(moves[role], source) if role in moves else row for role, row in rows.items()}


def value(powers: Powers, ratios: Mapping[Ratio, float]) -> float:
    """The product of ratios to their powers."""
    return math.prod(math.pow(ratios[ratio], power) for ratio, power in powers.items())


def formula(base: str, powers: Powers) -> str:
    """`powers` in words: "lr / m_in", "0.02 * m_in^-0.5", or just the base."""
    text = base
    for ratio, power in powers.items():
        if power == -1:
            text += f" / {ratio}"
        elif power == 1:
            text += f" * {ratio}"
        elif power:
            text += f" * {ratio}^{power:g}"
    return text


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

    def to_dict(self) -> dict[str, Any]:
        """JSON view; `init_std` is null for gains."""
        keys = ("name", "role", "fan_in", "fan_out", "multiplier", "lr", "weight_decay", "eps", "source")
        std = None if math.isnan(self.init_std) else self.init_std
        lr_weight_decay = self.lr * self.weight_decay
        shape, formulas = list(self.shape), dict(self.formulas)
        values = {key: getattr(self, key) for key in keys}
        return values | {"shape": shape, "init_std": std, "lr_weight_decay": lr_weight_decay, "formulas": formulas}


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


def _init_std(spec: TensorSpec, base: TensorSpec, row: Row, ratios: Mapping[Ratio, float], run: RunConfig) -> tuple[float, str]:
    if spec.role in ("block_gain", "qk_gain", "final_gain"):
        return math.nan, "ones"
    # Under completep the branch multiplier does what GPT-2's 1/sqrt(depth) init is for.
    depth = run.base_model().depth if run.parametrization.kind == "completep" else run.model.depth
    std, by_fan_in = _base_std(spec, base.fan_in, run.parametrization.init, depth)
    powers: Powers = {"m_in": -0.5} if by_fan_in else row.init_std
    return std * value(powers, ratios), formula(f"{std:.4g}", powers) if std else "0"


def tensor_rules(run: RunConfig) -> list[TensorRule]:
    """The rule of every tensor of `run`'s model; `run.optimizer` and `run.parametrization` hold the values at the base shape."""
    base_model = run.base_model()
    bases = {_layer_free(spec.name): spec for spec in transformer_tensors(base_model)}
    table, rules = rows_of(run.parametrization), []
    for spec in transformer_tensors(run.model):
        base, row = bases[_layer_free(spec.name)], table[spec.role]
        ratios: dict[Ratio, float] = {
            "m_in": spec.fan_in / base.fan_in,
            "m_out": spec.fan_out / base.fan_out,
            "m_N": run.model.width / base_model.width,
            "m_L": run.model.depth / base_model.depth,
        }
        rules.append(_tensor_rule(spec, base, row, ratios, run))
    return rules


def _tensor_rule(spec: TensorSpec, base: TensorSpec, row: Row, ratios: Mapping[Ratio, float], run: RunConfig) -> TensorRule:
    optimizer = run.optimizer
    multiplier = base_multiplier(run.parametrization, spec.role)
    init_std, init_formula = _init_std(spec, base, row, ratios, run)
    lr_powers = row.sgd_lr if optimizer.kind == "sgd" else row.lr
    assert lr_powers is not None, "RunConfig refuses what has no rule"
    lr = optimizer.lr * value(lr_powers, ratios)
    decay, decay_formula = _decay(row, spec.role, optimizer, lr, ratios)
    return TensorRule(
        name=spec.name,
        role=spec.role,
        shape=spec.shape,
        fan_in=spec.fan_in,
        fan_out=spec.fan_out,
        multiplier=multiplier * value(row.multiplier, ratios),
        init_std=init_std,
        lr=lr,
        weight_decay=decay,
        eps=optimizer.eps * value(row.eps, ratios),
        source=row.source,
        formulas={
            "multiplier": formula(f"{multiplier:g}", row.multiplier),
            "init_std": init_formula,
            "lr": formula("lr", lr_powers),
            "weight_decay": decay_formula,
            "eps": formula("eps", row.eps),
        },
    )


def base_multiplier(parametrization: ParametrizationConfig, role: Role) -> float:
    """Forward multiplier of a role at the base shape."""
    if role == "embedding":
        return parametrization.embedding_multiplier
    return parametrization.readout_multiplier if role == "readout" else 1.0


@dataclass(frozen=True)
class ForwardRules:
    """Multipliers that the model applies in its forward pass."""

    embedding: float
    readout: float
    attention_scale: float
    """Factor on query . key."""
    branch: float = 1.0
    """Factor on what a block adds to the residual stream."""


def forward_rules(run: RunConfig) -> ForwardRules:
    """Forward multipliers of `run`'s model; a tied readout has the readout's multiplier and the embedding's other rules.

    Attention logits: SP divides by sqrt(head_dim); muP by head_dim, normalized to agree at the base shape
    (Tensor Programs V, Definition 4.1). With head_dim held fixed the two are one.
    """
    base, model, parametrization = run.base_model(), run.model, run.parametrization
    table = rows_of(parametrization)
    ratios: dict[Ratio, float] = {"m_N": model.width / base.width, "m_L": model.depth / base.depth}
    scale = 1 / math.sqrt(model.head_size)
    if parametrization.kind in ("mup", "completep"):
        scale *= math.sqrt(base.head_size / model.head_size)
    return ForwardRules(
        embedding=base_multiplier(parametrization, "embedding") * value(table["embedding"].multiplier, ratios),
        readout=base_multiplier(parametrization, "readout") * value(table["readout"].multiplier, ratios),
        attention_scale=parametrization.attention_multiplier * scale,
        branch=ratios["m_L"] ** -parametrization.alpha if parametrization.kind == "completep" else 1.0,
    )


HORIZON_SOURCE = "Complete(d)P (2512.22382) Table 1, exponent 1/2; Bjorck et al. (2409.19913) measured 0.3 to 0.7 for tokens"


def at_horizon(optimizer: OptimizerConfig, steps_ratio: float, exponent: float = 0.5) -> OptimizerConfig:
    """The base values carried to another number of tokens or another batch, betas unchanged.

    steps_ratio: S = m_D / m_B, tokens ratio over batch ratio. lr and weight_decay go with S^-exponent, so that the share of the run
    over which AdamW's decay averages stays the same at 1/2; eps goes with S^exponent.
    """
    factor = steps_ratio**-exponent
    # An independent decay is the product of the two, which goes with the square.
    decay = factor**2 if optimizer.weight_decay_rule == "independent" else factor
    changed = {"lr": optimizer.lr * factor, "weight_decay": optimizer.weight_decay * decay, "eps": optimizer.eps / factor}
    return optimizer.model_copy(update=changed)


def horizon_betas(optimizer: OptimizerConfig, steps_ratio: float) -> tuple[float, float]:
    """Adam's betas when S = m_D / m_B changes: 1 - beta goes with 1/S (Complete(d)P 2512.22382 Table 1).

    Raises ValueError when 1 - beta would reach 1: the batch is too large for the rule.
    """
    betas = []
    for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        complement = (1 - beta) / steps_ratio
        if complement >= 1:
            raise ValueError(f"1 - {name} = {1 - beta:g} / S = {complement:.3g} reaches 1 at S = {steps_ratio:.3g}")
        if 1 - complement >= 1:
            raise ValueError(f"1 - {name} = {1 - beta:g} / S vanishes at S = {steps_ratio:.3g}")
        betas.append(1 - complement)
    return betas[0], betas[1]


def _layer_free(name: str) -> str:
    """The name with its layer number removed: blocks of one model share their rules, and depth may differ from the base's."""
    parts = name.split(".")
    return ".".join(part for part in parts if not part.isdigit())
