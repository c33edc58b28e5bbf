"""What `scaling.matmul` and `scaling.memory` are worth on this machine: a layer's products, and page faults a training step."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling import matmul

TOKENS, REPEATS = 2048, 30
FAULTS = """
import resource, sys
import scaling.train as train
from scaling.config_file import load_config
from scaling.data import prepare
from sweeps.study import StudyConfig
from pathlib import Path
if sys.argv[2] == "0":
    train.keep_memory = lambda: False
study = load_config(Path("configs/studies/quickstart.yaml"), StudyConfig, ["model.vocab_size=256"])
run = study.run("mup", int(sys.argv[1]), -7.0, 0)
trainer = train.Trainer(run, prepare(run.data, context=run.model.context, vocab_size=256))
for step in range(5):
    trainer.step(step)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(5, 15):
    trainer.step(step)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def report() -> None:
    """Print milliseconds of a square layer's products on one thread, and page faults a step with memory given back and kept."""
    torch.set_num_threads(1)
    print(f"\none thread, a layer on {TOKENS} tokens, ms forward and backward: torch's linear; here (oneDNN: {matmul.ONEDNN})")
    for width in (64, 128, 256):
        plain, own = (_milliseconds(linear, width) for linear in (F.linear, matmul.linear))
        print(f"  width {width:3}  {plain[0]:.2f} {plain[1]:.2f}   {own[0]:.2f} {own[1]:.2f}")
    print("page faults a step of the quickstart's muP model: memory given back; kept")
    for width in (64, 128, 256):
        print(f"  width {width:3}  {_faults(width, keep=False):.0f}   {_faults(width, keep=True):.0f}")


def _milliseconds(linear: Callable[[Tensor, Tensor], Tensor], width: int) -> tuple[float, float]:
    """The fastest of several, forward and backward."""
    x = torch.randn(16, TOKENS // 16, width, requires_grad=True)
    weight = torch.randn(width, width, requires_grad=True)
    forward, backward = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        y = linear(x, weight)
        middle = time.perf_counter()
        torch.autograd.backward(y, torch.ones_like(y))
        forward.append(middle - started)
        backward.append(time.perf_counter() - middle)
    return 1e3 * min(forward), 1e3 * min(backward)


def _faults(width: int, *, keep: bool) -> float:
    command = [sys.executable, "-c", FAULTS, str(width), str(int(keep))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
