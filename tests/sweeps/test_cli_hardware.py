"""`mutransfer layout` as it is typed: documents, exit codes, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps import cli

RUN = """\
model: {width: 4096, depth: 32, head_dim: 128, queries_per_kv: 4, mlp_ratio: 3.5, activation: swiglu, context: 8192, vocab_size: 128256}
base: {width: 512}
training: {steps: 1000, batch_size: 128}
"""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    (tmp_path / "run.yaml").write_text(RUN)

    def mutransfer(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["mutransfer", "layout", str(tmp_path / "run.yaml"), *arguments])
        code = cli._main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return mutransfer


def test_layouts_are_ranked_with_every_term(call: Any) -> None:
    code, text, _ = call("--gpus", "16", "--device", "h100", "--show", "3", "--json")
    document = json.loads(text)
    assert code == 0
    assert len(document["layouts"]) == 3
    first = document["layouts"][0]
    assert first["dp"] * first["tp"] * first["pp"] * first["cp"] == 16
    assert {"weights_bytes", "logits_bytes", "with_overhead_bytes"} <= set(first["memory"])
    assert first["gpu_hours"] == pytest.approx(16 * first["hours"])
    assert first["hours_interval"][0] < first["hours"] < first["hours_interval"][1]
    assert document["candidates"] > document["fitting"]


def test_a_given_layout_is_the_only_one(call: Any) -> None:
    arguments = ("--tp", "2", "--pp", "2", "--cp", "1", "--micro-batch", "1", "--virtual-stages", "1")
    chosen = ("--sharding", "zero1", "--checkpointing", "none")
    code, text, _ = call("--gpus", "16", "--device", "h100", *arguments, *chosen, "--json")
    assert code == 0
    assert json.loads(text)["candidates"] == 1


def test_a_run_that_nothing_fits_is_an_answer_and_not_an_error(call: Any) -> None:
    code, text, _ = call("--gpus", "1", "--device", "a100")
    assert code == 1
    assert "nothing fits. Nearest:" in text
    assert "cure:" in text


def test_an_impossible_layout_is_refused_with_all_its_faults(call: Any) -> None:
    code, text, errors = call("--gpus", "16", "--device", "h100", "--tp", "3", "--pp", "40", "--json")
    assert code == 2
    assert {fault["where"] for fault in json.loads(text)["errors"]} >= {"--gpus", "--tp", "--pp"}
    assert "Traceback" not in errors


def test_an_unknown_device_is_asked_about(call: Any) -> None:
    code, _, errors = call("--gpus", "16", "--device", "mystery")
    assert code == 2
    assert "--peak-tflops" in errors
    assert "--memory-gib" in errors


def test_arithmetic_that_a_device_lacks_is_refused(call: Any) -> None:
    code, _, errors = call("--gpus", "16", "--device", "a100", "--arithmetic", "fp8")
    assert code == 2
    assert "a100 has no fp8" in errors


def test_experts_are_planned_where_they_are_asked_for(call: Any) -> None:
    code, text, _ = call(
        "--gpus", "64", "--device", "h100", "--experts", "8", "--top-k", "2", "--expert-width", "1024", "--ep", "4", "--json"
    )
    assert code == 0
    document = json.loads(text)
    assert document["parameters"]["active"] < document["parameters"]["total"]
    assert {layout["ep"] for layout in document["layouts"]} == {4}


def test_half_a_question_of_experts_is_refused(call: Any) -> None:
    code, text, _ = call("--gpus", "64", "--device", "h100", "--experts", "8", "--json")
    assert code == 2
    assert [fault["where"] for fault in json.loads(text)["errors"]] == ["--top-k", "--expert-width"]


def test_experts_that_ranks_do_not_share_are_refused(call: Any) -> None:
    code, text, _ = call("--gpus", "64", "--device", "h100", "--experts", "8", "--top-k", "9", "--expert-width", "64", "--json")
    assert code == 2
    assert "more than the 8 experts" in text
    code, text, _ = call("--gpus", "64", "--device", "h100", "--ep", "4", "--json")
    assert code == 2
    assert "the model has none" in text


def test_a_vocabulary_that_only_data_would_tell_is_asked_for(call: Any) -> None:
    code, _, errors = call("--gpus", "16", "--device", "h100", "--set", "model.vocab_size=null")
    assert code == 2
    assert "--set model.vocab_size=NUMBER" in errors


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """The command on 16 runs of a law whose optimum is known: parameters and tokens share a budget evenly."""
    rows = [(n, d, 1.7 + (2e3 / n) ** 0.35 + (2e4 / d) ** 0.35) for n in (1e6, 1e7, 1e8, 1e9) for d in (1e7, 1e8, 1e9, 1e10)]
    lines = ["params,tokens,loss", *(f"{n},{d},{loss}" for n, d, loss in rows)]
    (tmp_path / "runs.csv").write_text("\n".join(lines))

    def mutransfer(*arguments: str) -> tuple[int, Any, str]:
        monkeypatch.setattr("sys.argv", ["mutransfer", "budget", str(tmp_path / "runs.csv"), *arguments, "--json"])
        code = cli._main()
        captured = capsys.readouterr()
        return code, json.loads(captured.out), captured.err

    return mutransfer


def test_hours_of_a_device_become_flop(budget: Any) -> None:
    _, document, _ = budget("--gpu-hours", "10", "--device", "h100", "--mfu", "0.4")
    assert document["budget_flops"] == pytest.approx(10 * 3600 * 989e12 * 0.4)
    split = document["optimal"]
    assert 6 * split["params"]["value"] * split["tokens"]["value"] == pytest.approx(document["budget_flops"])
    assert split["tokens"]["value"] / split["params"]["value"] == pytest.approx(10, rel=0.05)


def test_hours_and_flop_of_one_budget_agree(budget: Any) -> None:
    _, hours, _ = budget("--gpu-hours", "10", "--device", "h100", "--mfu", "0.4")
    _, flops, _ = budget("--flops", str(hours["budget_flops"]))
    assert flops["optimal"] == hours["optimal"]


def test_hours_without_what_they_are_worth_are_refused_at_once(budget: Any) -> None:
    code, document, _ = budget("--gpu-hours", "10")
    assert code == 2
    assert [fault["where"] for fault in document["errors"]] == ["--device", "--mfu"]


def test_two_budgets_or_none_are_refused(budget: Any) -> None:
    assert budget("--gpu-hours", "10", "--flops", "1e20", "--device", "h100", "--mfu", "0.4")[0] == 2
    assert budget()[0] == 2


def test_a_budget_far_below_what_was_measured_is_not_trusted(budget: Any) -> None:
    code, document, _ = budget("--flops", "1e8")
    assert code == 1
    assert any("below what was measured" in flag for flag in document["flags"])


def test_hours_need_no_memory(budget: Any) -> None:
    _, document, _ = budget("--gpu-hours", "1", "--device", "mine", "--mfu", "0.4", "--peak-tflops", "100")
    assert document["budget_flops"] == pytest.approx(3600 * 1e14 * 0.4)


def test_the_optimizer_of_a_run_sets_its_states(call: Any) -> None:
    arguments = (
        "--gpus",
        "16",
        "--device",
        "h100",
        "--tp",
        "1",
        "--pp",
        "1",
        "--cp",
        "1",
        "--micro-batch",
        "1",
        "--sharding",
        "fsdp",
    )

    def states(*more: str) -> float:
        document = json.loads(call(*arguments, "--checkpointing", "full", *more, "--json")[1])
        return float((document["layouts"] or [document["nearest"]])[0]["memory"]["optimizer_bytes"])

    adamw = states()
    assert states("--set", "optimizer.kind=lion") == pytest.approx(adamw / 2)
    assert states("--set", "optimizer.kind=sgd", "--set", "optimizer.beta1=0") == 0
    assert adamw / 2 < states("--set", "optimizer.kind=muon") < adamw


def test_what_a_run_states_and_no_plan_reads_is_said(call: Any) -> None:
    document = json.loads(call("--gpus", "16", "--device", "h100", "--set", "training.micro_batch_size=2", "--json")[1])
    assert {layout["micro_batch_size"] for layout in document["layouts"]} == {2}
    assert any("training.precision is fp32" in note for note in document["notes"])
    assert any("micro_batch_size 2 is taken" in note for note in document["notes"])
