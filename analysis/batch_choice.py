"""The batch of a large run: from a measured noise scale or a fitted law, rounded to what its devices can share.

Owns BatchChoice and its makers. All batches are in tokens. A noise scale and a critical batch are ceilings, and are rounded down; a best
batch is rounded to the nearest. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.results import Interval
from scaling.errors import DataError, Fault

if TYPE_CHECKING:
    from analysis.critical_batch import CriticalBatch
    from analysis.lr_batch_result import LrBatchPrediction
    from analysis.noise_scale import NoiseScale

MCCANDLISH = "McCandlish et al. (1812.06162): at B_simple a run takes twice the fewest steps and twice the fewest tokens"


@dataclass(frozen=True)
class BatchChoice:
    """A batch that something measured speaks for; tokens, the interval at the source's level."""

    tokens: float
    interval: Interval
    what: str
    source: str
    assumption: str
    ceiling: bool = True
    """Whether larger batches than this are wasteful, so that it is rounded down."""
    flags: tuple[str, ...] = ()

    def rounded(self, context: int, devices: int | None, micro_batch_size: int | None) -> int:
        """Tokens in whole sequences that the devices can share: see `shared_unit`; at least one unit."""
        sequences = self.tokens / context
        unit = shared_unit(sequences, devices or 1, micro_batch_size or 1)
        parts = sequences / unit
        return max(math.floor(parts) if self.ceiling else round(parts), 1) * unit * context

    def text(self) -> str:
        low, high = self.interval
        known = f" [{_tokens(low)}, {_tokens(high)}]" if not (math.isnan(low) and math.isnan(high)) else ""
        return f"{self.what} {_tokens(self.tokens)}{known} tokens"

    def warnings(self, batch_tokens: int) -> list[str]:
        """What speaks against a run at `batch_tokens`, and the source's own doubts."""
        said = [f"{self.what}: {flag}" for flag in self.flags]
        if self.ceiling and batch_tokens > self.interval[1]:
            far = f"{batch_tokens / self.tokens:.3g} times {self.what}"
            said.append(f"the batch is {far}: steps are hardly saved there, and the LR's rule for batches does not hold")
        return said

    def to_dict(self) -> dict[str, object]:
        words = {"what": self.what, "source": self.source, "ceiling": self.ceiling, "flags": list(self.flags)}
        return {"tokens": self.tokens, "interval": list(self.interval), **words}


def _tokens(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "unbounded"


def shared_unit(sequences: float, devices: int, micro_batch_size: int) -> int:
    """Sequences that a batch comes in: a micro-batch on every device where the batch has as many; else, where several devices must work
    on one sequence, the power of two that changes the batch by at most an eighth.
    """
    every = devices * micro_batch_size
    return every if sequences >= every else 2 ** max(math.floor(math.log2(max(sequences, 1) / 8)), 0)


def of_noise_scale(scale: NoiseScale, context: int, where: str) -> BatchChoice:
    """The noise scale of the last window of a proxy run. Raises DataError where it is not bounded below."""
    if not (math.isfinite(scale.sequences) and scale.sequences > 0):
        what = f"its noise scale is not bounded ({scale})"
        raise DataError(Fault(where, what, "measure more often or longer: --set runtime.noise_scale_every_steps=1"))
    low, high = scale.interval
    assumption = "it grows as the loss falls, so that a proxy's is rather too small for the large run"
    flags = () if scale.bounded else ("its interval is open above",)
    name = f"the noise scale of the proxy's steps {scale.first_step} to {scale.last_step},"
    return BatchChoice(
        scale.sequences * context, (low * context, high * context), name, f"{where}; {MCCANDLISH}", assumption, True, flags
    )


def of_critical_batch(predicted: CriticalBatch, context: int, where: str) -> BatchChoice:
    """A critical batch that a law predicts at the target's sizes; a law in sequences is taken to be in the target's context."""
    factor = {"tokens": 1, "sequences": context}.get(predicted.unit)
    if factor is None:
        raise DataError(Fault(where, f"its batches are in {predicted.unit}", "map a column batch_tokens or batch_seqs"))
    low, high = predicted.batch.interval
    name = f"the critical batch ({predicted.definition}) at {_place(predicted.at)}"
    source = f"law fitted to {where}; Zhang et al. (2410.21676)"
    assumption = "the law goes on as it did over the sizes that it was fitted to"
    interval = (low * factor, high * factor)
    return BatchChoice(predicted.batch.value * factor, interval, name, source, assumption, True, predicted.flags)


def of_lr_batch(predicted: LrBatchPrediction, where: str) -> BatchChoice:
    """The best batch that a law predicts at the target's sizes. Raises DataError where its study did not search the batch."""
    batch = predicted.knobs.get("batch_tokens")
    if batch is None:
        cure = "give a table that varies both, or --batch-law critical-batch"
        raise DataError(Fault(where, "searched the learning rate and not the batch: the law has no best batch", cure))
    name = f"the best batch at {_place(predicted.at)}"
    source = f"law fitted to {where}; form of Step Law (2503.04715)"
    assumption = "the law goes on as it did over the sizes that it was fitted to"
    return BatchChoice(batch.value, batch.interval, name, source, assumption, False, predicted.flags)


def _place(at: Mapping[str, float]) -> str:
    return " and ".join(f"{value:.4g} {name}" for name, value in at.items())
