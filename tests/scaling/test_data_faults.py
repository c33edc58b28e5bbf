"""Every way in which a corpus can be wrong: the message says where, what, and what to do, for all faults at once."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaling.config import DataConfig
from scaling.data import prepare
from scaling.errors import DataError, Fault, MissingExtra


def faults_of(tmp_path: Path, context: int = 16, vocab_size: int | None = None, **data: Any) -> Sequence[Fault]:
    """The faults of preparing `data`, whose paths are relative to `tmp_path`."""
    config = DataConfig.model_validate(data)
    with pytest.raises(DataError) as caught:
        prepare(config, context=context, vocab_size=vocab_size, cache=tmp_path / "cache", config_dir=tmp_path)
    return caught.value.faults


def write(tmp_path: Path, **files: str | bytes) -> None:
    for name, content in files.items():
        (tmp_path / name.replace("_", ".")).write_bytes(content.encode() if isinstance(content, str) else content)


LONG = "some words " * 40


# Paths


def test_every_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, a_txt=LONG)
    (tmp_path / "folder").mkdir()
    faults = faults_of(tmp_path, source="text", paths=["a.txt", "b.txt", "c/*.txt", "folder"])
    assert [fault.what for fault in faults] == ["b.txt: no such file", "c/*.txt: no file matches", "folder: is a folder"]
    assert {fault.where for fault in faults} == {"data.paths"}
    assert str(tmp_path / "b.txt") in faults[0].cure
    assert "folder/**/*.txt" in faults[2].cure


def test_no_paths_at_all(tmp_path: Path) -> None:
    [fault] = faults_of(tmp_path, source="jsonl")
    assert fault == Fault("data.paths", "is empty, and source jsonl reads files", "paths: [corpus/*.jsonl]")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a_txt=LONG, b_txt=LONG, c_txt=LONG)
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name in ("a.txt", "c.txt"):
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    faults = faults_of(tmp_path, source="text", paths=["*.txt"])
    assert [fault.where for fault in faults] == [str(tmp_path / name) for name in ("a.txt", "c.txt")]
    assert faults[0].what == "cannot be read: Permission denied"
    assert faults[0].cure


def test_an_empty_corpus(tmp_path: Path) -> None:
    write(tmp_path, a_txt="", b_txt="")
    [fault] = faults_of(tmp_path, source="text", paths=["*.txt"])
    assert (fault.where, fault.what) == ("data.paths", "the corpus is empty (*.txt)")
    assert fault.cure


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    write(tmp_path, a_txt=LONG)
    [fault] = faults_of(tmp_path, source="text", paths=["a.txt"])
    assert "one document (a.txt)" in fault.what
    assert "at least two files" in fault.cure


# Contents


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path, a_txt=LONG, b_txt=b"one\ntwo\ncaf\xe9\n", c_txt="x\u00e9".encode("utf-16"))
    faults = faults_of(tmp_path, source="text", paths=["*.txt"])
    assert [fault.where for fault in faults] == [f"{tmp_path}/b.txt:3", f"{tmp_path}/c.txt:1"]
    assert faults[0].what == "byte 0xe9 is not UTF-8"
    assert "iconv" in faults[0].cure


def test_wrong_json_lines_are_all_named_with_file_and_line(tmp_path: Path) -> None:
    lines = ['{"text": "good"}', '{"text": }', "[1]", '{"body": "x", "id": 3}', '{"text": 3}', '{"text": "\\ud800"}']
    write(tmp_path, a_jsonl="\n".join(lines), b_jsonl=b'{"text": "good"}\n\n{"text": "\xff"}\n' + b"[" * 100_000)
    faults = faults_of(tmp_path, source="jsonl", paths=["*.jsonl"])
    places = [f"{tmp_path}/a.jsonl:{line}" for line in (2, 3, 4, 5, 6)] + [f"{tmp_path}/b.jsonl:{line}" for line in (3, 4)]
    assert [fault.where for fault in faults] == places
    said = [
        "is not JSON",
        "not a JSON object",
        "has no key 'text'; its keys: body, id",
        "'text' is int",
        "surrogate",
        "not UTF-8",
        "is not JSON",
    ]
    for fault, words in zip(faults, said, strict=True):
        assert words in fault.what
        assert fault.cure
    assert "data.field" in faults[2].cure


def test_a_wrong_field_is_not_said_for_every_line(tmp_path: Path) -> None:
    write(tmp_path, a_jsonl='{"body": "x"}\n' * 1000, b_jsonl='{"body": "x"}\n' * 1000)
    faults = faults_of(tmp_path, source="jsonl", paths=["*.jsonl"])
    assert len(faults) == 10
    assert faults[-1].where == f"{tmp_path}/b.jsonl:5"


def test_parquet_without_the_column_with_a_wrong_one_and_no_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [5]}), tmp_path / "b.parquet")
    write(tmp_path, c_parquet="this is no Parquet file")
    wrong = pa.array([b"good", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"text": wrong}), tmp_path / "d.parquet")
    faults = faults_of(tmp_path, source="parquet", paths=["*.parquet"])
    assert [fault.where for fault in faults] == [f"{tmp_path}/{name}.parquet" for name in "abcd"]
    said = ["has no column 'text'; its columns: body, id", "holds int64, not text", "not a readable Parquet", "row 2: byte 0xff"]
    for fault, words in zip(faults, said, strict=True):
        assert words in fault.what
        assert fault.cure


# Lengths, vocabulary, pinned fingerprint


def test_parts_shorter_than_a_window(tmp_path: Path) -> None:
    write(tmp_path, a_txt="x" * 30, b_txt="y" * 30)
    train, held_out = faults_of(tmp_path, context=31, source="text", paths=["*.txt"])
    assert train.what == "the training part has 31 tokens, and a context of 31 needs 32"
    assert "model.context to at most 30" in train.cure
    assert held_out.what.startswith("the validation part has 31 tokens")
    assert "raise data.validation_fraction" in held_out.cure
    corpus = prepare(DataConfig(source="text", paths=("*.txt",)), context=30, cache=tmp_path / "cache", config_dir=tmp_path)
    assert len(corpus.train) == 31


def test_a_short_synthetic_part_is_cured_by_more_tokens(tmp_path: Path) -> None:
    [fault] = faults_of(tmp_path, source="zipf-markov", synthetic_tokens=200)
    assert fault.where == "data.synthetic_tokens"
    assert "raise data.synthetic_tokens" in fault.cure


def test_a_model_with_too_small_a_vocabulary(tmp_path: Path) -> None:
    [fault] = faults_of(tmp_path, vocab_size=63, source="zipf-markov", synthetic_tokens=10_000)
    assert fault == Fault(
        "model.vocab_size", "63 is smaller than the tokenizer's vocabulary of 64", "set it to 64 or leave it out"
    )
    prepare(DataConfig(source="zipf-markov", synthetic_tokens=10_000), context=16, vocab_size=128, cache=tmp_path)


def test_a_bpe_vocabulary_that_the_text_cannot_fill(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    write(tmp_path, a_txt="aaaa", b_txt="bbbb")
    [fault] = faults_of(tmp_path, source="text", paths=["*.txt"], tokenizer="bpe", bpe_vocab_size=5000)
    assert fault.where == "data.bpe_vocab_size"
    assert "5000 are asked for" in fault.what
    assert "or less" in fault.cure


def test_another_fingerprint_than_the_pinned_one(tmp_path: Path) -> None:
    data: dict[str, Any] = {"source": "zipf-markov", "synthetic_tokens": 10_000}
    actual = prepare(DataConfig.model_validate(data), context=16, cache=tmp_path / "cache").sha256
    [fault] = faults_of(tmp_path, sha256="0" * 64, **data)
    assert fault.where == "data.sha256"
    assert actual in fault.what
    assert "0" * 64 in fault.what
    assert "remove data.sha256" in fault.cure
    assert prepare(DataConfig.model_validate({**data, "sha256": actual}), context=16, cache=tmp_path / "cache").sha256 == actual


def test_the_pinned_standard_library_of_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(LONG)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    [fault] = faults_of(tmp_path, source="stdlib", sha256="0" * 64)
    assert "another Python version" in fault.cure


def test_length_vocabulary_and_pin_are_said_at_once(tmp_path: Path) -> None:
    faults = faults_of(tmp_path, context=20_000, vocab_size=3, source="zipf-markov", synthetic_tokens=10_000, sha256="0" * 64)
    assert [fault.where for fault in faults] == [
        "data.synthetic_tokens",
        "data.synthetic_tokens",
        "model.vocab_size",
        "data.sha256",
    ]


# .bin files


def bin_faults(tmp_path: Path, vocab_size: int | None = 100, **data: Any) -> Sequence[Fault]:
    files: dict[str, Any] = {"train_bin": "a.bin", "validation_bin": "b.bin"}
    return faults_of(tmp_path, vocab_size=vocab_size, source="bin", **(files | data))


def test_bin_without_names_and_vocabulary(tmp_path: Path) -> None:
    faults = bin_faults(tmp_path, vocab_size=None, train_bin=None, validation_bin=None)
    assert [fault.where for fault in faults] == ["model.vocab_size", "data.train_bin", "data.validation_bin"]
    assert all(fault.cure for fault in faults)


def test_bin_files_that_are_missing_folders_or_empty(tmp_path: Path) -> None:
    (tmp_path / "a.bin").mkdir()
    train, held_out = bin_faults(tmp_path)
    assert train.what == "a.bin: is not a file"
    assert held_out.what == "b.bin: No such file or directory"
    assert str(tmp_path / "b.bin") in held_out.cure
    write(tmp_path, b_bin=b"")
    assert bin_faults(tmp_path)[1].what == "b.bin: is empty"


def test_bin_of_half_a_token(tmp_path: Path) -> None:
    write(tmp_path, a_bin=b"\0" * 80, b_bin=b"\0" * 81)
    [fault] = bin_faults(tmp_path)
    assert (fault.where, fault.what) == ("data.validation_bin", "b.bin: 81 bytes are no whole number of uint16 tokens")
    assert "data.dtype" in fault.cure


def test_bin_with_a_token_outside_of_the_vocabulary(tmp_path: Path) -> None:
    tokens = np.zeros(5_000_000, dtype=np.uint16)
    tokens[-1] = 100
    tokens.tofile(tmp_path / "a.bin")
    tokens[:100].tofile(tmp_path / "b.bin")
    [fault] = bin_faults(tmp_path)
    assert fault.where == "data.train_bin"
    assert "token id 100; a vocabulary of 100 ends at 99" in fault.what
    assert "at least 101" in fault.cure


def test_bin_with_a_vocabulary_that_its_type_cannot_hold(tmp_path: Path) -> None:
    write(tmp_path, a_bin=b"\0" * 80, b_bin=b"\0" * 80)
    [fault] = bin_faults(tmp_path, vocab_size=257, dtype="uint8")
    assert fault.what == "257 tokens do not fit in data.dtype uint8, which holds 256"
    assert "data.dtype" in fault.cure


def test_bin_shorter_than_a_window(tmp_path: Path) -> None:
    write(tmp_path, a_bin=b"\0" * 80, b_bin=b"\0" * 20)
    [fault] = bin_faults(tmp_path)
    assert (fault.where, fault.what) == ("data.validation_bin", "the validation part has 10 tokens, and a context of 16 needs 17")
    assert "write more tokens" in fault.cure


# Optional packages


@pytest.mark.parametrize(
    ("package", "extra", "data"),
    [("tokenizers", "bpe", {"source": "text", "tokenizer": "bpe"}), ("pyarrow", "parquet", {"source": "parquet"})],
)
def test_an_optional_package_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str, data: dict[str, Any]
) -> None:
    write(tmp_path, a_txt=LONG, b_txt=LONG)
    load = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return load(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    config = DataConfig.model_validate({**data, "paths": ["*.txt"]})
    with pytest.raises(MissingExtra, match=rf"pip install {package} .*'{extra}'"):
        prepare(config, context=16, cache=tmp_path / "cache", config_dir=tmp_path)
