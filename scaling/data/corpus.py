"""DataConfig -> Corpus: find the files, take the tokens from the cache or make them, check, fingerprint.

The cache is keyed by a manifest (names, sizes, modification times, settings), so that a second call reads no text.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scaling.config import DataConfig, content_hash
from scaling.data import binary, synthetic, tokenizers
from scaling.data.cache import Entry, Meta, chunks, default_cache, find_or_build, map_tokens, write_tokens
from scaling.data.documents import SourceFile, read_documents, source_files
from scaling.data.rows import Document
from scaling.errors import DataError, Fault, raise_all

# Raise it with every change of code that makes other tokens from the same files.
CACHE_VERSION = 2
SPLIT_SEED = 0
_TRAIN, _VALIDATION = "train.bin", "validation.bin"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens ready to train on: one-dimensional arrays, memory-mapped so that processes share their pages."""

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    sha256: str
    """Fingerprint of both arrays and the vocabulary's size."""
    entropy_floor: float | None
    """Nats per token that no model can beat, where it is known."""
    description: str
    """One line for people."""


def vocabulary_size(config: DataConfig) -> int | None:
    """The tokenizer's vocabulary, without reading data; None for .bin files, which do not say."""
    if config.source == "bin":
        return None
    if config.source == "zipf-markov":
        return config.synthetic_vocab
    return 256 if config.tokenizer == "bytes" else config.bpe_vocab_size


def prepare(
    config: DataConfig,
    *,
    context: int,
    vocab_size: int | None = None,
    cache: Path | None = None,
    config_dir: Path | None = None,
) -> Corpus:
    """The corpus of `config`, checked against a model's `context` (tokens) and `vocab_size`.

    Relative paths are taken from `config_dir`, by default the current folder. `cache` is by default that of `default_cache`.
    Raises DataError for a corpus that is missing, empty, too short, over its vocabulary, or not the one pinned by `sha256`, and
    for a cache that cannot be written; MissingExtra for Parquet without pyarrow and BPE without tokenizers.
    """
    cache = default_cache() if cache is None else cache
    if config.source == "bin":
        corpus = _bin_corpus(config, cache, vocab_size, config_dir)
    elif config.source == "zipf-markov":
        corpus = _synthetic_corpus(config, cache)
    else:
        corpus = _document_corpus(config, cache, config_dir)
    raise_all(
        [*_length_faults(corpus, config, context), *_vocabulary_faults(corpus, vocab_size), *_pin_faults(corpus, config)],
        DataError,
    )
    return corpus


def fingerprint(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> str:
    """SHA-256 of what training sees: the tokens, whatever type holds them, and the vocabulary's size."""
    digest = hashlib.sha256(f"{vocab_size} {len(train)} {len(validation)}".encode())
    for array in (train, validation):
        for chunk in chunks(array):
            digest.update(np.ascontiguousarray(chunk, dtype="<u4").data)
    return digest.hexdigest()


def _bin_corpus(config: DataConfig, cache: Path, vocab_size: int | None, config_dir: Path | None) -> Corpus:
    files = binary.bin_files(config, vocab_size, config_dir)
    train, validation = arrays = binary.map_bin(files, config.dtype)
    assert vocab_size is not None, "bin_files refuses to go without"

    def build(folder: Path) -> Meta:
        del folder
        binary.check_tokens(files, arrays, vocab_size)
        description = f"bin: {len(train):,} + {len(validation):,} tokens ({config.dtype})"
        return Meta(vocab_size=vocab_size, sha256=fingerprint(train, validation, vocab_size), description=description, arrays={})

    meta = find_or_build(cache, _cache_key(config, {"dtype"}, files, vocab_size), build).meta
    return Corpus(train, validation, vocab_size, meta.sha256, None, meta.description)


def _synthetic_corpus(config: DataConfig, cache: Path) -> Corpus:
    vocab, exponent = config.synthetic_vocab, config.synthetic_zipf
    floor = synthetic.entropy_floor(vocab, exponent)

    def build(folder: Path) -> Meta:
        held_out = max(round(config.synthetic_tokens * config.validation_fraction), 1)
        walks = [
            [synthetic.generate(tokens, vocab, exponent, seed)] for seed, tokens in enumerate((config.synthetic_tokens, held_out))
        ]
        about = f"zipf-markov: {vocab} tokens, exponent {exponent:g}, entropy {floor:.4f} nats per token"
        return _store(folder, walks[0], walks[1], vocab, about)

    fields = {"synthetic_tokens", "synthetic_vocab", "synthetic_zipf", "validation_fraction"}
    return _from_entry(find_or_build(cache, _cache_key(config, fields), build), floor)


def _document_corpus(config: DataConfig, cache: Path, config_dir: Path | None) -> Corpus:
    files = source_files(config, config_dir)

    def build(folder: Path) -> Meta:
        if config.tokenizer == "bpe":
            # Said before a large corpus is read.
            tokenizers.bpe_library()
        documents = read_documents(config, files)
        train, validation = _split(config, documents)
        counts = f"{len(documents):,} documents in {len(files):,} files, {len(validation):,} held out"
        if config.tokenizer == "bytes":
            encoded = [tokenizers.encode_bytes(part) for part in (train, validation)]
            return _store(folder, encoded[0], encoded[1], 256, f"{config.source}: {counts}, bytes")
        vocab = config.bpe_vocab_size
        tokenizer = tokenizers.train_bpe(train, vocab)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        encoded = [tokenizers.encode_bpe(tokenizer, part, vocab) for part in (train, validation)]
        return _store(folder, encoded[0], encoded[1], vocab, f"{config.source}: {counts}, BPE of {vocab}")

    fields = {"tokenizer", "validation_fraction"} | ({"bpe_vocab_size"} if config.tokenizer == "bpe" else set())
    fields |= {"field"} if config.source in ("jsonl", "parquet") else set()
    return _from_entry(find_or_build(cache, _cache_key(config, fields, files), build))


def _split(config: DataConfig, documents: list[Document]) -> tuple[list[bytes], list[bytes]]:
    """Texts to train on and texts held out, by whole documents in an order that depends on their names alone."""
    where = "data.paths" if config.paths else "data.source"
    if not documents:
        no_sources = "install Python with its sources, or choose another data.source"
        cure = no_sources if config.source == "stdlib" else "give files with text"
        raise DataError(Fault(where, f"the corpus is empty ({', '.join(config.paths) or config.source})", cure))
    if len(documents) == 1:
        what = f"the corpus is one document ({documents[0].name}), and validation text is held out by whole documents"
        raise DataError(Fault(where, what, "split it: give at least two files, lines or rows"))
    documents = sorted(documents)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
    held_out = min(max(round(len(documents) * config.validation_fraction), 1), len(documents) - 1)
    texts = [documents[place].text for place in order]
    return texts[:-held_out], texts[-held_out:]


def _store(folder: Path, train: Iterable[np.ndarray], validation: Iterable[np.ndarray], vocab: int, about: str) -> Meta:
    """Write both parts into `folder` and say what they are."""
    parts = {_TRAIN: train, _VALIDATION: validation}
    stored = {name: write_tokens(folder / name, part, tokenizers.smallest_dtype(vocab)) for name, part in parts.items()}
    description = f"{about}; {stored[_TRAIN].tokens:,} + {stored[_VALIDATION].tokens:,} tokens"
    arrays = map_tokens(folder, stored)
    sha256 = fingerprint(arrays[_TRAIN], arrays[_VALIDATION], vocab)
    return Meta(vocab_size=vocab, sha256=sha256, description=description, arrays=stored)


def _from_entry(entry: Entry, floor: float | None = None) -> Corpus:
    meta = entry.meta
    return Corpus(entry.arrays[_TRAIN], entry.arrays[_VALIDATION], meta.vocab_size, meta.sha256, floor, meta.description)


def _cache_key(config: DataConfig, fields: set[str], files: Iterable[SourceFile] = (), vocab_size: int | None = None) -> str:
    """A hash of all that decides which tokens come out."""
    manifest = {
        "version": CACHE_VERSION,
        "settings": config.model_dump(mode="json", include={"source", *fields}),
        "files": [(file.name, str(file.path), file.size, file.mtime_ns) for file in files],
        "vocab_size": vocab_size,
        "python": platform.python_version() if config.source == "stdlib" else None,
    }
    return content_hash(manifest, digits=24)


def _length_faults(corpus: Corpus, config: DataConfig, context: int) -> list[Fault]:
    more = {"zipf-markov": "raise data.synthetic_tokens", "bin": "write more tokens"}.get(config.source, "give more text")
    place = {"zipf-markov": "data.synthetic_tokens", "stdlib": "data.source"}.get(config.source, "data.paths")
    faults = []
    for part, key, array in (("training", "train_bin", corpus.train), ("validation", "validation_bin", corpus.validation)):
        if len(array) > context:
            continue
        cures = [f"set model.context to at most {len(array) - 1}"] if len(array) > 2 else []
        cures.append(more)
        if config.source != "bin":
            cures.append(f"{'raise' if part == 'validation' else 'lower'} data.validation_fraction")
        where = f"data.{key}" if config.source == "bin" else place
        what = f"the {part} part has {len(array)} tokens, and a context of {context} needs {context + 1}"
        faults.append(Fault(where, what, " or ".join(cures)))
    return faults


def _vocabulary_faults(corpus: Corpus, vocab_size: int | None) -> list[Fault]:
    if vocab_size is None or corpus.vocab_size <= vocab_size:
        return []
    what = f"{vocab_size} is smaller than the tokenizer's vocabulary of {corpus.vocab_size}"
    return [Fault("model.vocab_size", what, f"set it to {corpus.vocab_size} or leave it out")]


def _pin_faults(corpus: Corpus, config: DataConfig) -> list[Fault]:
    if config.sha256 in (None, corpus.sha256):
        return []
    what = f"the corpus has SHA-256 {corpus.sha256}, the config pins {config.sha256}"
    cure = "restore the data, or remove data.sha256 to train on the data as they are now"
    if config.source == "stdlib":
        cure += "; another Python version or build has another standard library"
    return [Fault("data.sha256", what, cure)]
