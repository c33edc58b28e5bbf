"""What changes when the same model is trained for another number of steps: pure functions of S = m_D / m_B.

m_D is the ratio of tokens, m_B of batches, so that S is the ratio of the numbers of steps. Complete(d)P (2512.22382) Table 1, after the
SDE argument of Malladi et al. (2205.10287): it holds while a batch is small against the gradient's noise (below the critical batch).
"""

from __future__ import annotations

HORIZON_SOURCE = "Complete(d)P (2512.22382) Table 1, exponent 1/2; Bjorck et al. (2409.19913) measured 0.3 to 0.7 for tokens"


def horizon_betas(betas: tuple[float, float], steps_ratio: float) -> tuple[float, float]:
    """Adam's betas at S: 1 - beta goes with 1/S. Raises ValueError when 1 - beta would reach 1: the batch is too large for the rule."""
    carried = []
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        complement = (1 - beta) / steps_ratio
        if complement >= 1:
            raise ValueError(f"1 - {name} = {1 - beta:g} / S = {complement:.3g} reaches 1 at S = {steps_ratio:.3g}")
        if 1 - complement >= 1:
            raise ValueError(f"1 - {name} = {1 - beta:g} / S vanishes at S = {steps_ratio:.3g}")
        carried.append(1 - complement)
    return carried[0], carried[1]


def horizon_factors(steps_ratio: float, exponent: float) -> dict[str, float]:
    """Factors on lr, weight_decay (torch.optim.AdamW's) and eps at S: S^-exponent for the first two, S^exponent for eps.

    At 1/2 the share of the run over which AdamW's decay averages stays the same.
    """
    factor = steps_ratio**-exponent
    return {"lr": factor, "weight_decay": factor, "eps": 1 / factor}
