"""torchtitan 0.3.0: plan.json and a recipe module that builds its Llama 3 with our init and its optimizer with our groups. Torch-free."""

from __future__ import annotations

import json

from scaling.config import RunConfig
from scaling.errors import Fault
from scaling.exports.batch import Batch
from scaling.exports.llama import llama_faults, torchtitan_name
from scaling.exports.plan import ExportPlan, make_plan
from scaling.exports.pytorch import export_files as pytorch_files
from scaling.exports.pytorch import recipe

OPTIMIZERS = ("adamw", "adam")


def faults(run: RunConfig) -> list[Fault]:
    """What torchtitan's Llama 3 cannot express of `run`."""
    found = llama_faults(run, "torchtitan's Llama", qk_norm=False)
    if run.model.tied_embeddings:
        found.append(Fault("model.tied_embeddings", "is not written for torchtitan", "set it to false"))
    if run.schedule.kind == "constant":
        found.append(Fault("schedule.kind", "torchtitan's schedule always decays", "use wsd with the smallest decay"))
    if run.training.precision == "fp16":
        found.append(Fault("training.precision", "torchtitan has no fp16", "use bf16"))
    return found


def plan_of(run: RunConfig) -> ExportPlan:
    """The folded plan under torchtitan's names."""
    return make_plan(run, "folded", torchtitan_name)


def model_shape(run: RunConfig, batch: Batch) -> dict[str, object]:
    """What the recipe builds the model and the training settings from."""
    model, training = run.model, run.training
    return {
        "dim": model.width,
        "n_layers": model.depth,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_dim": model.mlp_width,
        "vocab_size": model.vocabulary,
        "seq_len": model.context,
        "rope_theta": model.rope_base,
        "norm_eps": 1e-6,
        "local_batch_size": batch.micro,
        "global_batch_size": batch.sequences,
        "bf16": training.precision == "bf16",
    }


def export_files(run: RunConfig, batch: Batch) -> dict[str, str]:
    """File name -> content."""
    shape = json.dumps(model_shape(run, batch), indent=1) + "\n"
    return pytorch_files(plan_of(run)) | {"model.json": shape, "torchtitan_recipe.py": recipe("torchtitan_recipe.py")}
