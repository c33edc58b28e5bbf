"""Megatron-LM with megatron-core 0.17 or newer: its own muP by flags, and what that muP does otherwise than the run. Torch-free.

`--use-mup` is Tensor Programs V's Table 8: hidden matrices get lr / m and eps / m, m being hidden over base hidden size, and start at
init-std / sqrt(m), those that write to the residual stream at that over sqrt(2 layers) too; everything else keeps lr and eps, embedding
and readout start at one std of their own; logits are multiplied by 1 / m. It has one weight decay for all matrices, none for gains.
`native` has these values a tensor, and `differences` holds them against the run's. `scaling.exports.megatron_folded` has the form
without --use-mup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from scaling.config import RunConfig
from scaling.errors import Fault
from scaling.exports.batch import Batch
from scaling.exports.llama import llama_faults
from scaling.exports.plan import schedule_dict
from scaling.parametrization import TensorRule, carried, forward_rules, tensor_rules

OPTIMIZERS = ("adamw",)
LEAST = "megatron-core 0.17"
FIELDS = ("lr", "weight_decay", "eps", "init_std")
ACCEPTABLE = ("eps", "weight_decay", "init_std")
"""What a user may accept to be otherwise; another LR is another muP."""


@dataclass(frozen=True)
class Native:
    """What --use-mup gives one tensor."""

    lr: float
    weight_decay: float
    eps: float
    init_std: float
    """NaN for gains, which start at 1."""


def hidden_std(run: RunConfig) -> float:
    """--init-method-std: the hidden matrices' at the base width."""
    query = next(rule for rule in tensor_rules(run) if rule.role == "hidden")
    return query.init_std * math.sqrt(run.model.width / run.base.width)


def native(run: RunConfig, rule: TensorRule) -> Native:
    """The values of --use-mup for the tensor of `rule`, under the flags that `arguments` writes."""
    optimizer, m = carried(run), run.model.width / run.base.width
    decay = optimizer.weight_decay
    if rule.role == "hidden":
        std = hidden_std(run) / math.sqrt(m)
        writes = rule.name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = std / math.sqrt(2 * run.model.depth) if writes else std
        return Native(optimizer.lr / m, decay, optimizer.eps / m, std)
    if rule.role in ("embedding", "readout"):
        # Under muP the output layer starts by the embedding's std.
        return Native(optimizer.lr, decay, optimizer.eps, run.parametrization.init.embedding_std)
    return Native(optimizer.lr, 0.0, optimizer.eps, math.nan)


def differences(run: RunConfig) -> dict[str, list[str]]:
    """Field -> what Megatron gives otherwise than the run, tensor by tensor; layers are not told apart."""
    found: dict[str, list[str]] = {}
    for rule in tensor_rules(run):
        theirs = native(run, rule)
        kind = ".".join("*" if part.isdigit() else part for part in rule.name.split("."))
        for name in FIELDS:
            ours, given = getattr(rule, name), getattr(theirs, name)
            if (math.isnan(ours) and math.isnan(given)) or math.isclose(ours, given, rel_tol=1e-12):
                continue
            line = f"{name} of {kind}: the run's {ours:.4g}, Megatron's {given:.4g}"
            if line not in found.setdefault(name, []):
                found[name].append(line)
    return found


def faults(run: RunConfig, accept: Sequence[str]) -> list[Fault]:
    """Everything of `run` that Megatron's flags cannot express and that is not accepted."""
    found = shared_faults(run)
    kind, forward = run.parametrization.kind, forward_rules(run)
    m = run.model.width / run.base.width
    if (kind, run.parametrization.form) != ("mup", "table8"):
        found.append(Fault("parametrization", f"{kind} is not Megatron's muP, which is mup in form table8", "--form folded"))
    if (forward.attention_branch, forward.mlp_branch) != (1.0, 1.0):
        found.append(
            Fault("parametrization.residual_multiplier", "Megatron has no multiplier on residual branches", "--form folded")
        )
    if forward.readout == 1.0 and m != 1.0:
        what = f"makes the logits' multiplier 1, which --mup-output-mult takes as its default of 1 / {m:g}"
        found.append(Fault("parametrization.readout_multiplier", what, "another value"))
    unknown = [name for name in accept if name not in ACCEPTABLE]
    found += [Fault(f"--accept {name}", "cannot be accepted", f"one of {', '.join(ACCEPTABLE)}") for name in unknown]
    if not found:
        found += [
            Fault(name, lines[0] + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""), _cure(run, name))
            for name, lines in differences(run).items()
            if name not in accept
        ]
    return found


def shared_faults(run: RunConfig) -> list[Fault]:
    """What neither form can express."""
    found = llama_faults(run, "Megatron's Llama", qk_norm=True)
    if run.model.tied_embeddings:
        what = "is not written: embedding and readout have two multipliers"
        found.append(Fault("model.tied_embeddings", what, "set it to false"))
    if run.schedule.kind == "wsd" and run.schedule.decay_fraction == 0.0:
        found.append(Fault("schedule.decay_fraction", "is 0, which Megatron's WSD does not take", "use schedule.kind constant"))
    if run.model.rope_base != int(run.model.rope_base):
        near = max(1, round(run.model.rope_base))
        found.append(Fault("model.rope_base", "Megatron's --rotary-base is a whole number", f"--set model.rope_base={near}"))
    return found


def _cure(run: RunConfig, name: str) -> str:
    """The ways out for values that differ; of settings only those under which they no longer do."""
    if name == "eps":
        return "--accept eps (it acts where gradients are near eps), or --form folded"
    if name not in ACCEPTABLE:
        return "--form folded"
    settings = [f"--set {key}={value}" for key, value in _cured_by(run, name).items()]
    note = "(lr * decay falls with width)" if name == "weight_decay" else "(another init than was studied)"
    return ", ".join(["--form folded", *([f"{' '.join(settings)} {note}"] if settings else []), f"--accept {name}"])


def _cured_by(run: RunConfig, name: str) -> dict[str, Any]:
    """The fewest settings under which Megatron has the run's values of the field `name`; empty where none are known."""
    init = run.parametrization.init
    known: dict[str, Any] = {
        "parametrization.init.hidden_std": hidden_std(run),
        "parametrization.init.block_output": "depth_scaled",
        "parametrization.init.readout_std": init.embedding_std,
    }
    if name == "weight_decay":
        known = {"optimizer.weight_decay_rule": "unscaled"}
    for count in range(1, len(known) + 1):
        for keys in combinations(known, count):
            settings = {key: known[key] for key in keys}
            changed = _with(run, settings)
            if changed is not None and name not in differences(changed):
                return settings
    return {}


def _with(run: RunConfig, settings: dict[str, Any]) -> RunConfig | None:
    """The run with other values at dotted keys; None where there is no such run."""
    values = run.model_dump()
    for key, value in settings.items():
        *parts, last = key.split(".")
        inner = values
        for part in parts:
            inner = inner[part]
        inner[last] = value
    try:
        return RunConfig.model_validate(values)
    except ValidationError:
        return None


Flags = list[tuple[str, str | None]]
"""Flag and value in order; a flag without a value has None."""


def arguments(run: RunConfig, batch: Batch) -> Flags:
    """The flags of the form with --use-mup."""
    forward, m = forward_rules(run), run.model.width / run.base.width
    attention, optimizer = run.parametrization.attention_multiplier, carried(run)
    flags = shape_flags(run, batch) + training_flags(run, optimizer.lr, optimizer.weight_decay, optimizer.eps)
    flags += [
        ("--init-method-std", repr(hidden_std(run))),
        ("--embedding-init-method-std", repr(run.parametrization.init.embedding_std)),
        ("--use-mup", None),
        ("--mup-base-hidden-size", str(run.base.width)),
        ("--mup-base-head-dim", repr(run.base_model().head_size * attention**2)),
        ("--mup-embedding-mult", repr(forward.embedding)),
    ]
    if forward.readout * m != 1.0:
        flags.append(("--mup-output-mult", repr(forward.readout)))
    return flags


def shape_flags(run: RunConfig, batch: Batch) -> Flags:
    """What the model and a batch are, in either form."""
    model = run.model
    flags: Flags = [
        ("--num-layers", str(model.depth)),
        ("--hidden-size", str(model.width)),
        ("--ffn-hidden-size", str(model.mlp_width)),
        ("--num-attention-heads", str(model.heads)),
        ("--kv-channels", str(model.head_size)),
        ("--group-query-attention", None),
        ("--num-query-groups", str(model.kv_heads)),
        ("--swiglu", None),
        ("--normalization", "RMSNorm"),
        ("--norm-epsilon", "1e-06"),
        ("--disable-bias-linear", None),
        ("--untie-embeddings-and-output-weights", None),
        ("--position-embedding-type", "rope"),
        ("--rotary-base", str(int(model.rope_base))),
        ("--attention-dropout", "0.0"),
        ("--hidden-dropout", "0.0"),
        ("--seq-length", str(model.context)),
        ("--max-position-embeddings", str(model.context)),
        ("--micro-batch-size", str(batch.micro)),
        ("--global-batch-size", str(batch.sequences)),
    ]
    if model.qk_norm:
        flags.append(("--qk-layernorm", None))
    if run.training.precision != "fp32":
        flags.append((f"--{run.training.precision}", None))
    return flags


def training_flags(run: RunConfig, lr: float, weight_decay: float, eps: float) -> Flags:
    """Optimizer and schedule; lr, weight_decay and eps are those of tensors that nothing else is said of."""
    optimizer, schedule = carried(run), schedule_dict(run)
    flags: Flags = [
        ("--train-iters", str(schedule["steps"])),
        ("--optimizer", "adam"),
        ("--lr", repr(lr)),
        ("--min-lr", repr(lr * run.schedule.final_factor)),
        ("--lr-decay-style", {"wsd": "WSD"}.get(run.schedule.kind, run.schedule.kind)),
        ("--lr-decay-iters", str(schedule["steps"])),
        ("--lr-warmup-iters", str(schedule["warmup_steps"])),
        ("--weight-decay", repr(weight_decay)),
        ("--adam-beta1", repr(optimizer.beta1)),
        ("--adam-beta2", repr(optimizer.beta2)),
        ("--adam-eps", repr(eps)),
        ("--clip-grad", repr(optimizer.clip_norm or 0.0)),
    ]
    if run.schedule.kind == "wsd":
        decay_steps = schedule["steps"] - schedule["decay_start_step"]
        flags += [("--lr-wsd-decay-style", "linear"), ("--lr-wsd-decay-iters", str(decay_steps))]
    return flags


def script(flags: Flags) -> str:
    """The flags as a shell array, to be followed by those of data, tokenizer, layout and checkpoints."""
    lines = [f"  {flag}" if value is None else f"  {flag} {value}" for flag, value in flags]
    head = f'# {LEAST} or newer. Data, tokenizer, layout and checkpoints are yours to add: pretrain_gpt.py "${{MUTRANSFER[@]}}" ...\n'
    return head + "MUTRANSFER=(\n" + "\n".join(lines) + "\n)\n"


def warmup_note(run: RunConfig) -> str | None:
    """What Megatron's own schedule, which the folded form's recipe replaces, does otherwise than the run's, or None."""
    warmup = schedule_dict(run)["warmup_steps"]
    if not warmup:
        return None
    return f"Megatron's warm-up is one update late: update k (from 0) of {warmup} has k / {warmup} of the LR, the run's (k + 1) / {warmup}"


def export_files(run: RunConfig, batch: Batch) -> dict[str, str]:
    """File name -> content."""
    return {"megatron_arguments.sh": script(arguments(run, batch))}
