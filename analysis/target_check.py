"""What makes a target one that a study cannot speak about: its width, batch, tokens and devices, all faults at once.

Owns `check_target`.
"""

from __future__ import annotations

from collections.abc import Callable

from analysis.target import TargetConfig
from scaling.config import RunConfig
from scaling.errors import ConfigError, Fault

MAX_STEPS = 2**31 - 1


def check_target(target: TargetConfig, template: RunConfig, place: Callable[[str], str] = str) -> None:
    """Raise ConfigError with every reason why the study cannot speak about this target.

    place: key -> where it was written, for the message.
    """
    faults = []
    base = template.base.width
    if target.width < base:
        cure = f"give a width of at least {base}, or train the small model directly: a sweep at its own width is cheap"
        faults.append(Fault(place("width"), f"target width {target.width} is smaller than the base width {base}", cure))
    reason = template.model.check_width(target.width)
    if reason:
        faults.append(Fault(place("width"), reason))
    context = target.context or template.model.context
    if target.batch_tokens is not None and target.batch_tokens % context:
        near = max(round(target.batch_tokens / context), 1) * context
        what = f"batch_tokens {target.batch_tokens} is not a multiple of the context {context}"
        faults.append(Fault(place("batch_tokens"), what, f"for example {near}"))
    batch_tokens = target.batch_tokens or template.batch_tokens
    if target.tokens < batch_tokens:
        faults.append(Fault(place("tokens"), f"{target.tokens} tokens are less than one batch of {batch_tokens}"))
    elif target.tokens // batch_tokens > MAX_STEPS:
        faults.append(Fault(place("tokens"), f"{target.tokens} tokens are more than {MAX_STEPS} steps of {batch_tokens} tokens"))
    if target.gpus is not None and target.gpus.device is None and not faults:
        sequences = batch_tokens // context
        if sequences % target.gpus.count:
            near = max(round(sequences / target.gpus.count), 1) * target.gpus.count * context
            what = f"a batch of {sequences} sequences does not divide over {target.gpus.count} GPUs"
            faults.append(Fault(place("gpus"), what, f"batch_tokens: {near}, or another number of GPUs"))
    if faults:
        raise ConfigError(*faults)
