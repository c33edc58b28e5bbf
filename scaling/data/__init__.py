"""Corpora, tokenizers and batches. Torch-free: batches are numpy arrays.

`prepare` turns a DataConfig into a memory-mapped Corpus; `train_batch` and `validation_batches` read it.
"""

from scaling.data.batches import train_batch, validation_batches
from scaling.data.corpus import Corpus, prepare, vocabulary_size

__all__ = ["Corpus", "prepare", "train_batch", "validation_batches", "vocabulary_size"]
