"""DataConfig -> Corpus: read, split by document, tokenize, cache, check, fingerprint.

The cache is keyed by a manifest (names, sizes, modification times, settings), so that a second call reads no text. Entries are
built aside and renamed into place: complete or absent, also when two processes build at once or one is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scaling.config import DataConfig, content_hash
from scaling.data import synthetic, tokenizers
from scaling.data.documents import read_documents, source_files
from scaling.errors import DataError, Fault, UserError, raise_all

CACHE_VERSION = 1
SPLIT_SEED = 0
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Corpus:
    """Tokens ready to train on; the arrays are memory-mapped, so that processes share their pages."""

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    sha256: str
    """Fingerprint of both arrays and the vocabulary's size."""
    entropy_floor: float | None
    """Nats per token that no model can beat, where it is known."""
    description: str


def vocabulary_size(config: DataConfig) -> int | None:
    """The tokenizer's vocabulary, or None for .bin files, which do not say."""
    if config.source == "bin":
        return None
    if config.source == "zipf-markov":
        return config.synthetic_vocab
    return 256 if config.tokenizer == "bytes" else config.bpe_vocab_size


def prepare(config: DataConfig, *, context: int, vocab_size: int | None = None, cache: Path | None = None) -> Corpus:
    """The corpus of `config`, checked against a model's `context` and `vocab_size`.

    Raises DataError for a corpus that is missing, empty, too short, over its vocabulary, or not the one pinned by `sha256`.
    """
    corpus = _bin_corpus(config, vocab_size) if config.source == "bin" else _cached(config, cache or default_cache())
    faults = [*_length_faults(corpus, context), *_vocabulary_faults(corpus, vocab_size), *_pin_faults(corpus, config)]
    raise_all(faults, DataError)
    return corpus


def default_cache() -> Path:
    """$MUTRANSFER_CACHE, else mutransfer/ in $XDG_CACHE_HOME or ~/.cache."""
    if os.environ.get("MUTRANSFER_CACHE"):
        return Path(os.environ["MUTRANSFER_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mutransfer"


def _cached(config: DataConfig, cache: Path) -> Corpus:
    entry = cache / _cache_key(config)
    corpus = _load(entry, config)
    if corpus is not None:
        return corpus
    try:
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
    except OSError as error:
        raise _cache_fault(cache, error) from None
    try:
        _build(config, building)
        _replace(building, entry)
    except UserError:
        raise
    except OSError as error:
        raise _cache_fault(cache, error) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    corpus = _load(entry, config)
    assert corpus is not None, f"the cache entry just built at {entry} cannot be read"
    return corpus


def _cache_fault(cache: Path, error: OSError) -> DataError:
    cure = "set MUTRANSFER_CACHE to a folder with space that you may write to"
    return DataError(Fault(str(cache), f"the token cache cannot be written: {error.strerror or error}", cure))


def _cache_key(config: DataConfig) -> str:
    settings = config.model_dump(mode="json", exclude={"sha256", "paths", "train_bin", "validation_bin"})
    manifest: dict[str, Any] = {"version": CACHE_VERSION, "settings": settings}
    if config.source == "stdlib":
        manifest["python"] = platform.python_version()
    if config.source != "zipf-markov":
        stats = [(name, str(path), path.stat()) for name, path in source_files(config)]
        manifest["files"] = [(name, path, stat.st_size, stat.st_mtime_ns) for name, path, stat in stats]
    return content_hash(manifest, digits=24)


def _replace(building: Path, entry: Path) -> None:
    """Put the finished entry in its place; another process may have been faster, and its entry is as good."""
    try:
        building.rename(entry)
    except OSError:
        if _meta(entry) is None:
            shutil.rmtree(entry, ignore_errors=True)
            building.rename(entry)


def _build(config: DataConfig, folder: Path) -> None:
    """Write train.npy, validation.npy and, last, meta.json."""
    if config.source == "zipf-markov":
        train, validation, description = _synthetic_parts(config)
    else:
        train, validation, description = _document_parts(config, folder)
    np.save(folder / "train.npy", train)
    np.save(folder / "validation.npy", validation)
    vocabulary = vocabulary_size(config)
    assert vocabulary is not None, "only .bin corpora have no vocabulary of their own"
    meta = {
        "vocab_size": vocabulary,
        "sha256": fingerprint(train, validation, vocabulary),
        "description": description,
        "sizes": [(folder / name).stat().st_size for name in ("train.npy", "validation.npy")],
    }
    (folder / "meta.json").write_text(json.dumps(meta))


def _synthetic_parts(config: DataConfig) -> tuple[np.ndarray, np.ndarray, str]:
    held_out = max(int(config.synthetic_tokens * config.validation_fraction), 1)
    walks = [
        synthetic.generate(tokens, config.synthetic_vocab, config.synthetic_zipf, seed)
        for seed, tokens in enumerate((config.synthetic_tokens, held_out))
    ]
    floor = synthetic.entropy_floor(config.synthetic_vocab, config.synthetic_zipf)
    return walks[0], walks[1], f"Zipf-Markov chain over {config.synthetic_vocab} tokens, entropy {floor:.4f} nats per token"


def _document_parts(config: DataConfig, folder: Path) -> tuple[np.ndarray, np.ndarray, str]:
    documents = list(read_documents(config))
    where = "data.paths" if config.paths else "data.source"
    if not documents:
        raise DataError(Fault(where, f"the corpus is empty ({', '.join(config.paths) or config.source})", "give files with text"))
    if len(documents) == 1:
        cure = "give at least two files or lines, one of which is held out"
        raise DataError(Fault(where, f"the corpus is one document ({documents[0][0]}) and cannot be split by document", cure))
    documents.sort(key=lambda document: document[0])
    order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
    held_out = min(max(round(len(documents) * config.validation_fraction), 1), len(documents) - 1)
    parts = [[documents[place][1] for place in places] for places in (order[:-held_out], order[-held_out:])]
    if config.tokenizer == "bytes":
        arrays = [tokenizers.encode_bytes(part) for part in parts]
    else:
        tokenizer = tokenizers.train_bpe(parts[0], config.bpe_vocab_size, folder / "tokenizer.json")
        arrays = [tokenizers.encode_bpe(tokenizer, part, config.bpe_vocab_size) for part in parts]
    tokenizer_name = "bytes" if config.tokenizer == "bytes" else f"BPE of {config.bpe_vocab_size}"
    description = f"{config.source}: {len(documents):,} documents, {held_out} held out, "
    description += f"{len(arrays[0]):,} + {len(arrays[1]):,} tokens ({tokenizer_name})"
    return arrays[0], arrays[1], description


def fingerprint(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> str:
    """SHA-256 of what training sees: the tokens, whatever type holds them, and the vocabulary's size."""
    digest = hashlib.sha256(f"{vocab_size} {len(train)} {len(validation)}".encode())
    for array in (train, validation):
        for first in range(0, len(array), _CHUNK):
            digest.update(np.ascontiguousarray(array[first : first + _CHUNK], dtype="<u4").data)
    return digest.hexdigest()


def _meta(entry: Path) -> dict[str, Any] | None:
    """The entry's meta data when the entry is whole."""
    try:
        meta: dict[str, Any] = json.loads((entry / "meta.json").read_text())
        sizes = [(entry / name).stat().st_size for name in ("train.npy", "validation.npy")]
    except (OSError, ValueError):
        return None
    return meta if meta.get("sizes") == sizes else None


def _load(entry: Path, config: DataConfig) -> Corpus | None:
    meta = _meta(entry)
    if meta is None:
        return None
    train, validation = (np.load(entry / name, mmap_mode="r") for name in ("train.npy", "validation.npy"))
    synthetic_source = config.source == "zipf-markov"
    floor = synthetic.entropy_floor(config.synthetic_vocab, config.synthetic_zipf) if synthetic_source else None
    return Corpus(train, validation, meta["vocab_size"], meta["sha256"], floor, meta["description"])


def _bin_corpus(config: DataConfig, vocab_size: int | None) -> Corpus:
    """nanoGPT's .bin files: nothing but tokens, so that their type and vocabulary are taken on trust and then checked."""
    assert vocab_size is not None, "configs with source bin carry model.vocab_size"
    largest = int(np.iinfo(config.dtype).max)
    faults = []
    if vocab_size - 1 > largest:
        cure = "set data.dtype to the type that the file was written with"
        faults.append(Fault("model.vocab_size", f"{vocab_size} tokens do not fit in {config.dtype} (at most {largest + 1})", cure))
    arrays = {}
    for key, name in (("train_bin", config.train_bin), ("validation_bin", config.validation_bin)):
        try:
            arrays[key] = _read_bin(key, name, config.dtype)
        except DataError as error:
            faults += error.faults
    for key, array in arrays.items():
        top = max((int(array[first : first + _CHUNK].max()) for first in range(0, len(array), _CHUNK)), default=0)
        if top >= vocab_size:
            cure = f"set model.vocab_size to at least {top + 1}, or data.dtype to the type that the file was written with"
            faults.append(Fault(f"data.{key}", f"holds token {top}, the vocabulary has {vocab_size}", cure))
    raise_all(faults, DataError)
    train, validation = arrays["train_bin"], arrays["validation_bin"]
    description = f"bin: {len(train):,} + {len(validation):,} tokens ({config.dtype})"
    return Corpus(train, validation, vocab_size, fingerprint(train, validation, vocab_size), None, description)


def _read_bin(key: str, name: str | None, dtype: str) -> np.ndarray:
    where = f"data.{key}"
    if name is None:
        raise DataError(Fault(where, "is needed with source bin", f"{key}: path/to/file.bin"))
    path = Path(name)
    if not path.is_file():
        raise DataError(Fault(where, f"{path}: no such file"))
    size, item = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % item:
        cure = "set data.dtype to the type that the file was written with"
        raise DataError(Fault(where, f"{path}: {size} bytes are {'no tokens' if size == 0 else f'no whole number of {dtype}'}", cure))
    return np.memmap(path, dtype=dtype, mode="r")


def _length_faults(corpus: Corpus, context: int) -> list[Fault]:
    faults = []
    for part, array in (("training", corpus.train), ("validation", corpus.validation)):
        if len(array) < context + 1:
            cure = f"set model.context to at most {len(array) - 1}, or give more text"
            if part == "validation":
                cure += ", or hold out more: data.validation_fraction"
            what = f"the {part} part has {len(array)} tokens, a context of {context} needs {context + 1}"
            faults.append(Fault("data", what, cure if len(array) > 2 else "give more text"))
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
    cure = "restore the corpus, or make a new study of the changed one"
    if config.source == "stdlib":
        cure += " (another Python version has another standard library)"
    return [Fault("data.sha256", what, cure)]
