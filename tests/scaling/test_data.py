"""The data: every source, determinism, batches as pure functions, the synthetic source's entropy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from scaling.config import DataConfig
from scaling.data import Corpus, prepare, train_batch, validation_batches, vocabulary_size
from scaling.data.synthetic import entropy_floor, generate

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "lay", "down", "by", "its", "side", "while", "rain", "fell"]


def write_texts(folder: Path, count: int = 12) -> DataConfig:
    """`count` text files of some 600 different bytes, half of them in a subfolder."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / ("deep" if number % 2 else "") / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}: " + " ".join(rng.choice(WORDS, 150)), encoding="utf-8")
    return DataConfig(source="text", paths=("**/*.txt",))


def text_corpus(tmp_path: Path, config: DataConfig | None = None) -> Corpus:
    written = write_texts(tmp_path / "texts")
    return prepare(config or written, context=16, cache=tmp_path / "cache", config_dir=tmp_path / "texts")


def documents_in(array: np.ndarray) -> list[bytes]:
    parts = array.tobytes().split(b"\0")
    assert parts.pop() == b"", "the last document is ended like all others"
    return parts


def in_python(code: str, *arguments: str, seed: str = "0") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


# Sources


def test_text_files_are_split_by_document_and_nothing_is_lost(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path)
    train, held_out = documents_in(corpus.train), documents_in(corpus.validation)
    files = [path.read_bytes() for path in (tmp_path / "texts").rglob("*.txt")]
    assert sorted(train + held_out) == sorted(files)
    assert len(held_out) == 1
    assert corpus.train.dtype == np.uint8
    assert corpus.vocab_size == 256
    assert corpus.entropy_floor is None
    assert "12 documents" in corpus.description
    assert f"{len(corpus.train):,}" in corpus.description


def test_the_documents_are_shuffled_before_the_split(tmp_path: Path) -> None:
    order = [int(text.split(b":")[0]) for text in documents_in(text_corpus(tmp_path).train)]
    assert order != sorted(order)


def test_half_of_the_documents_can_be_held_out(tmp_path: Path) -> None:
    config = DataConfig(source="text", paths=("**/*.txt",), validation_fraction=0.5)
    assert len(documents_in(text_corpus(tmp_path, config).validation)) == 6


def test_overlapping_globs_give_each_file_once(tmp_path: Path) -> None:
    config = DataConfig(source="text", paths=("**/*.txt", "deep/*", "00.txt"))
    assert text_corpus(tmp_path, config).sha256 == text_corpus(tmp_path).sha256


def test_a_file_name_with_wildcards_is_found_literally(tmp_path: Path) -> None:
    for name in ("a[1].txt", "b[1].txt"):
        (tmp_path / name).write_text("words " * 20)
    config = DataConfig(source="text", paths=("a[1].txt", "b[1].txt"))
    corpus = prepare(config, context=16, cache=tmp_path / "cache", config_dir=tmp_path)
    assert len(corpus.train) == 121


def test_json_lines(tmp_path: Path) -> None:
    texts = [f"line {number}: größer" for number in range(10)]
    rows = [json.dumps({"body": text, "id": 1}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:5], "", json.dumps({"body": ""}), json.dumps({"body": None}), *rows[5:]]))
    config = DataConfig(source="jsonl", paths=("a.jsonl",), field="body")
    corpus = prepare(config, context=8, cache=tmp_path / "cache", config_dir=tmp_path)
    assert sorted(documents_in(corpus.train) + documents_in(corpus.validation)) == sorted(text.encode() for text in texts)


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_parquet(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {number}: größer" for number in range(10)]
    types = {"string": pa.string(), "large_string": pa.large_string(), "binary": pa.binary()}
    column = pa.array([*texts, None, ""])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(types[kind])
    pq.write_table(pa.table({"other": range(12), "text": column}), tmp_path / "a.parquet")
    config = DataConfig(source="parquet", paths=("a.parquet",))
    corpus = prepare(config, context=8, cache=tmp_path / "cache", config_dir=tmp_path)
    assert sorted(documents_in(corpus.train) + documents_in(corpus.validation)) == sorted(text.encode() for text in texts)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bin_files(tmp_path: Path, dtype: str) -> None:
    train, held_out = (np.random.default_rng(seed).integers(200, size=500).astype(dtype) for seed in (0, 1))
    train.tofile(tmp_path / "train.bin")
    held_out.tofile(tmp_path / "val.bin")
    config = DataConfig.model_validate({"source": "bin", "train_bin": "train.bin", "validation_bin": "val.bin", "dtype": dtype})
    corpus = prepare(config, context=16, vocab_size=200, cache=tmp_path / "cache", config_dir=tmp_path)
    assert np.array_equal(corpus.train, train)
    assert np.array_equal(corpus.validation, held_out)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.vocab_size == 200


def test_bpe_tokens_decode_to_the_text_and_are_learnt_from_the_training_part(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    config = DataConfig(source="text", paths=("**/*.txt",), tokenizer="bpe", bpe_vocab_size=300)
    corpus, as_bytes = text_corpus(tmp_path, config), text_corpus(tmp_path)
    assert corpus.train.dtype == np.uint16
    assert corpus.vocab_size == vocabulary_size(config) == 300
    assert len(corpus.train) < len(as_bytes.train) / 2
    [saved] = (tmp_path / "cache").glob("*/tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(saved))
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    ends = np.flatnonzero(corpus.train == 0)
    assert len(ends) == 11
    first = tokenizer.decode(corpus.train[: ends[0]].tolist())
    assert first.encode() == documents_in(as_bytes.train)[0]
    assert tokenizer.decode(corpus.validation[:-1].tolist()).encode() == documents_in(as_bytes.validation)[0]


def test_a_text_that_spells_the_end_token_does_not_end_there(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("one <|endoftext|> two " * 5)
    config = DataConfig(source="text", paths=("*.txt",), tokenizer="bpe", bpe_vocab_size=258)
    corpus = prepare(config, context=8, cache=tmp_path / "cache", config_dir=tmp_path)
    assert np.flatnonzero(corpus.train == 0).tolist() == [len(corpus.train) - 1]


def test_the_standard_library_without_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library may itself lie below a folder of packages; what is installed inside of it is no part of it."""
    root = tmp_path / "site-packages" / "python3"
    for name in ("a.py", "b/c.py", "site-packages/no.py", "b/__pycache__/no.py", "dist-packages/no.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * 9)
    (root / "a.txt").write_text("no")
    (root / "d.py").write_bytes(b"# \xe9t\xe9, in Latin-1\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    corpus = prepare(DataConfig(), context=8, cache=tmp_path / "cache")
    assert sorted(documents_in(corpus.train) + documents_in(corpus.validation)) == [
        b"# \xe9t\xe9, in Latin-1\n",
        b"a.py" * 9,
        b"b/c.py" * 9,
    ]


def test_vocabulary_sizes_need_no_data() -> None:
    assert vocabulary_size(DataConfig()) == 256
    assert vocabulary_size(DataConfig(tokenizer="bpe", bpe_vocab_size=500)) == 500
    assert vocabulary_size(DataConfig(source="zipf-markov", synthetic_vocab=33)) == 33
    assert vocabulary_size(DataConfig(source="bin")) is None


# The synthetic source


def transition_counts(tokens: np.ndarray, vocab: int) -> np.ndarray:
    pairs = tokens[:-1].astype(np.int64) * vocab + tokens[1:]
    counts: np.ndarray = np.bincount(pairs, minlength=vocab * vocab).reshape(vocab, vocab).astype(float)
    return counts


@pytest.mark.parametrize(("vocab", "exponent"), [(16, 1.2), (40, 0.7), (2, 3.0)])
def test_the_conditional_entropy_of_the_tokens_is_the_floor(tmp_path: Path, vocab: int, exponent: float) -> None:
    config = DataConfig(source="zipf-markov", synthetic_tokens=600_000, synthetic_vocab=vocab, synthetic_zipf=exponent)
    corpus = prepare(config, context=16, cache=tmp_path)
    assert corpus.entropy_floor == pytest.approx(entropy_floor(vocab, exponent))
    assert (len(corpus.train), len(corpus.validation)) == (600_000, 30_000)
    assert int(corpus.train.max()) == vocab - 1
    train = transition_counts(corpus.train, vocab)
    rows = train / train.sum(axis=1, keepdims=True)
    surprise = -np.log(np.where(rows > 0, rows, 1e-9))
    conditional = (train * surprise).sum() / train.sum()
    assert conditional == pytest.approx(corpus.entropy_floor, abs=0.006)
    held_out = transition_counts(corpus.validation, vocab)
    assert (held_out * surprise).sum() / held_out.sum() == pytest.approx(corpus.entropy_floor, abs=0.03)


def test_every_token_has_a_permutation_of_its_own() -> None:
    counts = transition_counts(generate(200_000, 12, 1.5, seed=0), 12)
    assert len(set(counts.argmax(axis=1).tolist())) > 3
    assert np.allclose(np.sort(counts / counts.sum(axis=1, keepdims=True), axis=1)[:, -1], 0.49, atol=0.05)


def test_a_law_so_steep_that_it_underflows_has_no_entropy() -> None:
    assert entropy_floor(4096, 1000.0) == pytest.approx(0.0, abs=1e-9)


# Fingerprint and determinism


def test_the_fingerprint_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    first, second = (text_corpus(tmp_path / name) for name in ("here", "there/below"))
    assert first.sha256 == second.sha256
    assert np.array_equal(first.train, second.train)


def test_the_fingerprint_depends_on_every_token(tmp_path: Path) -> None:
    first = text_corpus(tmp_path / "a")
    changed = write_texts(tmp_path / "b")
    path = tmp_path / "b" / "deep" / "03.txt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert prepare(changed, context=16, cache=tmp_path, config_dir=tmp_path / "b").sha256 != first.sha256


def test_the_fingerprints_of_two_corpora_stay_what_they_were(tmp_path: Path) -> None:
    """Studies pin them. Where code must change the tokens, CACHE_VERSION goes up and the change log says so."""
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" * 4)
    texts = DataConfig(source="text", paths=("*.txt",), validation_fraction=0.2)
    chain = DataConfig(source="zipf-markov", synthetic_tokens=20_000)
    found = [prepare(config, context=16, cache=tmp_path / "cache", config_dir=tmp_path).sha256[:16] for config in (texts, chain)]
    assert found == ["153bb7c610cc78a5", "a0fb493f1d907204"]


DESCRIBE = """
    import hashlib, sys
    from pathlib import Path
    from scaling.config import DataConfig
    from scaling.data import prepare, train_batch
    config = DataConfig.model_validate_json(sys.argv[1])
    corpus = prepare(config, context=16, cache=Path(sys.argv[2]), config_dir=Path(sys.argv[3]))
    batch = train_batch(corpus, step=5, data_seed=3, batch_size=4, context=16)
    print(corpus.sha256, hashlib.sha256(batch.tobytes()).hexdigest())
"""


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_processes_of_their_own_build_the_same_corpus_and_batches(tmp_path: Path, tokenizer: str) -> None:
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    config = write_texts(tmp_path / "texts").model_copy(update={"tokenizer": tokenizer, "bpe_vocab_size": 300})
    caches = [str(tmp_path / f"cache{seed}") for seed in "01"]
    started = [
        in_python(DESCRIBE, config.model_dump_json(), cache, str(tmp_path / "texts"), seed=str(seed))
        for seed, cache in enumerate(caches)
    ]
    first, second = (finished(process) for process in started)
    assert first == second
    assert first.split()[0] == prepare(config, context=16, cache=tmp_path / "own", config_dir=tmp_path / "texts").sha256


# Batches


def test_a_batch_is_windows_of_the_training_part(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path)
    batch = train_batch(corpus, step=0, data_seed=0, batch_size=8, context=16)
    assert batch.shape == (8, 17)
    assert batch.dtype == np.int64
    text = corpus.train.tobytes()
    assert all(row.astype(np.uint8).tobytes() in text for row in batch)


def test_a_batch_is_a_pure_function_of_seed_and_step(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path)

    def batch(step: int, seed: int) -> np.ndarray:
        return train_batch(corpus, step=step, data_seed=seed, batch_size=4, context=16)

    first = batch(7, 1)
    other_step, other_seed = batch(8, 1), batch(7, 2)
    assert np.array_equal(batch(7, 1), first)
    assert not np.array_equal(other_step, first)
    assert not np.array_equal(other_seed, first)
    assert not np.array_equal(batch(1, 7), first)


def test_a_larger_batch_begins_with_the_smaller_one(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path)
    large = train_batch(corpus, step=3, data_seed=0, batch_size=64, context=16)
    for size in (1, 2, 7, 32):
        assert np.array_equal(train_batch(corpus, step=3, data_seed=0, batch_size=size, context=16), large[:size])


def counting_corpus(train: int, validation: int) -> Corpus:
    return Corpus(np.arange(train, dtype=np.uint32), np.arange(validation, dtype=np.uint32), 2**32, "", None, "")


def test_windows_start_everywhere_and_stay_inside() -> None:
    batch = train_batch(counting_corpus(20, 20), step=0, data_seed=0, batch_size=2000, context=16)
    assert set(batch[:, 0].tolist()) == {0, 1, 2, 3}
    assert batch.max() == 19


@pytest.mark.parametrize(("tokens", "sequences", "expected"), [(1000, 7, 7), (17 * 9 + 5, 50, 9), (17, 4, 1), (33, 4, 1)])
def test_validation_windows_are_spread_evenly_and_do_not_overlap(tokens: int, sequences: int, expected: int) -> None:
    corpus = counting_corpus(100, tokens)
    batches = list(validation_batches(corpus, sequences=sequences, context=16, batch_size=4))
    assert [len(batch) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    rows = np.concatenate(batches)
    assert rows.shape == (expected, 17)
    assert rows.dtype == np.int64
    assert rows[0, 0] == 0
    if expected > 1:
        gaps = np.diff(rows[:, 0])
        assert rows[-1, -1] == tokens - 1
        assert gaps.min() >= 17
        assert gaps.max() - gaps.min() <= 1
