"""The figure that every plot is drawn on: matplotlib's, which Jupyter shows by itself, without pyplot and its global state."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

DPI = 110


class Picture(Figure):
    """A Figure that is an image as a notebook cell's last value, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")
        return buffer.getvalue()
