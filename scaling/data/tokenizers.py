"""Bytes, or a byte-level BPE trained on the training documents with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from scaling.errors import DataError, Fault, MissingExtra

END_BYTE = b"\0"
END_TOKEN = "<|endoftext|>"
# Encodings are far larger than their text, so that a corpus is encoded in pieces of about this many bytes.
_PIECE = 1 << 22


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint8, uint16 and uint32 that holds every token id below `vocab_size`."""
    return np.dtype(np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32)


def encode_bytes(documents: Sequence[bytes]) -> Iterator[np.ndarray]:
    """One uint8 array a document, which ends with a zero byte."""
    for text in documents:
        yield np.frombuffer(text + END_BYTE, dtype=np.uint8)


def bpe_library() -> Any:
    """The `tokenizers` module. Raises MissingExtra without it."""
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("tokenizers", "bpe", "data.tokenizer bpe") from None
    return tokenizers


def train_bpe(documents: Sequence[bytes], vocab_size: int) -> Any:
    """A byte-level BPE of `vocab_size` tokens, END_TOKEN among them, trained on `documents`.

    Raises MissingExtra without the library, DataError when the text has too few different pairs for the vocabulary.
    """
    library = bpe_library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_text(document) for document in documents), trainer)
    # A document that spells out the end token has not ended there.
    tokenizer.encode_special_tokens = True
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        cure = f"set data.bpe_vocab_size to {size} or less, or give more text"
        raise DataError(Fault("data.bpe_vocab_size", f"the corpus yields {size} tokens, {vocab_size} are asked for", cure))
    return tokenizer


def encode_bpe(tokenizer: Any, documents: Sequence[bytes], vocab_size: int) -> Iterator[np.ndarray]:
    """One array a document, of the smallest type that holds the vocabulary; it ends with END_TOKEN."""
    end, dtype = tokenizer.token_to_id(END_TOKEN), smallest_dtype(vocab_size)
    for piece in _pieces(documents):
        for encoding in tokenizer.encode_batch_fast([_text(document) for document in piece], add_special_tokens=False):
            yield np.array([*encoding.ids, end], dtype=dtype)


def _pieces(documents: Sequence[bytes]) -> Iterator[list[bytes]]:
    piece: list[bytes] = []
    size = 0
    for document in documents:
        piece.append(document)
        size += len(document)
        if size >= _PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _text(document: bytes) -> str:
    # Of all sources only the standard library has files in other encodings: tests of its own codecs.
    return document.decode(errors="replace")
