"""Scaling laws as data: what each is called, what it reads, its formula, its source, its value and its analytic gradient.

Owns `LAWS`. A law works on a batch of internal parameters theta, shape (S, p), at once: S starts, refits or points of a profile.
Inputs enter as natural logs about their mean (`Inputs`), levels as logs, so that theta is well scaled; `public` turns theta into
the numbers that papers print (A, alpha, ...). Losses are in nats per token, whatever the table's unit is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MAX_EXPONENT = 4.0
"""No published exponent comes near; a fit that ends here has found no power law."""
LOWEST_E = 1e-7
"""E, over the smallest loss, that counts as 0."""
ABOVE = 0.05
"""How far, in logs, E may lie above the smallest loss: runs scatter below it where the law is flat."""
LN10 = float(np.log(10.0))


@dataclass(frozen=True, eq=False)
class Inputs:
    """Natural logs of the columns that a law reads, minus `centres`; arrays of shape (n,)."""

    logs: Mapping[str, Array]
    centres: Mapping[str, float]

    @classmethod
    def of(cls, columns: Mapping[str, Any], centres: Mapping[str, float] | None = None) -> Inputs:
        """From plain values (floats, so that no product can overflow). centres: those of the fit, to predict with it."""
        logs = {name: np.log(np.atleast_1d(np.asarray(values, dtype=np.float64))) for name, values in columns.items()}
        chosen = dict(centres) if centres is not None else {name: float(value.mean()) for name, value in logs.items()}
        return cls({name: value - chosen[name] for name, value in logs.items()}, chosen)

    def __getitem__(self, name: str) -> Array:
        return self.logs[name]

    def whole(self, name: str) -> Array:
        """Log of the column itself."""
        return np.asarray(self.logs[name] + self.centres[name])


@dataclass(frozen=True)
class Law(ABC):
    """One law.

    columns: what it reads of a table. formula: as papers write it. source: paper.
    """

    name: str
    formula: str
    source: str
    columns: tuple[str, ...]

    @property
    @abstractmethod
    def parameters(self) -> tuple[str, ...]:
        """Names of the public parameters, in the order of `public`."""

    @property
    @abstractmethod
    def positive(self) -> frozenset[str]:
        """Public parameters whose interval is taken in logs."""

    @abstractmethod
    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        """Losses (S, n) and their gradient by theta (S, n, p); the inputs of the laws that split a budget may be (S, n) too."""

    @abstractmethod
    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        """Public parameters (S, q)."""

    @abstractmethod
    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:
        """Lower and upper ends of theta; lowest: the smallest loss of the table."""

    @abstractmethod
    def shapes(self, x: Inputs) -> Array:
        """Grid of the nonlinear parameters to start from (G, s)."""

    @abstractmethod
    def design(self, shape: Array, x: Inputs) -> Array:
        """Columns (n, k) whose non-negative combination is `target`, for one point of the grid."""

    @abstractmethod
    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        """theta (p,) from a point of the grid and the combination's weights."""

    def target(self, shape: Array, losses: Array) -> Array:  # noqa: ARG002
        """What the linear part is fitted to; the losses, unless a law is linear in something else."""
        return losses

    def optimum(self, theta: Array, centres: Mapping[str, float], log_product: float) -> Array | None:  # noqa: ARG002
        """log N_opt (S,) where N D = exp(log_product); None where the law has no such split."""
        return None


def _log(value: float, floor: float) -> float:
    return float(np.log(max(value, floor)))


@dataclass(frozen=True)
class Additive(Law):
    """Constant plus one power of each column; `shared`: one exponent for all."""

    constant: bool = True
    shared: bool = False

    @property
    def _k(self) -> int:
        return len(self.columns)

    @property
    def parameters(self) -> tuple[str, ...]:
        levels, exponents = ("A", "B")[: self._k], ("alpha", "beta")[: 1 if self.shared else self._k]
        return (("E",) if self.constant else ()) + levels + exponents

    @property
    def positive(self) -> frozenset[str]:
        return frozenset({"A", "B"})

    def _split(self, theta: Array) -> tuple[Array, Array]:
        """Levels (S, k) and exponents (S, k)."""
        first = int(self.constant)
        levels, exponents = theta[:, first : first + self._k], theta[:, first + self._k :]
        return levels, np.broadcast_to(exponents, levels.shape)

    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        levels, exponents = self._split(theta)
        logs = [x[name] for name in self.columns]
        terms = [np.exp(np.clip(levels[:, i, None] - exponents[:, i, None] * log, -200, 200)) for i, log in enumerate(logs)]
        slopes = [-term * log for term, log in zip(terms, logs, strict=True)]
        constant = [np.broadcast_to(np.exp(theta[:, :1]), terms[0].shape)] if self.constant else []
        total = np.sum([*constant, *terms], axis=0)
        gradient = np.stack([*constant, *terms, *([np.sum(slopes, axis=0)] if self.shared else slopes)], axis=-1)
        return total, gradient

    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        levels, exponents = self._split(theta)
        middle = np.array([centres[name] for name in self.columns])
        head = [np.exp(theta[:, :1])] if self.constant else []
        return np.concatenate(
            [*head, np.exp(np.minimum(levels + exponents * middle, 700.0)), theta[:, int(self.constant) + self._k :]], axis=1
        )

    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:  # noqa: ARG002
        count = 1 if self.shared else self._k
        low = [np.log(lowest * LOWEST_E)] * (int(self.constant) + self._k) + [0.0] * count
        high = ([np.log(lowest) + ABOVE] if self.constant else []) + [np.log(lowest) + 25.0] * self._k + [MAX_EXPONENT] * count
        return np.array(low), np.array(high)

    def shapes(self, x: Inputs) -> Array:  # noqa: ARG002
        line = np.array([0.05, 0.1, 0.17, 0.25, 0.35, 0.47, 0.65, 0.9, 1.3])
        count = 1 if self.shared else self._k
        return np.stack(np.meshgrid(*[line] * count, indexing="ij"), axis=-1).reshape(-1, count)

    def design(self, shape: Array, x: Inputs) -> Array:
        exponents = np.broadcast_to(shape, (self._k,))
        powers = [np.exp(-exponent * x[name]) for exponent, name in zip(exponents, self.columns, strict=True)]
        ones = [np.ones_like(powers[0])] if self.constant else []
        return np.stack([*ones, *powers], axis=1)

    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        # A weight of 0 would start where the gradient is 0 too.
        logs = [_log(float(weight), 0.01 * lowest) for weight in weights]
        if self.constant:
            logs[0] = min(logs[0], float(np.log(0.98 * lowest)))
        return np.array([*logs, *shape])

    def optimum(self, theta: Array, centres: Mapping[str, float], log_product: float) -> Array | None:
        if self.columns != ("params", "tokens"):
            return None
        levels, exponents = self._split(theta)
        alpha, beta = np.maximum(exponents[:, 0], 1e-12), np.maximum(exponents[:, 1], 1e-12)
        raw = levels[:, 0] + alpha * centres["params"] - levels[:, 1] - beta * centres["tokens"]
        return np.asarray((np.log(alpha / beta) + raw + beta * log_product) / (alpha + beta))


@dataclass(frozen=True)
class Coupled(Law):
    """(E +) (P N^-a + Q D^-b)^k; Kaplan's law has no E and b = 1."""

    kaplan: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("N_c", "D_c", "alpha_N", "alpha_D") if self.kaplan else ("E", "A", "R", "a", "b", "k")

    @property
    def positive(self) -> frozenset[str]:
        return frozenset({"N_c", "D_c", "A", "R", "k"})

    def _split(self, theta: Array) -> tuple[Array, Array, Array, Array, Array]:
        """p, q, a, b, log k, each (S, 1). Kaplan's theta holds k p, k q and k a: levels of the loss, little correlated with k."""
        if self.kaplan:
            p, q, a, log_k = (theta[:, index, None] for index in range(4))
            k = np.exp(log_k)
            return p / k, q / k, a / k, np.ones_like(a), log_k
        p, q, a, b, log_k = (theta[:, index, None] for index in range(1, 6))
        return p, q, a, b, log_k

    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        p, q, a, b, log_k = self._split(theta)
        n, d = x["params"], x["tokens"]
        inner = np.logaddexp(p - a * n, q - b * d)
        share, k = np.exp(p - a * n - inner), np.exp(log_k)
        term = np.exp(np.minimum(k * inner, 50.0))
        slope = term * k
        parts = [slope * share, slope * (1 - share), -slope * share * n, -slope * (1 - share) * d, slope * inner]
        if self.kaplan:
            by_k = parts[4] - p * parts[0] - q * parts[1] - a * parts[2]
            return term, np.stack([parts[0] / k, parts[1] / k, parts[2] / k, by_k], axis=-1)
        constant = np.broadcast_to(np.exp(theta[:, :1]), term.shape)
        return term + constant, np.stack([constant, *parts], axis=-1)

    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        p, q, a, b, log_k = self._split(theta)
        k, n, d = np.exp(log_k), centres["params"], centres["tokens"]
        if self.kaplan:
            return np.concatenate(
                [np.exp(np.minimum(p / np.maximum(a, 1e-9) + n, 700)), np.exp(np.minimum(q + d, 700)), a * k, k], axis=1
            )
        big = np.exp(np.minimum(k * (p + a * n), 700.0))
        ratio = np.exp(np.clip(q + b * d - p - a * n, -700, 700))
        return np.concatenate([np.exp(theta[:, :1]), big, ratio, a, b, k], axis=1)

    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:  # noqa: ARG002
        floor = np.log(lowest * LOWEST_E)
        if self.kaplan:
            top = np.log(lowest) + 25.0
            return np.array([floor, floor, 0.0, np.log(0.005)]), np.array([top, top, MAX_EXPONENT, np.log(MAX_EXPONENT)])
        high = [np.log(lowest) + ABOVE, 60.0, 60.0, MAX_EXPONENT, MAX_EXPONENT, np.log(10.0)]
        return np.array([floor, -60.0, -60.0, 0.0, 0.0, np.log(0.1)]), np.array(high)

    def shapes(self, x: Inputs) -> Array:  # noqa: ARG002
        if self.kaplan:
            axes = [[0.3, 0.6, 0.9, 1.3], [0.05, 0.1, 0.2, 0.35]]
        else:
            line = [0.15, 0.3, 0.45, 0.7]
            axes = [line, line, [0.5, 1.0, 1.7]]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))

    def target(self, shape: Array, losses: Array) -> Array:
        if self.kaplan:
            return np.asarray(losses ** (1 / shape[-1]))
        # The constant of the root cannot be projected out: four fifths of the smallest loss is a start, no more.
        return np.asarray((losses - 0.8 * losses.min()) ** (1 / shape[-1]))

    def design(self, shape: Array, x: Inputs) -> Array:
        a, b = (shape[0], 1.0) if self.kaplan else (shape[0], shape[1])
        return np.stack([np.exp(-a * x["params"]), np.exp(-b * x["tokens"])], axis=1)

    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        floor = 0.01 * max(float(np.max(weights)), 1e-12)
        logs = [_log(float(weight), floor) for weight in weights]
        if self.kaplan:
            return np.array([*(shape[1] * log for log in logs), shape[1] * shape[0], np.log(shape[1])])
        return np.array([np.log(0.8 * lowest), *logs, shape[0], shape[1], np.log(shape[2])])

    def optimum(self, theta: Array, centres: Mapping[str, float], log_product: float) -> Array | None:
        p, q, a, b, _ = (part[:, 0] for part in self._split(theta))
        a, b = np.maximum(a, 1e-12), np.maximum(b, 1e-12)
        raw = p + a * centres["params"] - q - b * centres["tokens"]
        return np.asarray((np.log(a / b) + raw + b * log_product) / (a + b))


@dataclass(frozen=True)
class DataConstrained(Law):
    """Chinchilla's law with tokens that repeat and parameters beyond what the unique tokens feed counting for less and less."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("E", "A", "B", "alpha", "beta", "R_N", "R_D")

    @property
    def positive(self) -> frozenset[str]:
        return frozenset({"A", "B", "R_N", "R_D"})

    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, b, alpha, beta, log_rn, log_rd = (theta[:, index, None] for index in range(7))
        log_u, c_n, c_d = x.whole("unique_tokens"), x.centres["params"], x.centres["tokens"]
        n, d = x.whole("params"), x.whole("tokens")
        tokens, _, d_rd = _saturating(d, np.minimum(log_u, d), log_rd)
        alpha_, beta_ = np.maximum(alpha, 1e-3), np.maximum(beta, 1e-3)
        gap, unique = np.log(alpha_ / beta_) + a - b, log_u - c_d
        fed = gap / alpha_ + c_n + beta_ / alpha_ * unique
        excess = fed < n
        params, slope, d_rn = _saturating(n, np.where(excess, fed, n), log_rn)
        slope = slope * excess
        first = np.exp(a - alpha * (params - c_n))
        second = np.exp(b - beta * (tokens - c_d))
        constant = np.broadcast_to(np.exp(e), first.shape)
        pull = -alpha * first * slope
        fed_alpha = (1 - gap - beta_ * unique) / alpha_**2
        fed_beta = (unique - 1 / beta_) / alpha_
        parts = [
            constant,
            first + pull / alpha_,
            second - pull / alpha_,
            -first * (params - c_n) + pull * fed_alpha,
            -second * (tokens - c_d) + pull * fed_beta,
            -alpha * first * d_rn,
            -beta * second * d_rd,
        ]
        return constant + first + second, _stack(parts)

    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        result = np.exp(np.minimum(theta, 700.0))
        result[:, 3:5] = theta[:, 3:5]
        result[:, 1] = np.exp(np.minimum(theta[:, 1] + theta[:, 3] * centres["params"], 700.0))
        result[:, 2] = np.exp(np.minimum(theta[:, 2] + theta[:, 4] * centres["tokens"], 700.0))
        return result

    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:  # noqa: ARG002
        floor, top = np.log(lowest * LOWEST_E), np.log(lowest)
        low = [floor, floor, floor, 1e-3, 1e-3, np.log(0.01), np.log(0.01)]
        return np.array(low), np.array([top + ABOVE, top + 25, top + 25, MAX_EXPONENT, MAX_EXPONENT, np.log(1e4), np.log(1e4)])

    def shapes(self, x: Inputs) -> Array:  # noqa: ARG002
        line = [0.1, 0.25, 0.4, 0.7]
        return np.stack(np.meshgrid(line, line, [5.0], [5.0, 20.0], indexing="ij"), axis=-1).reshape(-1, 4)

    def design(self, shape: Array, x: Inputs) -> Array:
        d = x.whole("tokens")
        tokens, _, _ = _saturating(d, np.minimum(x.whole("unique_tokens"), d), np.log(shape[3]))
        columns = [np.ones_like(d), np.exp(-shape[0] * x["params"]), np.exp(-shape[1] * (tokens - x.centres["tokens"]))]
        return np.stack(columns, axis=1)

    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        logs = [_log(float(weight), 0.01 * lowest) for weight in weights]
        logs[0] = min(logs[0], float(np.log(0.98 * lowest)))
        return np.array([*logs, shape[0], shape[1], np.log(shape[2]), np.log(shape[3])])


def _stack(parts: Sequence[Array]) -> Array:
    """Gradient (S, n, p) from its p parts."""
    return np.stack(np.broadcast_arrays(*parts), axis=-1)


def _saturating(log_seen: Array, log_unique: Array, log_r: Any) -> tuple[Array, Array, Array]:
    """log of U (1 + R (1 - exp(-(seen/U - 1)/R))), and its derivatives by log U and by log R."""
    r = np.exp(log_r)
    repeats = np.maximum(np.exp(np.minimum(log_seen - log_unique, 60.0)) - 1, 0.0)
    left = np.exp(-repeats / r)
    worth = 1 + r * -np.expm1(-repeats / r)
    by_r = (r * -np.expm1(-repeats / r) - repeats * left) / worth
    return np.asarray(log_unique + np.log(worth)), np.asarray(1 - (repeats + 1) * left / worth), np.asarray(by_r)


@dataclass(frozen=True)
class Broken(Law):
    """E + A x^-c0 (1 + (x/d)^(1/f))^(-c1 f): one smooth break."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("E", "A", "c0", "c1", "d", "f")

    @property
    def positive(self) -> frozenset[str]:
        return frozenset({"A", "d", "f"})

    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, c0, c1, d, log_f = (theta[:, index, None] for index in range(6))
        z, f = x[self.columns[0]], np.exp(log_f)
        u = (z - d) / f
        soft, sigmoid = np.logaddexp(0.0, u), 1 / (1 + np.exp(-np.clip(u, -500, 500)))
        term = np.exp(np.clip(a - c0 * z - c1 * f * soft, -200, 50))
        constant = np.broadcast_to(np.exp(e), term.shape)
        gradient = [constant, term, -term * z, -term * f * soft, term * c1 * sigmoid, -term * c1 * f * (soft - sigmoid * u)]
        return constant + term, _stack(gradient)

    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        middle = centres[self.columns[0]]
        e, a, c0, c1, d, log_f = theta.T
        return np.stack([np.exp(e), np.exp(np.minimum(a + c0 * middle, 700)), c0, c1, np.exp(d + middle), np.exp(log_f)], axis=1)

    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:
        z, floor, top = x[self.columns[0]], np.log(lowest * LOWEST_E), np.log(lowest)
        low = [floor, floor, -1.0, -MAX_EXPONENT, float(z.min()), np.log(0.05)]
        return np.array(low), np.array([top + ABOVE, top + 25, MAX_EXPONENT, MAX_EXPONENT, float(z.max()), np.log(5.0)])

    def shapes(self, x: Inputs) -> Array:
        places = np.quantile(x[self.columns[0]], [0.25, 0.5, 0.75])
        grid = np.meshgrid([0.0, 0.1, 0.3, 0.6], [-0.2, 0.1, 0.4], places, [0.3, 1.0], indexing="ij")
        return np.stack(grid, axis=-1).reshape(-1, 4)

    def design(self, shape: Array, x: Inputs) -> Array:
        theta = np.array([[-50.0, 0.0, *shape[:3], np.log(shape[3])]])
        return np.stack([np.ones_like(x[self.columns[0]]), self.value(theta, x)[0][0]], axis=1)

    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        e = min(_log(float(weights[0]), 0.01 * lowest), float(np.log(0.98 * lowest)))
        return np.array([e, _log(float(weights[1]), 0.01 * lowest), *shape[:3], np.log(shape[3])])


@dataclass(frozen=True)
class Routed(Law):
    """log10 L linear in log10 N, log10 experts and their product."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("a", "b", "c", "d")

    @property
    def positive(self) -> frozenset[str]:
        return frozenset()

    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        basis = self._basis(x)
        loss = np.exp(np.clip(theta @ basis.T, -50, 50))
        return loss, loss[:, :, None] * basis

    def _basis(self, x: Inputs) -> Array:
        n, experts = x["params"], x.whole("experts")
        return np.stack([n, experts, n * experts, np.ones_like(n)], axis=1)

    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        a, b, c, d = theta.T
        middle = centres["params"]
        return np.stack([a, b - c * middle, c * LN10, (d - a * middle) / LN10], axis=1)

    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:  # noqa: ARG002
        return np.full(4, -10.0), np.full(4, 10.0)

    def shapes(self, x: Inputs) -> Array:  # noqa: ARG002
        return np.array([[-0.05, -0.05, 0.0], [-0.1, -0.05, 0.0], [-0.1, -0.2, 0.01], [-0.2, -0.02, 0.0]])

    def design(self, shape: Array, x: Inputs) -> Array:
        return np.exp(self._basis(x)[:, :3] @ shape)[:, None]

    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        return np.array([*shape, _log(float(weights[0]), 0.01 * lowest)])


HOFFMANN, GADRE = "Hoffmann et al. 2022, 2203.15556, approach 3", "Gadre et al. 2024, 2403.08540"
N_AND_D = ("params", "tokens")


def _laws() -> Sequence[Law]:
    one = {"params": "N", "tokens": "D", "flops": "C"}
    singles: list[Law] = []
    for column, letter in one.items():
        suffix = "" if column == "params" else f"-{column}"
        singles += [
            Additive(f"power{suffix}", f"A {letter}^-alpha", "Kaplan et al. 2020, 2001.08361", (column,), constant=False),
            Additive(f"power-constant{suffix}", f"E + A {letter}^-alpha", "Henighan et al. 2020, 2010.14701", (column,)),
            Broken(
                f"broken{suffix}",
                f"E + A {letter}^-c0 (1 + ({letter}/d)^(1/f))^(-c1 f)",
                "Caballero et al. 2022, 2210.14891, one break",
                (column,),
            ),
        ]
    repeated = "E + A N'^-alpha + B D'^-beta, D' = U + U R_D (1 - exp(-(D/U - 1)/R_D)), N' alike with U_N = min(N_opt(U), N)"
    return (
        Additive("chinchilla", "E + A N^-alpha + B D^-beta", HOFFMANN, N_AND_D),
        Additive(
            "chinchilla-shared",
            "E + A N^-alpha + B D^-alpha",
            f"{GADRE} (their c 6^(b/2) (M N)^b, M = D/N)",
            N_AND_D,
            shared=True,
        ),
        Coupled("kaplan", "((N_c/N)^(alpha_N/alpha_D) + D_c/D)^alpha_D", "Kaplan et al. 2020, 2001.08361", N_AND_D, kaplan=True),
        Coupled("coupled", "E + A (N^-a + R D^-b)^k", "2608.07222", N_AND_D),
        DataConstrained("data-constrained", repeated, "Muennighoff et al. 2023, 2305.16264", (*N_AND_D, "unique_tokens")),
        Routed(
            "moe",
            "log10 L = a log10 N + b log10 X + c log10 N log10 X + d",
            "Clark et al. 2022, 2202.01169",
            ("params", "experts"),
        ),
        *singles,
    )


LAWS: Mapping[str, Law] = {law.name: law for law in _laws()}
