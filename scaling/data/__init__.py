"""Corpora, tokenizers and batches. Torch-free: batches are numpy arrays.

`prepare` turns a DataConfig into a memory-mapped Corpus; `train_batch`, `stream_batch` and `validation_batches` read it.
"""

from scaling.data.batches import stream_batch, train_batch, validation_batches
from scaling.data.corpus import Corpus, prepare, vocabulary_size

__all__ = ["Corpus", "prepare", "stream_batch", "train_batch", "validation_batches", "vocabulary_size"]
