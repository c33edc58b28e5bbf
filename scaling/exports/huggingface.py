"""Hugging Face Trainer (transformers 5.24): model config, training arguments, plan.json, and the file that builds the optimizer.

Llama (Qwen 3 with QK-norm) has no forward multipliers: the form is the folded one. Granite is Llama with four of them: embedding, logits,
attention and one for both residual branches; the form with multipliers is written for it. The Trainer clips by the plain norm. Torch-free.
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
from scaling.exports.plan import ExportPlan, Form, make_plan
from scaling.exports.pytorch import export_files as pytorch_files
from scaling.exports.pytorch import recipe
from scaling.parametrization import forward_rules, tensor_rules

OPTIMIZERS = ("adamw", "adam")
NORM_EPS = 1e-6
OWN_ARGUMENTS = (
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16", "learning_rate",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim",
    "warmup_ratio", "optim_args", "optim_target_modules", "num_train_epochs", "auto_find_batch_size",
)  # fmt: skip
"""Set by the export, or without effect beside an optimizer that is given."""
FSDP_KEYS = (
    "version", "transformer_layer_cls_to_wrap", "min_num_params", "reshard_after_forward", "activation_checkpointing",
    "cpu_ram_efficient_loading", "state_dict_type", "auto_wrap_policy", "cpu_offload",
)  # fmt: skip
"""Keys of fsdp_config that the Trainer reads under FSDP2; it takes any other without a word."""


def faults(run: RunConfig, form: Form = "folded") -> list[Fault]:
    """What transformers' Llama (in the folded form) or Granite (with multipliers) cannot express of `run`."""
    if form == "folded":
        return llama_faults(run, "transformers' Llama", qk_norm=True)
    return llama_faults(run, "Granite", qk_norm=False) + _multiplier_faults(run)


def _multiplier_faults(run: RunConfig) -> list[Fault]:
    """Multipliers of the run for which Granite has no key."""
    forward = forward_rules(run)
    missing = []
    if any(rule.multiplier != 1.0 for rule in tensor_rules(run) if rule.role == "hidden"):
        missing.append("a factor on each hidden matrix")
    if forward.attention_branch != forward.mlp_branch:
        missing.append(f"a factor on attention ({forward.attention_branch:g}) beside the one on MLPs ({forward.mlp_branch:g})")
    if forward.attention_output != 1.0:
        missing.append("a factor before attention's output projection")
    if forward.mlp_inner != 1.0:
        missing.append("a factor before an MLP's output projection")
    what = f"Granite has no key for {', or '.join(missing)}"
    return [Fault("parametrization", what, "--form folded, or another parametrization")] if missing else []


def plan_of(run: RunConfig, form: Form = "folded") -> ExportPlan:
    """The plan under transformers' names, which are Granite's too."""
    return make_plan(run, form, huggingface_name)


def multipliers(run: RunConfig) -> dict[str, float]:
    """Granite's keys: it multiplies embeddings, branches and query . key, and divides logits."""
    forward = forward_rules(run)
    return {
        "embedding_multiplier": forward.embedding,
        "logits_scaling": 1 / forward.readout,
        "residual_multiplier": forward.mlp_branch,
        "attention_multiplier": forward.attention_scale,
    }


def model_config(run: RunConfig, form: Form = "folded") -> dict[str, Any]:
    """config.json of the model."""
    model = run.model
    kind, architecture = ("qwen3", "Qwen3ForCausalLM") if model.qk_norm else ("llama", "LlamaForCausalLM")
    if form == "multipliers":
        kind, architecture = "granite", "GraniteForCausalLM"
    return {
        "model_type": kind,
        "architectures": [architecture],
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
        **(multipliers(run) if form == "multipliers" else {}),
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


def export_files(run: RunConfig, batch: Batch, settings: Mapping[str, Any], where: str, form: Form = "folded") -> dict[str, str]:
    """File name -> content."""
    arguments = training_arguments(run, batch, settings, where)
    return pytorch_files(plan_of(run, form)) | {
        "config.json": json.dumps(model_config(run, form), indent=1) + "\n",
        "training_arguments.json": json.dumps(arguments, indent=1, allow_nan=False) + "\n",
        "trainer.py": recipe("huggingface_trainer.py"),
    }
