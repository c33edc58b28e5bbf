"""A measured study to test against: one seed, four widths, a byte-level transformer under SP and muP (nats per byte)."""

from __future__ import annotations

import pandas as pd

FIRST = {"sp": -12, "mup": -10}
LOSSES: dict[str, dict[int, list[float | None]]] = {
    "sp": {
        32: [3.338, 2.672, 2.334, 2.151, 2.046, 1.973, 1.910, 2.161, 2.371],
        64: [2.518, 2.230, 2.046, 1.944, 1.851, 1.844, 1.985, 2.203, 2.412],
        128: [2.172, 2.011, 1.865, 1.775, 1.757, 1.802, 2.111, 2.248, 2.426],
        256: [1.906, 1.791, 1.709, 1.680, 1.756, 1.964, 2.229, 2.360, 2.521],
    },
    "mup": {
        32: [None, 1.912, 1.860, 1.846, 1.997, 2.218],
        64: [1.906, 1.812, 1.763, 1.767, 1.858, 2.004],
        128: [1.848, 1.733, 1.678, 1.693, 1.825, None],
        256: [None, 1.670, 1.635, 1.661, 1.781, None],
    },
}


def proxy_frame() -> pd.DataFrame:
    """One row a run."""
    rows = [
        {"parametrization": kind, "width": width, "log2_lr": FIRST[kind] + index, "loss": loss}
        for kind, widths in LOSSES.items()
        for width, losses in widths.items()
        for index, loss in enumerate(losses)
        if loss is not None
    ]
    return pd.DataFrame(rows)
