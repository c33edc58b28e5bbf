"""The runs of one cell, which differ in learning rate and seed alone: their names and their cost without building their configs.

Owns `RunFamily`. A config is a tree of validated models and costs a hundred times what its name does; a plan of 20,000 runs, of which a
driver or `status` needs the names, would take seconds.
"""

from __future__ import annotations

import hashlib

from scaling.accounting import run_flops
from scaling.config import ID_DIGITS, RunConfig, canonical_json
from sweeps.axes import At
from sweeps.study import Kind, StudyConfig

# No setting holds a control character: where these stand in the text, the varied numbers go.
_LR, _SEED = "\x00lr", "\x00seed"


class RunFamily:
    """The runs of one (parametrization, width) of a study, at one place on its other axes."""

    def __init__(self, study: StudyConfig, kind: Kind, width: int, at: At = ()) -> None:
        self._study, self.kind, self.width, self.at = study, kind, width, at
        template = study.run(kind, width, study.log2_lr.low, 0, at)
        self.flops = run_flops(template)
        """Training FLOPs of each run."""
        values = template.identity()
        values["optimizer"]["lr"] = _LR
        values["training"] |= {"seed": _SEED, "data_seed": _SEED}
        head, rest = canonical_json(values).split(canonical_json(_LR))
        middle, between, tail = rest.split(canonical_json(_SEED))
        self._parts = head, middle, between, tail

    def run_id(self, log2_lr: float, seed: int) -> str:
        """`self.run(log2_lr, seed).run_id`"""
        head, middle, between, tail = self._parts
        # JSON writes a float as Python does.
        text = f"{head}{2.0**log2_lr!r}{middle}{seed}{between}{seed}{tail}"
        return hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]

    def run(self, log2_lr: float, seed: int) -> RunConfig:
        return self._study.run(self.kind, self.width, log2_lr, seed, self.at)
