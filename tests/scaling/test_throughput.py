"""What makes a step fast does not change what it computes: products by oneDNN, memory that is kept, one group for equal settings."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scaling import matmul
from scaling.config import OptimizerConfig, TrainingConfig
from scaling.data import prepare
from scaling.matmul import linear
from scaling.parametrization import tensor_rules
from scaling.train import Trainer
from tests.conftest import tiny_run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("shape", [(16, 8, 24), (4, 16, 24), (32, 24), (3, 5, 24), (0, 24), (16, 1, 24)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_product_and_its_gradients_are_those_of_torch(
    shape: tuple[int, ...], contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "ONEDNN", torch.backends.mkldnn.is_available())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=generator)
    x = x if contiguous else x.transpose(0, -2).contiguous().transpose(0, -2)
    weight = torch.randn(40, 24, generator=generator)
    found = []
    for function in (linear, F.linear):
        leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_(), weight.clone().requires_grad_()]
        y = function(*leaves)
        (y * torch.arange(40)).sum().backward()  # type: ignore[no-untyped-call]
        found.append([y, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float64, False), (torch.float32, True), (torch.bfloat16, False)])
def test_other_precisions_are_left_to_torch(dtype: torch.dtype, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ONEDNN", True)
    x, weight = torch.randn(16, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_a_run_with_onednns_products_has_the_losses_of_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(onednn: bool) -> list[float]:
        monkeypatch.setattr(matmul, "ONEDNN", onednn)
        run = tiny_run()
        trainer = Trainer(run, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size))
        return [trainer.step(step)[0] for step in range(run.training.steps)]

    assert losses(torch.backends.mkldnn.is_available()) == pytest.approx(losses(False), rel=1e-5)


def test_tensors_with_equal_settings_share_a_group_and_keep_their_rules() -> None:
    run = tiny_run(64, optimizer=OptimizerConfig(lr=0.01, weight_decay=0.1))
    trainer = Trainer(run, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size))
    groups = trainer.optimizer.param_groups
    settings = [(group["peak_lr"], group["weight_decay"], group["eps"]) for group in groups]
    assert len(set(settings)) == len(settings) < len(tensor_rules(run))
    assert all(group["fused"] for group in groups)
    held = {name: setting for group, setting in zip(groups, settings, strict=True) for name in group["names"]}
    assert held == {rule.name: (rule.lr, rule.weight_decay, rule.eps) for rule in tensor_rules(run)}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")
def test_steps_take_their_memory_from_the_steps_before() -> None:
    """In a process of its own: the setting is the process's, and other tests' memory would decide."""
    faults = _faults_a_step(kept=True), _faults_a_step(kept=False)
    assert faults[0] < 50 < faults[1]


def _faults_a_step(*, kept: bool) -> float:
    code = (
        "import resource; from scaling.memory import keep_memory\n"
        f"{'assert keep_memory()' if kept else ''}\n"
        "def step():\n    big = [b'x' * 8_000_000 for _ in range(8)]\n"
        "for _ in range(3): step()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(5): step()\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5)"
    )
    return float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_runs_of_a_shape_share_one_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a ninth shape is compiled like the first: torch's own limit is eight, beyond which it does not compile, and goes on."""
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    def compiled(loss: Callable[..., torch.Tensor], **options: bool) -> Callable[..., torch.Tensor]:
        return compile_with(loss, backend=backend, **options)

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", compiled)
    torch.compiler.reset()
    widths = (16, 16, 16, 24, 32, 40, 48, 56, 64, 72, 80, 16)
    for index, width in enumerate(widths):
        run = tiny_run(width, log2_lr=-7 - index % 3, training=TrainingConfig(steps=2, batch_size=4, compile=True, seed=index))
        Trainer(run, prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)).step(0)
    assert len(graphs) == len(set(widths))
    torch.compiler.reset()
