"""Scaling laws as data: what each is called, what it reads, its formula, its source, its value and its analytic gradient.

Owns `LAWS`, every law by name, and the laws with a break and of routed models; `analysis.laws_joint` has those of parameters and
tokens, `analysis.law` what a law is. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.law import ABOVE, LOWEST_E, MAX_EXPONENT, Array, Inputs, Law, log_at_least, stack
from analysis.laws_joint import Additive, Coupled, DataConstrained, Farseer

__all__ = ["LAWS", "Array", "Inputs", "Law", "Routed"]

LN10 = float(np.log(10.0))


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
        return constant + term, stack(gradient)

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
        e = min(log_at_least(float(weights[0]), 0.01 * lowest), float(np.log(0.98 * lowest)))
        return np.array([e, log_at_least(float(weights[1]), 0.01 * lowest), *shape[:3], np.log(shape[3])])


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
        return np.array([*shape, log_at_least(float(weights[0]), 0.01 * lowest)])


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
        Farseer(
            "farseer-like",
            "E + A N^-alpha + B (N/1e9)^kappa (D/2e10)^-(beta (N/1e9)^gamma)",
            "after Li et al. 2025, 2506.10972: E(N) + B(N) D^-A(N), here with 7 parameters",
            N_AND_D,
        ),
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
