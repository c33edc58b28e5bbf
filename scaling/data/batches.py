"""Batches as pure functions: of (data seed, step) for training, of the corpus alone for validation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scaling.data.corpus import Corpus


def train_batch(corpus: Corpus, *, step: int, data_seed: int, batch_size: int, context: int) -> np.ndarray:
    """Windows at random places: int64 (batch_size, context + 1).

    The same for every learning rate, width and parametrization, and a larger batch begins with the smaller one.
    """
    generator = np.random.Generator(np.random.Philox(key=[data_seed, step]))
    starts = (generator.random(batch_size) * (len(corpus.train) - context)).astype(np.int64)
    return corpus.train[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def validation_batches(corpus: Corpus, *, sequences: int, context: int, batch_size: int = 32) -> Iterator[np.ndarray]:
    """Evenly spaced windows of the validation part, int64 (up to batch_size, context + 1); fewer when it is small."""
    last = len(corpus.validation) - context - 1
    sequences = min(sequences, max(len(corpus.validation) // (context + 1), 1))
    starts = np.linspace(0, last, sequences).astype(np.int64)
    for first in range(0, sequences, batch_size):
        places = starts[first : first + batch_size, None] + np.arange(context + 1)
        yield corpus.validation[places].astype(np.int64)
