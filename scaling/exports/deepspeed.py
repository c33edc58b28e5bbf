"""DeepSpeed: ds_config.json, with plan.json and the file that builds the parameter groups. Written for 0.19. Torch-free.

The JSON's optimizer has one LR and most of its schedulers give every group the same: so the JSON has neither, and the groups and the
schedule come from param_groups.py. DeepSpeed passes over keys that it does not know; `known_keys` checks them here instead.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from scaling.errors import ConfigError, Fault, raise_all
from scaling.exports.batch import Batch
from scaling.exports.plan import ExportPlan
from scaling.exports.pytorch import export_files as pytorch_files
from scaling.exports.pytorch import recipe

VERSION = "0.19"
OPTIMIZERS = ("adamw", "adam")
OWN_KEYS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
    "bf16", "bfloat16", "fp16",
)  # fmt: skip
"""Set by the export: another value would be another run."""
OTHER_RUN = {
    "gradient_allreduce_op": "changes the gradients by the number of devices, and the clipping with them",
    "managed_gradient_accumulation": "leaves it to your loop how many sequences an update has",
}
"""Keys that DeepSpeed reads and that no export may have, and why."""
KNOWN_KEYS = (
    "zero_optimization", "activation_checkpointing", "aio", "autotuning", "comet", "comms_logger", "communication_data_type", "checkpoint",
    "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel",
    "flops_profiler", "hybrid_engine", "log_level", "memory_breakdown", "pipeline", "prescale_gradients", "gradient_predivide_factor",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "data_parallel_size", "steps_per_print", "tensorboard",
    "csv_monitor", "use_data_before_expert_parallelism", "vocabulary_size", "wandb", "wall_clock_breakdown", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "data_efficiency", "timers", "torch_autocast", "compile",
    "tensor_parallel",
)  # fmt: skip
"""Top-level keys that DeepSpeed reads beside these; it passes over any other without a word."""
REMOVED_KEYS = (
    "amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula",
    "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients",
)  # fmt: skip
"""Keys of older versions, which DeepSpeed refuses by name."""
STAGES = (0, 1, 2, 3)


def known_keys(settings: Mapping[str, Any], where: str) -> list[Fault]:
    """Faults of a user's own DeepSpeed settings: keys that the export sets, and keys that DeepSpeed would pass over."""
    faults = []
    for key in settings:
        if key in OWN_KEYS:
            faults.append(Fault(f"{where}: {key}", "is set by the export from the run", "leave it out"))
        elif key in OTHER_RUN:
            faults.append(Fault(f"{where}: {key}", f"{OTHER_RUN[key]}: another run", "leave it out"))
        elif key in REMOVED_KEYS:
            what = f"has been removed from DeepSpeed {VERSION}, which refuses it"
            faults.append(Fault(f"{where}: {key}", what, "leave it out"))
        elif key not in KNOWN_KEYS:
            near = difflib.get_close_matches(key, (*OWN_KEYS, *KNOWN_KEYS), n=1)
            cure = f"did you mean {near[0]}?" if near else ""
            faults.append(Fault(f"{where}: {key}", "is no key that DeepSpeed reads: it would be passed over in silence", cure))
    return faults


def config(
    plan: ExportPlan, batch: Batch, zero_stage: int, settings: Mapping[str, Any], where: str = "--merge"
) -> dict[str, Any]:
    """ds_config.json; settings: the user's own keys. Raises ConfigError with all that is wrong with them."""
    if zero_stage not in STAGES:
        raise ConfigError(Fault(f"--zero {zero_stage}", "is no ZeRO stage", "one of 0, 1, 2, 3"))
    own = dict(settings)
    zero = own.pop("zero_optimization", {})
    raise_all(known_keys(settings, where))
    if not isinstance(zero, Mapping):
        raise ConfigError(Fault(f"{where}: zero_optimization", "is no mapping", "{...}"))
    if "stage" in zero:
        raise ConfigError(Fault(f"{where}: zero_optimization.stage", "is set by the export", f"--zero {zero['stage']}"))
    precision = plan.run.training.precision
    clip = plan.run.optimizer.clip_norm
    return {
        "train_batch_size": batch.sequences,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        **({} if clip is None else {"gradient_clipping": clip}),
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_optimization": {"stage": zero_stage, **zero},
        **own,
    }


def export_files(plan: ExportPlan, batch: Batch, zero_stage: int, settings: Mapping[str, Any], where: str) -> dict[str, str]:
    """File name -> content."""
    written = json.dumps(config(plan, batch, zero_stage, settings, where), indent=1, allow_nan=False) + "\n"
    return pytorch_files(plan) | {"ds_config.json": written, "engine.py": recipe("deepspeed_engine.py")}
