"""`mutransfer recommend` beyond its study: budgets, laws, measured batches, devices, and recommendations that are out of date."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TABLE = Path("tests/fixtures/scaling.csv")
RUN = Path("configs/models/base.yaml")


Call = Callable[..., tuple[int, str, str]]


def recommended(call: Call, target: Path, *more: object) -> dict[str, Any]:
    _, out, err = call("recommend", TABLE, "--run", RUN, "--target", target, "--json", *more)
    assert out, err
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.fixture
def target(tmp_path: Path) -> Path:
    file = tmp_path / "target.yaml"
    file.write_text("width: 256\ntokens: 3276800\n")
    return file


def test_exponents_that_the_table_measured_replace_the_rule_and_both_are_said(target: Path, call: Call) -> None:
    document = recommended(call, target)
    assert document["lr_exponents"]["tokens"]["measured"]
    (step,) = [step for step in document["steps"] if step["title"].startswith("LR at the target")]
    assert "the rule alone would give" in step["value"]
    target.write_text(target.read_text() + "exponents: rule\n")
    ruled = recommended(call, target)
    assert not ruled["lr_exponents"]["tokens"]["measured"]
    assert ruled["hyperparameters"]["lr"]["value"] == pytest.approx(document["hyperparameters"]["lr"]["value"] * 8**-0.5, rel=0.2)


def test_a_budget_gives_the_size_the_tokens_and_the_loss(tmp_path: Path, call: Call) -> None:
    target = tmp_path / "target.yaml"
    target.write_text("depth: 2\n")
    document = recommended(call, target, "--flops", "1e14", "--law", "kaplan")
    run, counts = document["run"], document["run"]["model"]
    assert counts["width"] % 16 == 0
    tokens = document["hyperparameters"]["tokens"]["value"]
    params = 12 * run["model"]["depth"] * counts["width"] ** 2 + 2 * 256 * counts["width"]
    assert 6 * params * tokens == pytest.approx(1e14, rel=0.02)
    assert document["predicted_loss"]["interval"][0] < document["predicted_loss"]["value"]
    target.write_text("depth: 2\nwidth: 256\n")
    code, _, err = call("recommend", TABLE, "--run", RUN, "--target", target, "--flops", "1e14", "--law", "kaplan")
    assert code == 2
    assert "is what the budget decides" in err


def test_named_devices_are_planned_for_and_unknown_ones_refused(target: Path, call: Call) -> None:
    text = target.read_text()
    target.write_text(text + "gpus: {count: 2, device: h100}\n")
    document = recommended(call, target)
    assert document["layout"]["fitting"] > 0
    target.write_text(text + "gpus: {count: 2, device: h100, memory_gb_s: 300, node_gpus: 1}\n")
    slower = recommended(call, target)
    assert slower["layout"]["layouts"][0]["hours"] > 2 * document["layout"]["layouts"][0]["hours"]
    target.write_text(text + "gpus: {count: 2, device: h900}\n")
    code, _, err = call("recommend", TABLE, "--run", RUN, "--target", target)
    assert code == 2
    assert "gpus.peak_tflops" in err
    assert "gpus.memory_gib" in err


def test_the_noise_scale_of_a_proxy_gives_the_batch(target: Path, tmp_path: Path, call: Call) -> None:
    proxy = tmp_path / "proxy"
    small = ("training.steps=24", "training.batch_size=8", "runtime.noise_scale_every_steps=1")
    assert call("train", RUN, *(word for text in small for word in ("--set", text)), "--out", proxy)[0] == 0
    target.write_text(target.read_text() + "gpus: {count: 2}\n")
    document = recommended(call, target, "--batch-from", proxy)
    measured, context = document["batch"], document["run"]["model"]["context"]
    batch_tokens = document["hyperparameters"]["batch_tokens"]["value"]
    assert batch_tokens % (2 * context) == 0
    assert measured["tokens"] - 2 * context < batch_tokens <= max(measured["tokens"], 2 * context)
    assert document["run"]["training"]["batch_size"] == batch_tokens / context


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch-law", "lr-batch"), "none is given"),
        (("--flops", "1e14", "--gpu-hours", "3"), "both are a budget"),
        (("--flops", "-1"), "is no positive number"),
        (("--batch-from", "nowhere"), "no such file"),
        (("--batch-from", str(TABLE)), "one of critical-batch, lr-batch"),
        (("--law", "lr-batch"), "is no law of the final loss"),
        (("--gpu-hours", "3"), "is what the budget decides"),
        (("--params-include", "embedding"), "none is asked for"),
        (("--out", str(TABLE)), "is no recommended config"),
        (("--out", str(RUN)), "is no recommended config"),
        (("--out", "tests"), "is a folder"),
    ],
)
def test_wrong_use_is_refused(options: tuple[str, ...], words: str, target: Path, call: Call) -> None:
    code, _, err = call("recommend", TABLE, "--run", RUN, "--target", target, *options)
    assert code == 2
    assert words in " ".join(err.split())


def test_a_recommendation_older_than_its_runs_is_refused(tmp_path: Path, target: Path, call: Call) -> None:
    table, config = tmp_path / "runs.csv", tmp_path / "recommended.yaml"
    table.write_bytes(TABLE.read_bytes())
    call("recommend", table, "--run", RUN, "--target", target, "--out", config)
    assert call("explain", config)[0] == 0
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[:-1]))
    code, _, err = call("explain", config)
    assert code == 2
    assert "was recommended from" in err
    assert call("layout", config, "--gpus", "2", "--device", "h100")[0] == 2
    assert call("explain", config, "--set", "recommended=null")[0] == 0
    table.unlink()
    code, _, err = call("explain", config)
    assert code == 0
    assert "not checked against the runs" in err


def test_a_law_is_fitted_at_the_runs_batch_and_says_so(target: Path, call: Call) -> None:
    target.write_text("width: 256\ntokens: 6553600\n")
    document = recommended(call, target, "--law", "kaplan", "--params-include", "embedding")
    assert "22 rows left out that do not meet batch_tokens=2048" in document["law_notes"]
    assert document["predicted_loss"]["value"] == pytest.approx(1.058, abs=0.001)


def test_a_config_of_ours_is_written_again_and_counts_the_runs_of_the_table(target: Path, tmp_path: Path, call: Call) -> None:
    config = tmp_path / "recommended.yaml"
    for _ in range(2):
        code, _, err = call("recommend", TABLE, "--run", RUN, "--target", target, "--out", config)
        assert code == 0, err
    assert "runs: 102" in config.read_text()


def test_the_stated_micro_batch_is_planned_with_and_written(target: Path, call: Call) -> None:
    text = "width: 2048\ntokens: 409600000\nbatch_tokens: 65536\n"
    target.write_text(text + "gpus: {count: 8, device: h100, micro_batch_size: 2}\n")
    document = recommended(call, target)
    assert document["run"]["training"]["micro_batch_size"] == 2
    assert {layout["micro_batch_size"] for layout in document["layout"]["layouts"]} == {2}
    target.write_text(text + "gpus: {count: 3, device: h100}\n")
    (said,) = [warning for warning in recommended(call, target)["warnings"] if "no layout" in warning]
    assert "no multiple of micro-batch 1 x dp 3" in said


def test_a_study_has_no_config_from_elsewhere(tmp_path: Path, call: Call) -> None:
    (tmp_path / "study.yaml").write_bytes(Path("configs/studies/quickstart.yaml").read_bytes())
    code, _, err = call("recommend", tmp_path, "--run", RUN)
    assert code == 2
    assert "is for a table of runs" in err


def test_a_budget_that_cannot_be_trusted_ends_with_exit_code_1(target: Path, call: Call) -> None:
    target.write_text("depth: 2\n")
    arguments = ("--run", RUN, "--target", target, "--flops", "1e17", "--law", "kaplan")
    code, out, _ = call("recommend", TABLE, *arguments)
    assert code == 1
    assert "is not to be trusted" in out
