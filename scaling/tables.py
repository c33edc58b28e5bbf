"""The tables: for every parametrization and role, how each hyperparameter goes with the ratios of the shapes. Data, torch-free.

For each tensor the rules give (A, B, C, E, weight decay): forward multiplier, init std, LR, Adam eps and decoupled weight decay (as
torch.optim.AdamW takes it, multiplied by the LR). Each is the base value times powers of ratios:

    m_in, m_out   fan_in and fan_out of the tensor itself
    m_N           width
    m_L           depth

target over base; under u-muP, which has no base shape, the sizes themselves. `scaling.parametrization` applies them.

Identity that tests every row (Tensor Programs V, 2203.03466, Lemma J.1; eps and decay: same argument): A*t, B/t, C/t, E*t,
decay*t leaves training under AdamW unchanged; SGD's LR goes with 1/t^2. `Row.moved` applies it, and muP's forms are made by it.
To add a parametrization, add a table of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from scaling.config import OptimizerKind, ParametrizationConfig, ParametrizationKind
from scaling.shapes import Role

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
    muon_lr: Powers | None = None
    """LR under Muon, for what Muon moves; None: no rule is known, or Muon does not move it."""
    decays: bool = True
    """False: never weight-decayed (gains), whatever the config says."""

    def moved(self, factor: Powers, source: str) -> Row:
        """The same training in another form: `factor` (powers of the ratios) moved into the forward multiplier (Lemma J.1)."""
        back = inverse(factor)
        return replace(
            self,
            source=source,
            multiplier=times(self.multiplier, factor),
            init_std=times(self.init_std, back),
            lr=times(self.lr, back),
            eps=times(self.eps, factor),
            weight_decay=times(self.weight_decay, factor),
            sgd_lr=None if self.sgd_lr is None else times(self.sgd_lr, back, back),
            # Muon's update has a size of its own, as Adam's has.
            muon_lr=None if self.muon_lr is None else times(self.muon_lr, back),
        )

    def lr_under(self, optimizer: OptimizerKind) -> Powers | None:
        """Powers of the LR; None: no rule is known. Under Muon for what Muon moves, under AdamW for the rest."""
        if optimizer == "sgd":
            return self.sgd_lr
        return self.muon_lr if optimizer == "muon" else self.lr

    @property
    def gradient_decay(self) -> Powers:
        """Powers of a decay that is added to the gradient before Adam divides by its size: it must go as gradient over weight.

        eps goes as the gradient, the LR as the change of the weight; Lemma J.1 gives such a decay the factor t^2, as it does here.
        """
        return times(self.eps, inverse(self.lr))

    @property
    def muon_eps(self) -> Powers:
        """Powers of Muon's eps, which stands beside the Frobenius norm of the gradient (Qiu et al. 2512.05620)."""
        return times(self.eps, {"m_in": 0.5, "m_out": 0.5})

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


def inverse(powers: Powers) -> Powers:
    return {ratio: -power for ratio, power in powers.items()}


_SP = "standard parametrization: same value at every width"
_TP5 = "Tensor Programs V (2203.03466) Table 8"
_EPS = "Complete(d)P (2512.22382) Table 1"
_SIMPLE = "muP-simple (Wortsman et al. 2309.14322 Fig. E.5)"
_EVERETT = "per-layer LRs of standard parametrization under Adam (Everett et al. 2407.05872)"

TABLES: Mapping[str, Mapping[Role, Row]] = {
    "sp": {
        "embedding": Row(_SP, sgd_lr=ONE),
        "hidden": Row(_SP, sgd_lr=ONE, muon_lr=ONE),
        "block_gain": Row(_SP, sgd_lr=ONE, decays=False),
        "qk_gain": Row(_SP, sgd_lr=ONE, decays=False),
        "final_gain": Row(_SP, sgd_lr=ONE, decays=False),
        "readout": Row(_SP, sgd_lr=ONE),
    },
    # Table 8 keeps the readout's init and LR equal to the embedding's, so that the two may be tied. eps follows the size of a
    # gradient entry: 1/m_out for a matrix (Qiu et al. 2512.05620, whose LR for Muon this is too), 1/m_N where only the width grows.
    # lr * weight_decay is constant in width (CompleteP 2505.01618 Table 1; Kosson et al. 2510.19093). The final gain's eps is
    # CompleteP's 1/m_N, not Complete(d)P's 1: gradients were measured to fall with slope -0.98.
    "mup": {
        "embedding": Row(f"{_TP5}; eps: {_EPS}", eps={"m_N": -1}, sgd_lr={"m_out": 1}),
        "hidden": Row(
            f"{_TP5}; weight decay: CompleteP (2505.01618) Table 1; eps: Qiu et al. (2512.05620)",
            init_std={"m_in": -0.5},
            lr={"m_in": -1},
            eps={"m_out": -1},
            weight_decay={"m_in": 1},
            sgd_lr={"m_out": 1, "m_in": -1},
            muon_lr={"m_out": 0.5, "m_in": -0.5},
        ),
        "block_gain": Row(f"{_TP5}; eps: {_EPS}", eps={"m_N": -1}, sgd_lr={"m_out": 1}, decays=False),
        "qk_gain": Row(f"{_TP5}; eps: {_EPS}", sgd_lr={}, decays=False),
        "final_gain": Row(f"{_TP5}; eps: CompleteP (2505.01618) Table 1", eps={"m_N": -1}, sgd_lr={"m_out": 1}, decays=False),
        "readout": Row(f"{_TP5}; eps: Lemma J.1 applied to {_EPS}", multiplier={"m_N": -1}, eps={"m_N": -1}, sgd_lr={"m_N": 1}),
    },
}


def _per_layer_lr(source: str, power: float) -> Mapping[Role, Row]:
    """Standard parametrization with LRs of hidden and readout by m_in^-power; with fan-in init logits are of order one at the start.

    Under full alignment (power 1) the updates of the logits keep growing, slowly. eps follows a gradient entry, that of the readout's
    input being m_N^-1/2.
    """
    lr: Powers = {"m_in": -power}
    decay: Powers = inverse(lr)
    vector: Powers = {"m_N": -0.5}
    return {
        "embedding": Row(f"{source}; eps: {_EPS}", eps=vector),
        "hidden": Row(source, init_std={"m_in": -0.5}, lr=lr, eps={"m_out": -1, "m_N": 0.5}, weight_decay=decay),
        "block_gain": Row(source, eps=vector, decays=False),
        "qk_gain": Row(source, decays=False),
        "final_gain": Row(source, eps=vector, decays=False),
        "readout": Row(source, init_std={"m_in": -0.5}, lr=lr, weight_decay=decay),
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


GRADIENT_DECAY = (
    "part of the gradient: under the rule constant it goes with gradient over weight and keeps its share of the gradient "
    "(Lemma J.1, with gradients as in Complete(d)P 2512.22382 Table 1)"
)


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
    changed = {}
    for role in inside:
        row = TABLES["mup"][role]
        # Muon's update has a size of its own, as Adam's has: its LR follows depth in the same way.
        muon: dict[str, Powers] = {} if row.muon_lr is None else {"muon_lr": depth}
        changed[role] = row.also({"lr": depth, "eps": eps, "sgd_lr": sgd, **muon}, f"{row.source}; depth: {source}")
    return {**TABLES["mup"], **changed}


def _umup() -> Mapping[Role, Row]:
    """u-muP (2407.17465 Table 2): unit init, the fan-in factor in the forward pass, absolute ratios.

    By Lemma J.1 it is completep at alpha = 1/2, except for the embedding, whose LR falls with the root of the width. Constants that keep
    activations at unit variance are in `scaling.parametrization.forward_rules`. Its own gradients are scaled to order one by backward
    factors, to which Adam is blind; here eps follows the gradient instead.
    """
    source = "u-muP (2407.17465) Table 2, from CompleteP at alpha = 1/2 by Lemma J.1"
    rows = {role: replace(row, source=source, sgd_lr=None, muon_lr=None) for role, row in completep(0.5).items()}
    rows["hidden"] = rows["hidden"].moved({"m_in": -0.5}, source).also({"weight_decay": {"m_L": 0.5}}, source)
    rows["embedding"] = rows["embedding"].also({"lr": {"m_N": -0.5}, "weight_decay": {"m_N": 0.5}}, "u-muP (2407.17465) Table 2")
    return rows


def _spectral() -> Mapping[Role, Row]:
    """The spectral condition (Yang, Simon & Bernstein 2310.17813): muP with the readout in the form of Table 3.

    Its init, std = fan_in^-1/2 min(1, sqrt(fan_out / fan_in)), differs from muP's in constants (`scaling.parametrization`).
    """
    source = "spectral condition (Yang et al. 2310.17813); as muP (Tensor Programs V) Table 3; LRs by optimizer: Qiu et al. (2512.05620)"
    rows = {role: replace(row, source=source) for role, row in TABLES["mup"].items()}
    return {**rows, "readout": rows["readout"].moved({"m_N": 1}, source)}


ABSOLUTE: frozenset[ParametrizationKind] = frozenset({"umup"})
"""Parametrizations without a base shape: their ratios are the sizes themselves."""


def rows_of(parametrization: ParametrizationConfig) -> Mapping[Role, Row]:
    """The rows of a parametrization, in its form."""
    rows = _rows(parametrization)
    moves = FORMS[parametrization.form]
    source = f"Tensor Programs V (2203.03466) Table {parametrization.form[-1]}, from Table 8 by Lemma J.1"
    return {role: row.moved(moves[role], source) if role in moves else row for role, row in rows.items()}


def _rows(parametrization: ParametrizationConfig) -> Mapping[Role, Row]:
    match parametrization.kind:
        case "completep":
            return completep(parametrization.alpha)
        case "umup":
            return _umup()
        case "spectral":
            return _spectral()
        case "mup-simple":
            return _per_layer_lr(_SIMPLE, 1.0)
        case "sp-per-layer":
            full = parametrization.alignment == "full"
            return _per_layer_lr(f"{_EVERETT}, {'full' if full else 'no'} alignment", 1.0 if full else 0.5)
        case kind:
            return TABLES[kind]


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
