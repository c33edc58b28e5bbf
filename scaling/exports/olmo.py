"""OLMo-core 3.0.0: plan.json and a recipe module that builds its transformer with our init and its optimizer with our groups.

OLMo-core has no factor on logits and none on a matrix, so that the form is the folded one. Torch-free.
"""

from __future__ import annotations

import json
from typing import Any

from scaling.config import RunConfig
from scaling.errors import Fault
from scaling.exports.batch import Batch
from scaling.exports.llama import llama_faults, olmo_name
from scaling.exports.plan import ExportPlan, make_plan
from scaling.exports.pytorch import export_files as pytorch_files
from scaling.exports.pytorch import recipe

OPTIMIZERS = ("adamw", "adam")
NORM_EPS = 1e-6
NOTES = (
    "written for ai2-olmo-core 3.0.0",
    "OLMo-core's own init has one std for all matrices, and cuts its draws at 3 std: olmo_core_recipe.py puts the plan's in its place",
    "OLMo-core predicts context - 1 tokens of a sequence, the toolkit all of them",
)


def faults(run: RunConfig) -> list[Fault]:
    """What OLMo-core's transformer and train module cannot express of `run`."""
    found = llama_faults(run, "OLMo-core's Llama", qk_norm=True)
    if run.training.precision == "fp16":
        found.append(Fault("training.precision", "OLMo-core does not scale losses for fp16", "use bf16"))
    if run.model.rope_base != int(run.model.rope_base):
        found.append(Fault("model.rope_base", "OLMo-core's is a whole number", f"use {round(run.model.rope_base)}"))
    return found


def plan_of(run: RunConfig) -> ExportPlan:
    """The folded plan under OLMo-core's names."""
    return make_plan(run, "folded", olmo_name)


def settings(run: RunConfig, batch: Batch) -> dict[str, Any]:
    """What the recipe builds the model and the train module from; sizes of batches in sequences."""
    model = run.model
    return {
        "d_model": model.width,
        "n_layers": model.depth,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_size": model.mlp_width,
        "vocab_size": model.vocabulary,
        "rope_theta": int(model.rope_base),
        "norm_eps": NORM_EPS,
        "qk_norm": model.qk_norm,
        "tie_word_embeddings": model.tied_embeddings,
        "context_tokens": model.context,
        "micro_batch_sequences": batch.micro,
        "batch_sequences": batch.sequences,
        "bf16": run.training.precision == "bf16",
    }


def export_files(run: RunConfig, batch: Batch) -> dict[str, str]:
    """File name -> content."""
    written = json.dumps(settings(run, batch), indent=1) + "\n"
    return pytorch_files(plan_of(run)) | {"model.json": written, "olmo_core_recipe.py": recipe("olmo_core_recipe.py")}
