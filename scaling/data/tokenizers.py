"""Bytes, or a byte-level BPE trained on the training documents with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaling.errors import DataError, Fault, MissingExtra

END_BYTE = 0
END_TOKEN = "<|endoftext|>"


def encode_bytes(documents: Iterable[bytes]) -> np.ndarray:
    """One uint8 array; each document is followed by a zero byte."""
    return np.frombuffer(b"".join(text + bytes([END_BYTE]) for text in documents), dtype=np.uint8)


def train_bpe(documents: Sequence[bytes], vocab_size: int, path: Path) -> Any:
    """Train a byte-level BPE of `vocab_size` tokens on `documents` and save it to `path`.

    Raises MissingExtra without the library, DataError when the text has too few different pairs for the vocabulary.
    """
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("tokenizers", "bpe", "data.tokenizer bpe") from None
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode(errors="replace") for text in documents), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        size = tokenizer.get_vocab_size()
        cure = f"set data.bpe_vocab_size to {size} or less, or give more text"
        raise DataError(Fault("data.bpe_vocab_size", f"the corpus yields {size} tokens, {vocab_size} are asked for", cure))
    tokenizer.save(str(path))
    return tokenizer


def encode_bpe(tokenizer: Any, documents: Iterable[bytes], vocab_size: int) -> np.ndarray:
    """One array of the smallest type that holds the vocabulary; each document is followed by the end token."""
    end = tokenizer.token_to_id(END_TOKEN)
    encoded = tokenizer.encode_batch([text.decode(errors="replace") for text in documents], add_special_tokens=False)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    return np.concatenate([np.array([*encoding.ids, end], dtype=dtype) for encoding in encoded])
