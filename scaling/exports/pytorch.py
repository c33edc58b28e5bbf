"""Plain PyTorch: plan.json, the file that builds parameter groups, initial values and schedule from it, and a program that trains.

Owns the files of every engine that is given torch's own optimizer (`export_files`), and those of `--engine pytorch` (`training_files`).
Torch-free.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from scaling.config import RunConfig
from scaling.errors import Fault
from scaling.exports.plan import ExportPlan

OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "muon")
PARAM_GROUPS = "param_groups.py"
OWN_OPTIMIZERS, LION_MUON = ("lion", "muon"), "lion_muon.py"
"""Optimizers that param_groups.py takes from a file of their own; train_fsdp.py has not them, their updates of shards are not checked."""
REPLACEABLE = ("model.py", "data.py")
"""What a user replaces by theirs."""
TRAINING = ("train_fsdp.py", *REPLACEABLE)
"""The program, and what it imports beside param_groups.py."""


def faults(run: RunConfig) -> list[Fault]:
    """What train_fsdp.py would refuse of `run`, where it is written."""
    if run.training.precision != "fp16" or run.optimizer.kind in OWN_OPTIMIZERS:
        return []
    cure = "--set training.precision=bf16, or --engine deepspeed, which scales losses and is given the same plan.json"
    return [Fault("training.precision", "train_fsdp.py does not scale losses, as fp16 needs", cure)]


def recipe(name: str) -> str:
    """Text of a file of `recipes`."""
    return files("scaling.exports").joinpath("recipes", name).read_text()


def export_files(plan: ExportPlan) -> dict[str, str]:
    """File name -> content."""
    own = {LION_MUON: recipe(LION_MUON)} if plan.run.optimizer.kind in OWN_OPTIMIZERS else {}
    return {"plan.json": plan.to_json(), PARAM_GROUPS: recipe(PARAM_GROUPS)} | own


def training_files(plan: ExportPlan) -> dict[str, str]:
    """File name -> content of all that `torchrun train_fsdp.py` needs; without the program where it has not the optimizer."""
    if plan.run.optimizer.kind in OWN_OPTIMIZERS:
        return export_files(plan)
    settings = json.dumps(run_settings(plan.run), indent=1) + "\n"
    return export_files(plan) | {"run.json": settings} | {name: recipe(name) for name in TRAINING}


def run_settings(run: RunConfig) -> dict[str, Any]:
    """What the program needs beside the plan: the shape of the toolkit's model, and how it was trained."""
    model, training = run.model, run.training
    return {
        "model": {
            "width": model.width,
            "depth": model.depth,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_size,
            "mlp_width": model.mlp_width,
            "vocabulary": model.vocabulary,
            "activation": model.activation,
            "norm_gain": model.norm_gain,
            "qk_norm": model.qk_norm,
            "tied_embeddings": model.tied_embeddings,
            "rope_base": model.rope_base,
        },
        "precision": training.precision,
        "micro_batch_sequences": training.micro_batch_size,
        "seed": training.seed,
    }
