"""Fixtures that all tests share: one thread, a cache of its own, and a tiny run on synthetic data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from scaling.config import DataConfig, InitConfig, OptimizerConfig, ParametrizationConfig, RunConfig, TrainingConfig
from scaling.model_config import ModelFamily

SYNTHETIC = DataConfig(source="zipf-markov", synthetic_tokens=40_000, synthetic_vocab=32)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Corpora of the tests stay out of the user's cache; subprocesses inherit it."""
    os.environ["MUTRANSFER_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def tiny_run(
    width: int = 32,
    log2_lr: float = -7,
    kind: str = "mup",
    *,
    family: ModelFamily | None = None,
    training: TrainingConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    base_width: int = 32,
    init: InitConfig | None = None,
    **parametrization: object,
) -> RunConfig:
    """A run of seconds: depth 2, context 16, synthetic data. parametrization: further keys of ParametrizationConfig."""
    return RunConfig.model_validate(
        {
            "model": (family or ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32)).at(width),
            "parametrization": ParametrizationConfig.model_validate(
                {"kind": kind, "init": init or InitConfig()} | parametrization
            ),
            "base": {"width": base_width},
            "optimizer": optimizer or OptimizerConfig(lr=2.0**log2_lr),
            "data": SYNTHETIC,
            "training": training or TrainingConfig(steps=12, batch_size=4, validation_sequences=8),
        }
    )


@pytest.fixture
def shared_data() -> Path:
    """Public measurements beside the checkout; tests that need them skip where they are absent."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.exists():
        pytest.skip("the folder ../shared/data is absent")
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command as it is typed, in this process: exit code, what it printed, what it said on stderr."""
    from sweeps import cli

    def mutransfer(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["mutransfer", *map(str, arguments)])
        code = cli._main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return mutransfer
