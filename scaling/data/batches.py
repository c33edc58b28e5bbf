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
    places = starts[:, None] + np.arange(context + 1)
    return np.asarray(corpus.train[places], dtype=np.int64)


def stream_batch(
    corpus: Corpus, *, step: int, after_step: int, order_of: int, data_seed: int, batch_size: int, context: int
) -> np.ndarray:
    """Batch number `step` (from 0) of `batch_size` windows of those that follow `after_step` updates with batches of `order_of`.

    All batch sizes see the same windows in the same order: int64 (batch_size, context + 1).
    """
    first = step * batch_size
    chunks = range(first // order_of, (first + batch_size - 1) // order_of + 1)
    parts = [
        train_batch(corpus, step=after_step + chunk, data_seed=data_seed, batch_size=order_of, context=context)
        for chunk in chunks
    ]
    return np.concatenate(parts)[first % order_of :][:batch_size]


def validation_batches(corpus: Corpus, *, sequences: int, context: int, batch_size: int = 32) -> Iterator[np.ndarray]:
    """Evenly spaced windows of the validation part that do not overlap: int64 (up to batch_size, context + 1) each.

    The windows are the same for every run; there are fewer than `sequences` when the part cannot hold so many.
    """
    sequences = min(sequences, max(len(corpus.validation) // (context + 1), 1))
    last = len(corpus.validation) - context - 1
    starts = np.arange(sequences) * last // max(sequences - 1, 1)
    for first in range(0, sequences, batch_size):
        places = starts[first : first + batch_size, None] + np.arange(context + 1)
        yield np.asarray(corpus.validation[places], dtype=np.int64)
