"""The cache of corpora: hits read nothing, damage is repaired, builders may be killed or meet, faults say what to do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scaling.config import DataConfig
from scaling.data import corpus as corpus_module
from scaling.data import prepare
from scaling.data.cache import default_cache, write_tokens
from scaling.errors import DataError
from tests.scaling.test_data import documents_in, finished, in_python, text_corpus, write_texts


def test_a_second_call_does_not_read_the_text_again(tmp_path: Path) -> None:
    first = text_corpus(tmp_path)
    path = tmp_path / "texts" / "00.txt"
    stat, text = path.stat(), path.read_bytes()
    path.write_bytes(b"?" * len(text))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    config = DataConfig(source="text", paths=("**/*.txt",))
    assert prepare(config, context=16, cache=tmp_path / "cache", config_dir=tmp_path / "texts").sha256 == first.sha256
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert prepare(config, context=16, cache=tmp_path / "cache", config_dir=tmp_path / "texts").sha256 != first.sha256


def test_a_second_call_does_not_read_bin_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / name)
    config = DataConfig(source="bin", train_bin="a", validation_bin="b")
    first = prepare(config, context=16, vocab_size=100, cache=tmp_path / "cache", config_dir=tmp_path)
    monkeypatch.setattr(corpus_module, "fingerprint", lambda *_: pytest.fail("the files were read again"))
    assert prepare(config, context=16, vocab_size=100, cache=tmp_path / "cache", config_dir=tmp_path).sha256 == first.sha256


def test_tokens_are_mapped_read_only_from_the_cache(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path)
    for part in (corpus.train, corpus.validation):
        assert isinstance(part, np.memmap)
        assert not part.flags.writeable


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_object(path: Path) -> None:
    path.write_text("[]")


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("train.bin", cut),
    ("train.bin", empty),
    ("validation.bin", Path.unlink),
    ("meta.json", Path.unlink),
    ("meta.json", cut),
    ("meta.json", no_object),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_entry_is_built_again(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    first = text_corpus(tmp_path)
    expected = first.train.copy()
    [path] = (tmp_path / "cache").glob(f"*/{name}")
    # The entry that is mapped here must not shrink under the map.
    path.rename(path.with_name("kept"))
    path.write_bytes(path.with_name("kept").read_bytes())
    damage(path)
    again = prepare(
        DataConfig(source="text", paths=("**/*.txt",)), context=16, cache=tmp_path / "cache", config_dir=tmp_path / "texts"
    )
    assert again.sha256 == first.sha256
    assert np.array_equal(again.train, expected)
    assert len(list((tmp_path / "cache").iterdir())) == 1


BUILD_TOGETHER = """
    import sys, time
    from pathlib import Path
    from scaling.config import DataConfig
    from scaling.data import corpus, prepare
    cache, folder, me, other = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    read = corpus.read_documents
    def read_when_both_build(*arguments):
        me.touch()
        for _ in range(3000):
            if other.exists():
                return read(*arguments)
            time.sleep(0.01)
        sys.exit("the other process never built")
    corpus.read_documents = read_when_both_build
    made = prepare(DataConfig(source="text", paths=("**/*.txt",)), context=16, cache=cache, config_dir=folder)
    print(made.sha256, len(made.train), int(made.train.astype("int64").sum()))
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_may_build_at_once(tmp_path: Path, damaged: bool) -> None:
    expected = text_corpus(tmp_path)
    described = f"{expected.sha256} {len(expected.train)} {int(expected.train.astype(np.int64).sum())}\n"
    cache = tmp_path / "cache"
    [entry] = cache.iterdir()
    if damaged:
        (entry / "meta.json").unlink()
    else:
        cache = tmp_path / "new"
    marks = [str(tmp_path / name) for name in ("first", "second")]
    started = [in_python(BUILD_TOGETHER, str(cache), str(tmp_path / "texts"), *order) for order in (marks, marks[::-1])]
    assert [finished(process) for process in started] == [described, described]
    assert len(list(cache.iterdir())) == 1


BUILD_AND_DIE = """
    import os, signal, sys
    from pathlib import Path
    from scaling.config import DataConfig
    from scaling.data import corpus, prepare
    corpus.fingerprint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    prepare(DataConfig(source="text", paths=("**/*.txt",)), context=16, cache=Path(sys.argv[1]), config_dir=Path(sys.argv[2]))
"""


def test_what_a_killed_process_leaves_is_never_taken_for_an_entry_and_goes_away(tmp_path: Path) -> None:
    config = write_texts(tmp_path / "texts")
    cache = tmp_path / "cache"
    process = in_python(BUILD_AND_DIE, str(cache), str(tmp_path / "texts"))
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    [left] = cache.iterdir()
    assert (left / "train.bin").exists()
    corpus = prepare(config, context=16, cache=cache, config_dir=tmp_path / "texts")
    assert len(documents_in(corpus.train)) == 11
    assert left.exists()
    os.utime(left, (0, 0))
    prepare(config.model_copy(update={"validation_fraction": 0.5}), context=16, cache=cache, config_dir=tmp_path / "texts")
    assert not left.exists()


def test_where_the_cache_lies_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MUTRANSFER_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "mine"
    monkeypatch.delenv("MUTRANSFER_CACHE")
    assert default_cache() == tmp_path / "xdg" / "mutransfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == tmp_path / "home" / ".cache" / "mutransfer"


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    config = write_texts(tmp_path / "texts")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: Not a directory\n *cure: set MUTRANSFER_CACHE"):
        prepare(config, context=16, cache=tmp_path / "file" / "cache", config_dir=tmp_path / "texts")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_says_what_to_do_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_texts(tmp_path / "texts")
    monkeypatch.setattr(corpus_module, "write_tokens", lambda _, pieces, dtype: write_tokens(Path("/dev/full"), pieces, dtype))
    with pytest.raises(DataError, match=r"No space left on device\n *cure: set MUTRANSFER_CACHE"):
        prepare(config, context=16, cache=tmp_path / "cache", config_dir=tmp_path / "texts")
    assert list((tmp_path / "cache").iterdir()) == []
