"""Configs: frozen, strict, hashed; files and overrides with every fault at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scaling.config import RunConfig, content_hash
from scaling.config_file import ConfigSource, apply_overrides, build, load_config, read_yaml
from scaling.errors import ConfigError
from scaling.model_config import ModelFamily
from tests.conftest import tiny_run

RUN = """\
model:
  width: 64
  vocab_size: 256
optimizer:
  lr: 1e-3
training: {steps: 10}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def faults_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, RunConfig, overrides)
    return [str(fault) for fault in caught.value.faults]


def test_exponents_are_numbers(tmp_path: Path) -> None:
    run = load_config(write(tmp_path / "run.yaml", RUN), RunConfig, ["optimizer.eps=1e-12"])
    assert (run.optimizer.lr, run.optimizer.eps) == (1e-3, 1e-12)


def test_every_fault_is_reported_at_once_with_file_line_and_cure(tmp_path: Path) -> None:
    text = "model:\n  widht: 64\n  depth: two\noptimizer:\n  lr: -1\nschedule:\n  kind: cosin\n"
    path = write(tmp_path / "bad.yaml", text)
    faults = faults_of(path)
    assert len(faults) == 5
    joined = "\n".join(faults)
    for expected in (
        f"{path}:2: model.widht: unknown key",
        "did you mean 'width'?",
        f"{path}:1: model.width: missing",
        f"{path}:3: model.depth",
        f"{path}:5: optimizer.lr",
        f"{path}:7: schedule.kind",
        "did you mean 'cosine'?",
    ):
        assert expected in joined


def test_key_given_twice_is_a_fault(tmp_path: Path) -> None:
    (fault,) = faults_of(write(tmp_path / "twice.yaml", RUN + "training: {steps: 20}\n"))
    assert "twice.yaml:7: training: key given twice; first at" in fault


def test_override_faults_name_the_option(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", RUN)
    (fault,) = faults_of(path, "training.stepz=3")
    assert fault.startswith("--set training.stepz=3: training.stepz: unknown key")
    assert "did you mean 'steps'?" in fault
    assert "is not of the form" in faults_of(path, "training.steps")[0]


@pytest.mark.parametrize("text", ["", "- a\n", "a: [1\n", "just text"])
def test_a_file_that_is_no_mapping_is_a_fault(tmp_path: Path, text: str) -> None:
    assert faults_of(write(tmp_path / "x.yaml", text))


def test_missing_file_suggests_a_near_name(tmp_path: Path) -> None:
    write(tmp_path / "quickstart.yaml", RUN)
    (fault,) = faults_of(tmp_path / "quikstart.yaml")
    assert "no such file" in fault
    assert "quickstart.yaml?" in fault


def test_width_not_divisible_by_head_dim_names_the_nearest() -> None:
    with pytest.raises(ValidationError, match="width 100 is not divisible by head_dim 16; nearest widths that are: 96 or 112"):
        ModelFamily().at(100)


def test_run_id_ignores_runtime_and_nothing_else() -> None:
    run = tiny_run()
    elsewhere = run.model_copy(update={"runtime": run.runtime.model_copy(update={"threads": 7})})
    assert elsewhere.run_id == run.run_id
    assert tiny_run(log2_lr=-7.5).run_id != run.run_id
    assert tiny_run(kind="sp").run_id != run.run_id


def test_run_id_of_pinned_corpus_ignores_its_folder() -> None:
    def run_id(sha256: str | None, folder: str) -> str:
        run = tiny_run()
        data = run.data.model_copy(update={"sha256": sha256, "paths": (folder,)})
        return run.model_copy(update={"data": data}).run_id

    assert run_id("ab", "/one") == run_id("ab", "/two")
    assert run_id(None, "/one") != run_id(None, "/two")


def test_run_config_survives_yaml(tmp_path: Path) -> None:
    import yaml

    run = tiny_run()
    path = write(tmp_path / "config.yaml", yaml.safe_dump(run.model_dump(mode="json")))
    assert load_config(path, RunConfig) == run


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(), max_size=4))
def test_content_hash_does_not_depend_on_order(values: dict[str, int]) -> None:
    assert content_hash(values) == content_hash(dict(reversed(values.items())))


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)
)
def test_any_mapping_gives_a_config_or_a_config_error(values: object) -> None:
    if isinstance(values, dict):
        with pytest.raises(ConfigError):
            build(RunConfig, ConfigSource({"model": values}, "x.yaml"))


def test_overrides_can_add_a_section(tmp_path: Path) -> None:
    source = read_yaml(write(tmp_path / "run.yaml", RUN))
    apply_overrides(source, ["schedule.kind=cosine"])
    assert build(RunConfig, source).schedule.kind == "cosine"
