"""Hugging Face Trainer (transformers 5.24): model config, training arguments, plan.json, and the file that builds the optimizer.

Llama (Qwen 3 with QK-norm) has no forward multipliers, so that the form is the folded one. The Trainer clips by the plain norm.
Torch-free.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from scaling.config import RunConfig
from scaling.errors import Fault, raise_all
from scaling.exports.batch import Batch
from scaling.exports.llama import huggingface_name, llama_faults
from scaling.exports.plan import ExportPlan, make_plan
from scaling.exports.pytorch import export_files as pytorch_files
from scaling.exports.pytorch import recipe

OPTIMIZERS = ("adamw", "adam")
NORM_EPS = 1e-6
OWN_ARGUMENTS = (
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16", "learning_rate",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim",
)  # fmt: skip
"""Set by the export, or without effect beside an optimizer that is given."""
FSDP_KEYS = (
    "version", "transformer_layer_cls_to_wrap", "min_num_params", "reshard_after_forward", "activation_checkpointing",
    "cpu_ram_efficient_loading", "state_dict_type", "auto_wrap_policy", "cpu_offload",
)  # fmt: skip
"""Keys of fsdp_config that the Trainer reads under FSDP2; it takes any other without a word."""


def faults(run: RunConfig) -> list[Fault]:
    """What the Trainer's Llama cannot express of `run`."""
    return llama_faults(run, "transformers", qk_norm=True)


def plan_of(run: RunConfig) -> ExportPlan:
    """The folded plan under transformers' names."""
    return make_plan(run, "folded", huggingface_name)


def model_config(run: RunConfig) -> dict[str, Any]:
    """config.json of the model."""
    model = run.model
    kind = "qwen3" if model.qk_norm else "llama"
    return {
        "model_type": kind,
        "architectures": ["Qwen3ForCausalLM" if model.qk_norm else "LlamaForCausalLM"],
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.mlp_width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_theta": model.rope_base, "rope_type": "default"},
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def argument_faults(settings: Mapping[str, Any], where: str) -> list[Fault]:
    """Faults of a user's own training arguments; what TrainingArguments refuses by itself is left to it."""
    found = [
        Fault(f"{where}: {key}", "is set by the export from the run", "leave it out") for key in settings if key in OWN_ARGUMENTS
    ]
    fsdp = settings.get("fsdp_config")
    for key in fsdp if isinstance(fsdp, Mapping) else ():
        if key not in FSDP_KEYS:
            near = difflib.get_close_matches(key, FSDP_KEYS, n=1)
            what = "is no key that the Trainer reads under FSDP2: it would be passed over in silence"
            found.append(Fault(f"{where}: fsdp_config.{key}", what, f"did you mean {near[0]}?" if near else ""))
    return found


def training_arguments(run: RunConfig, batch: Batch, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """TrainingArguments as JSON; `output_dir` is the user's. Raises ConfigError for keys of theirs that would not count."""
    raise_all(argument_faults(settings, where))
    clip = run.optimizer.clip_norm
    return {
        "output_dir": "out",
        "max_steps": run.training.steps,
        "per_device_train_batch_size": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "max_grad_norm": 0.0 if clip is None else clip,
        "bf16": run.training.precision == "bf16",
        "fp16": run.training.precision == "fp16",
        **settings,
    }


def export_files(run: RunConfig, batch: Batch, settings: Mapping[str, Any], where: str) -> dict[str, str]:
    """File name -> content."""
    arguments = training_arguments(run, batch, settings, where)
    return pytorch_files(plan_of(run)) | {
        "config.json": json.dumps(model_config(run), indent=1) + "\n",
        "training_arguments.json": json.dumps(arguments, indent=1) + "\n",
        "trainer.py": recipe("huggingface_trainer.py"),
    }
