"""Random signs for estimates of a Jacobian's size (Hutchinson), with less noise than independent ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BALANCED = 65_536
"""Outputs up to which their signs are balanced over the samples; more are many enough."""


def balanced_signs(output: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs in the output's shape, of which every two are uncorrelated.

    What all samples of a batch have in common is what makes one draw noisy: for each entry of the last dimension, the sum S of its
    signs over the samples is drawn close to sqrt(samples) instead of being left to chance. S^2 is `samples` on average, as it must be.
    """
    classes = output.shape[-1] if output.dim() > 1 else 1
    samples = output.numel() // max(1, classes)
    if output.numel() > BALANCED or not samples:
        return torch.empty_like(output).bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)
    low = math.isqrt(samples)
    low -= (low - samples) % 2

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=output.device)

    more = uniform(classes) < (samples - low**2) / ((low + 2) ** 2 - low**2)
    positive = (samples + low + 2 * more) // 2
    signs = 1.0 - 2.0 * (uniform(samples, classes).argsort(0).argsort(0) >= positive)
    flips = 1.0 - 2.0 * (uniform(classes) < 0.5)
    return (signs * flips).reshape(output.shape).to(output)
