"""Answers of the search on disk: they never change a plan, and whatever they depend on makes them another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling.records import RunRecord
from sweeps import search, search_memory
from sweeps.plan import make_plan
from sweeps.search_memory import MEMORY_FILE, SearchMemory
from sweeps.study import StudyConfig
from tests.sweeps.test_plan import record_of, study_of
from tests.sweeps.test_search import noisy

SMALL_SEARCH = {
    "widths": [16, 32],
    "parametrizations": {"mup": {}},
    "search": {"kind": "adaptive", "precision": 0.3, "max_runs": 4},
    "log2_lr": {"low": -10, "high": -3},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever the search itself is asked."""
    calls: list[int] = []
    ask = search.next_points

    def counted(*arguments: object) -> object:
        calls.append(1)
        return ask(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "next_points", counted)
    return calls


def made(study: StudyConfig, memory: SearchMemory | None = None) -> dict[str, RunRecord]:
    """All runs of the study, by its plans."""
    results: dict[str, RunRecord] = {}
    while todo := [run for run in make_plan(study, results, memory) if run.run_id not in results]:
        results |= {run.run_id: record_of(run, noisy(run)) for run in todo}
    return results


def test_a_plan_is_the_same_with_the_memory_and_without_and_the_second_asks_nothing(tmp_path: Path, asked: list[int]) -> None:
    study = study_of(tmp_path, **SMALL_SEARCH)
    results = made(study, SearchMemory(tmp_path))
    assert asked
    for at in ({}, results):
        plain = make_plan(study, at)
        before = len(asked)
        assert make_plan(study, at, SearchMemory(tmp_path)) == plain
        assert len(asked) == before
    halfway = dict(list(results.items())[::2])
    assert make_plan(study, halfway, SearchMemory(tmp_path)) == make_plan(study, halfway)
    assert search.searched_runs(study, "mup", results, SearchMemory(tmp_path)) == search.searched_runs(study, "mup", results)


def test_a_changed_loss_or_setting_is_another_question(tmp_path: Path, asked: list[int]) -> None:
    study = study_of(tmp_path, **SMALL_SEARCH)
    results = made(study, SearchMemory(tmp_path))
    other = {
        run_id: record.model_copy(update={"loss": (record.loss or 2.0) + 0.1 * record.log2_lr})
        for run_id, record in results.items()
    }
    finer = study.model_copy(update={"search": study.search.model_copy(update={"precision": 0.05})})
    for changed, of in ((study, other), (finer, results)):
        plain, before = make_plan(changed, of), len(asked)
        assert make_plan(changed, of, SearchMemory(tmp_path)) == plain
        assert len(asked) > before


def test_other_code_or_another_library_knows_no_answer(tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(tmp_path, **SMALL_SEARCH)
    make_plan(study, {}, SearchMemory(tmp_path))
    before = search_memory.code_version()
    monkeypatch.setattr(search_memory, "version", lambda package: f"{package} of tomorrow")
    search_memory.code_version.cache_clear()
    try:
        assert search_memory.code_version() != before
        asked.clear()
        make_plan(study, {}, SearchMemory(tmp_path))
        assert asked
    finally:
        search_memory.code_version.cache_clear()


@pytest.mark.parametrize("damage", ["torn", "digit", "empty", "folder", "binary"])
def test_a_damaged_memory_is_not_read(tmp_path: Path, asked: list[int], damage: str) -> None:
    study = study_of(tmp_path, **SMALL_SEARCH)
    plain = make_plan(study, {}, SearchMemory(tmp_path))
    file = tmp_path / MEMORY_FILE
    text = file.read_text()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        digit = text.replace('"log2_lr": -', '"log2_lr": -1', 1)
        assert digit != text
        content = {"torn": text[:-20], "digit": digit, "empty": "", "binary": "\x00\x01"}[damage]
        file.write_text(content)
    asked.clear()
    assert make_plan(study, {}, SearchMemory(tmp_path)) == plain
    assert asked


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    make_plan(study_of(tmp_path, **SMALL_SEARCH), {}, SearchMemory(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_question_without_an_exact_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no exact text"):
        SearchMemory(tmp_path).recall((object(),), list)
