"""The matrix products of a step on a CPU: torch's own, or oneDNN's where that is the faster one.

On AMD processors with AVX-512 the MKL that torch multiplies fp32 matrices with stays at AVX2, at less than half of what oneDNN, which torch
has too, makes of the same core. torch gives fp32 convolutions to oneDNN, and a convolution of size 1 is the product of a linear layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
"""torch gives 1 x 1 convolutions of fewer rows on one thread to MKL after all."""
PLAIN = (Tensor, torch.nn.Parameter)
ONEDNN: bool = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"  # type: ignore[no-untyped-call]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for x (..., in) and weight (out, in): `F.linear`, up to the order of its sums."""
    tokens = x.numel() // x.shape[-1]
    if not (ONEDNN and x.is_cpu and x.dtype is weight.dtype is torch.float32 and tokens % ROWS == 0 and tokens):
        return F.linear(x, weight)
    if type(weight) not in PLAIN:
        return F.linear(x, weight)  # a tensor-parallel one: DTensor has no rule for this convolution's reshapes
    if torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight)  # in bf16, which torch gives to oneDNN by itself
    # Channels last in memory, as it lies: nothing is copied.
    image = x.reshape(ROWS, 1, tokens // ROWS, x.shape[-1]).permute(0, 3, 1, 2)
    y = F.conv2d(image, weight[:, :, None, None])
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])
