"""Laws of parameters and tokens together: additive (Chinchilla), coupled (Kaplan), Farseer-like, and with repeated data.

Owns their values and analytic gradients; `analysis.laws` names them. `Additive` is also the power law of a single column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.law import ABOVE, LOWEST_E, MAX_EXPONENT, Array, Inputs, Law, log_at_least, stack

REFERENCE_PARAMS, REFERENCE_TOKENS = 1e9, 2e10
"""N_0 and D_0 of the Farseer-like law: units, not parameters."""
SPLIT_REACH = float(np.log(1e6))


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
        gradient = stack([*constant, *terms, *([np.sum(slopes, axis=0)] if self.shared else slopes)])
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
        logs = [log_at_least(float(weight), 0.01 * lowest) for weight in weights]
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
            return term, stack([parts[0] / k, parts[1] / k, parts[2] / k, by_k])
        constant = np.broadcast_to(np.exp(theta[:, :1]), term.shape)
        return term + constant, stack([constant, *parts])

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
        logs = [log_at_least(float(weight), floor) for weight in weights]
        if self.kaplan:
            return np.array([*(shape[1] * log for log in logs), shape[1] * shape[0], np.log(shape[1])])
        return np.array([np.log(0.8 * lowest), *logs, shape[0], shape[1], np.log(shape[2])])

    def optimum(self, theta: Array, centres: Mapping[str, float], log_product: float) -> Array | None:
        p, q, a, b, _ = (part[:, 0] for part in self._split(theta))
        a, b = np.maximum(a, 1e-12), np.maximum(b, 1e-12)
        raw = p + a * centres["params"] - q - b * centres["tokens"]
        return np.asarray((np.log(a / b) + raw + b * log_product) / (a + b))


@dataclass(frozen=True)
class Farseer(Law):
    """E + A N^-alpha + B (N/N_0)^kappa (D/D_0)^-(beta (N/N_0)^gamma): Chinchilla's law where kappa and gamma are 0.

    theta holds b, beta and kappa as they are at the table's centre, so that they are little correlated; the law is the same.
    """

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("E", "A", "B", "alpha", "beta", "kappa", "gamma")

    @property
    def positive(self) -> frozenset[str]:
        return frozenset({"A", "B"})

    @staticmethod
    def _reach(centres: Mapping[str, float]) -> tuple[float, float]:
        """log of the table's centre over N_0 and over D_0."""
        return centres["params"] - float(np.log(REFERENCE_PARAMS)), centres["tokens"] - float(np.log(REFERENCE_TOKENS))

    def _tokens(self, theta: Array, n: Array, d: Array, centre: float) -> tuple[Array, tuple[Array, ...]]:
        """The term of the tokens at logs n, d about the centre, and the slopes of its log by n, d, b, beta, kappa and gamma."""
        b, beta, kappa, gamma = (theta[:, index, None] for index in (2, 4, 5, 6))
        bend = np.exp(np.clip(gamma * n, -30, 30))
        log = b + kappa * n - beta * (bend * d + centre * (bend - 1 - gamma * n))
        by_n = kappa - beta * gamma * (bend * d + centre * (bend - 1))
        by_gamma = -beta * n * (bend * d + centre * (bend - 1))
        slopes = (by_n, -beta * bend, np.ones_like(bend), -(bend * d + centre * (bend - 1 - gamma * n)), n, by_gamma)
        return np.exp(np.clip(log, -200, 50)), slopes

    def value(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        n, d = x["params"], x["tokens"]
        constant = np.exp(theta[:, :1])
        first = np.exp(np.clip(theta[:, 1:2] - theta[:, 3:4] * n, -200, 50))
        second, (_, _, *slopes) = self._tokens(theta, n, d, self._reach(x.centres)[1])
        by_b, by_beta, by_kappa, by_gamma = (second * slope for slope in slopes)
        return constant + first + second, stack([constant, first, by_b, -first * n, by_beta, by_kappa, by_gamma])

    def public(self, theta: Array, centres: Mapping[str, float]) -> Array:
        n, d = self._reach(centres)
        e, a, b, alpha, beta, kappa, gamma = theta.T
        whole = kappa + gamma * beta * d
        level = np.exp(np.minimum(b - whole * n + beta * d, 700.0))
        top = np.exp(np.minimum(a + alpha * centres["params"], 700.0))
        return np.stack([np.exp(e), top, level, alpha, beta * np.exp(-gamma * n), whole, gamma], axis=1)

    def bounds(self, lowest: float, x: Inputs) -> tuple[Array, Array]:  # noqa: ARG002
        floor, top = np.log(lowest * LOWEST_E), np.log(lowest)
        low = [floor, floor, floor, 0.0, 0.0, -MAX_EXPONENT, -1.0]
        return np.array(low), np.array([top + ABOVE, top + 25, top + 25, MAX_EXPONENT, MAX_EXPONENT, MAX_EXPONENT, 1.0])

    def shapes(self, x: Inputs) -> Array:  # noqa: ARG002
        line = [0.15, 0.3, 0.45, 0.7]
        return np.stack(np.meshgrid(line, line, [-0.1, 0.0, 0.1], [-0.05, 0.0, 0.05], indexing="ij"), axis=-1).reshape(-1, 4)

    def design(self, shape: Array, x: Inputs) -> Array:
        theta = np.array([[0.0, 0.0, 0.0, *shape]])
        second, _ = self._tokens(theta, x["params"], x["tokens"], self._reach(x.centres)[1])
        return np.stack([np.ones_like(x["params"]), np.exp(-shape[0] * x["params"]), second[0]], axis=1)

    def assemble(self, shape: Array, weights: Array, lowest: float) -> Array:
        logs = [log_at_least(float(weight), 0.01 * lowest) for weight in weights]
        logs[0] = min(logs[0], float(np.log(0.98 * lowest)))
        return np.array([*logs, *shape])

    def optimum(self, theta: Array, centres: Mapping[str, float], log_product: float) -> Array | None:
        """By bisection of the slope along the budget, within a factor of 10^6 of the table's centre."""
        n_0, d_0, centre = centres["params"], centres["tokens"], self._reach(centres)[1]
        low, high = np.full((len(theta), 1), -SPLIT_REACH), np.full((len(theta), 1), SPLIT_REACH)
        for _ in range(55):
            n = (low + high) / 2
            second, (by_n, by_d, *_) = self._tokens(theta, n, log_product - n_0 - d_0 - n, centre)
            falls = second * (by_n - by_d) < theta[:, 3:4] * np.exp(np.clip(theta[:, 1:2] - theta[:, 3:4] * n, -200, 50))
            low, high = np.where(falls, n, low), np.where(falls, high, n)
        return np.asarray((low + high)[:, 0] / 2 + n_0)


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
        return constant + first + second, stack(parts)

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
        logs = [log_at_least(float(weight), 0.01 * lowest) for weight in weights]
        logs[0] = min(logs[0], float(np.log(0.98 * lowest)))
        return np.array([*logs, shape[0], shape[1], np.log(shape[2]), np.log(shape[3])])


def _saturating(log_seen: Array, log_unique: Array, log_r: Any) -> tuple[Array, Array, Array]:
    """log of U (1 + R (1 - exp(-(seen/U - 1)/R))), and its derivatives by log U and by log R."""
    r = np.exp(log_r)
    repeats = np.maximum(np.exp(np.minimum(log_seen - log_unique, 60.0)) - 1, 0.0)
    left = np.exp(-repeats / r)
    worth = 1 + r * -np.expm1(-repeats / r)
    by_r = (r * -np.expm1(-repeats / r) - repeats * left) / worth
    return np.asarray(log_unique + np.log(worth)), np.asarray(1 - (repeats + 1) * left / worth), np.asarray(by_r)
