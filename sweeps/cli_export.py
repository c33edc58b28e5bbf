"""`mutransfer export`: a run in the configuration of the engine that will train it."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaling.errors import ConfigError, Fault, raise_all
from sweeps.cli_common import DOTTED, NOT_OK, OK, answer, overrides

if TYPE_CHECKING:
    from scaling.config import RunConfig
    from scaling.exports.batch import Batch
    from scaling.exports.plan import Form

ENGINES = ("pytorch", "deepspeed", "hf", "torchtitan", "megatron", "olmo-core")
INSTALL = {
    "pytorch": 'pip install "torch>=2.6"',
    "deepspeed": "DS_BUILD_OPS=0 pip install deepspeed==0.19.8",
    "hf": "pip install transformers==5.24.0 accelerate==1.15.0",
    "torchtitan": "pip install torchtitan==0.3.0 triton",
    "megatron": "pip install megatron-core==0.19.2",
    "olmo-core": "pip install ai2-olmo-core==3.0.0",
}
"""What the files need where they are used; writing them needs none of it."""
MISSING = {
    "nanotron": "its muP is spectral, in units of its own, and it has one init std and no LR a tensor beside that",
    "gpt-neox": "its muP is the mup package's, by base shapes, and it has no LR or decay a tensor",
    "cerebras": "it has LR groups for three classes of matrices alone, and no eps or decay a tensor",
    "litgpt": "its training loop gives every parameter group one LR",
}
"""Engines that people ask for and that no export is written for, with what is known of them."""


@dataclass(frozen=True)
class Request:
    """What was asked beside the run."""

    form: Form | None
    devices: int
    micro: int | None
    zero: int | None
    settings: Mapping[str, Any]
    where: str
    accept: frozenset[str]


@dataclass(frozen=True)
class Export:
    """Files, and what a reader must know. differences: what the engine does otherwise than the run, and was accepted.

    replaceable: files that a user is told to put their own in place of.
    """

    files: Mapping[str, str]
    tensors: list[dict[str, Any]]
    caveats: list[str]
    differences: list[str]
    replaceable: tuple[str, ...] = ()


def register(app: typer.Typer) -> None:
    app.command("export", context_settings=DOTTED)(export_command)


def export_command(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A run's YAML file, such as a study's recommended.yaml.", show_default=False)],
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the files.", show_default=False)],
    form: Annotated[
        str | None,
        typer.Option(
            help="multipliers (your model, megatron's --use-mup or hf's Granite applies them) or folded; pytorch, deepspeed, megatron, hf."
            " Default: multipliers; hf folded.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="Data-parallel devices that share a batch.")] = 1,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences a device and forward pass.", show_default=False)
    ] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="deepspeed: ZeRO stage, default 1.", show_default=False)] = None,
    merge: Annotated[Path | None, typer.Option(help="deepspeed, hf: JSON of engine settings to add.", show_default=False)] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            help="megatron: write it although this differs (eps, weight_decay, init_std); exit code 1.", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a config key: --set a.b=value.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Write a run in the configuration of the engine that will train it: per-tensor LR, weight decay, eps and init."""
    from scaling.exports.folder import MANIFEST, Made, put
    from sweeps.cli_run import load_run

    _require_engine(engine)
    own, where = _settings(merge)
    request = Request(_form(form), devices, micro_batch, zero, own, where, frozenset(accept or []))
    _refuse_unused(engine, request)
    run = load_run(path, overrides(settings or [], context.args))
    export = WRITERS[engine](run, request)
    kept = put(out, Made(engine, run.run_id, export.files, export.replaceable))
    document = {
        "engine": engine,
        "run_id": run.run_id,
        "out": str(out),
        "files": sorted([*export.files, MANIFEST]),
        "kept": kept,
        "needs": INSTALL[engine],
        "caveats": export.caveats,
        "differences": export.differences,
        "tensors": export.tensors,
    }
    answer(document, lambda: _text(document), json)
    return NOT_OK if export.differences else OK


def _text(document: Mapping[str, Any]) -> str:
    lines = [f"{document['engine']}: {', '.join(document['files'])} in {document['out']}"]
    lines.append(f"  needs: {document['needs']}")
    lines += [f"  kept of yours: {name}, {how}" for name, how in document["kept"].items()]
    lines += [f"  note: {caveat}" for caveat in document["caveats"]]
    lines += [f"  DIFFERS: {difference}" for difference in document["differences"]]
    return "\n".join(lines)


def _require_engine(engine: str) -> None:
    if engine in ENGINES:
        return
    import difflib

    if engine.lower() in MISSING:
        what = f"no export is written for {engine}: {MISSING[engine.lower()]}"
        raise ConfigError(
            Fault(f"--engine {engine}", what, "--engine pytorch writes the plan that any engine's groups can be built from")
        )
    near = difflib.get_close_matches(engine, ENGINES, n=1)
    cure = f"did you mean {near[0]}? Engines: {', '.join(ENGINES)}" if near else f"one of {', '.join(ENGINES)}"
    raise ConfigError(Fault(f"--engine {engine}", "is unknown", cure))


def _form(text: str | None) -> Form | None:
    forms: dict[str, Form] = {"multipliers": "multipliers", "folded": "folded"}
    if text is None or text in forms:
        return None if text is None else forms[text]
    raise ConfigError(Fault(f"--form {text}", "is no form", "multipliers or folded"))


def _refuse_unused(engine: str, request: Request) -> None:
    """Options that the engine's export would ignore are errors."""
    used = {
        "form": ("pytorch", "deepspeed", "hf", "megatron"),
        "zero": ("deepspeed",),
        "settings": ("deepspeed", "hf"),
        "accept": ("megatron",),
    }
    names = {"settings": "merge"}
    faults = []
    for field, engines in used.items():
        value = getattr(request, field)
        if engine not in engines and (value is not None and value != {} and value != frozenset()):
            what = f"is for {', '.join(engines)}; the engine is {engine}"
            faults.append(Fault(f"--{names.get(field, field)}", what, "leave it out"))
    if engine == "pytorch" and (request.devices != 1 or request.micro is not None):
        faults.append(
            Fault("--devices, --micro-batch", "are train_fsdp.py's own options: --fsdp, --tp, --micro-batch", "leave them out")
        )
    raise_all(faults)


def _settings(merge: Path | None) -> tuple[dict[str, Any], str]:
    """The user's own engine settings, and where they stand."""
    if merge is None:
        return {}, "--merge"
    repeated: list[str] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        repeated.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    try:
        values = json_module.loads(merge.read_text(), object_pairs_hook=mapping)
    except OSError as error:
        raise ConfigError(Fault(f"--merge {merge}", f"cannot be read: {error.strerror}", "give a JSON file")) from None
    except ValueError as error:
        raise ConfigError(Fault(f"--merge {merge}", f"is no JSON: {error}", "give a JSON file")) from None
    if not isinstance(values, dict):
        raise ConfigError(Fault(f"--merge {merge}", "holds no mapping", "{...}"))
    faults = [Fault(f"{merge}: {name}", "stands there twice", "leave one out") for name in repeated]
    faults += [Fault(f"{merge}: {key}", f"is {value}, which JSON has not", "a number") for key, value in _not_finite(values)]
    raise_all(faults)
    return values, str(merge)


def _not_finite(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Key and value of numbers that Python's reader takes and JSON has not."""
    if isinstance(value, float) and not math.isfinite(value):
        yield key, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from _not_finite(each, f"{key}.{name}" if key else str(name))


def _checked(run: RunConfig, engine: str, optimizers: tuple[str, ...], faults: list[Fault]) -> None:
    from scaling.exports.plan import unsupported_optimizer

    reason = unsupported_optimizer(run, optimizers, engine)
    kind = [Fault("optimizer.kind", reason, "train it with mutransfer, or study adamw")] if reason else []
    raise_all(kind + faults)


def _batch(run: RunConfig, request: Request) -> Batch:
    from scaling.exports.batch import make_batch

    return make_batch(run, request.devices, request.micro)


def _pytorch(run: RunConfig, request: Request) -> Export:
    from scaling.exports import pytorch
    from scaling.exports.plan import caveats, make_plan

    _checked(run, "pytorch", pytorch.OPTIMIZERS, pytorch.faults(run))
    plan = make_plan(run, request.form or "multipliers")
    notes = caveats(plan, clips_by_plain_norm=False)
    if (kind := run.optimizer.kind) in pytorch.OWN_OPTIMIZERS:
        notes.append(
            f"{kind} is in lion_muon.py; train_fsdp.py is not written: {kind}'s updates of sharded tensors are not checked"
        )
    return Export(pytorch.training_files(plan), plan.to_dict()["tensors"], notes, [], pytorch.REPLACEABLE)


def _deepspeed(run: RunConfig, request: Request) -> Export:
    from scaling.exports import deepspeed
    from scaling.exports.plan import caveats, make_plan

    _checked(run, "deepspeed", deepspeed.OPTIMIZERS, [])
    plan = make_plan(run, request.form or "multipliers")
    stage = 1 if request.zero is None else request.zero
    files = deepspeed.export_files(plan, _batch(run, request), stage, request.settings, request.where)
    return Export(files, plan.to_dict()["tensors"], caveats(plan, clips_by_plain_norm=True), [])


def _hf(run: RunConfig, request: Request) -> Export:
    from scaling.exports import huggingface
    from scaling.exports.plan import caveats

    form = request.form or "folded"
    _checked(run, "hf", huggingface.OPTIMIZERS, huggingface.faults(run, form))
    files = huggingface.export_files(run, _batch(run, request), request.settings, request.where, form)
    plan = huggingface.plan_of(run, form)
    notes = (
        caveats(plan, clips_by_plain_norm=True)
        if form == "folded"
        else ["the model is Granite's: config.json has the multipliers"]
    )
    return Export(files, plan.to_dict()["tensors"], notes, [])


def _torchtitan(run: RunConfig, request: Request) -> Export:
    from scaling.exports import torchtitan
    from scaling.exports.plan import caveats

    _checked(run, "torchtitan", torchtitan.OPTIMIZERS, torchtitan.faults(run))
    plan = torchtitan.plan_of(run)
    notes = [*caveats(plan, clips_by_plain_norm=True), "written for torchtitan 0.3.0, without pipeline parallelism"]
    return Export(torchtitan.export_files(run, _batch(run, request)), plan.to_dict()["tensors"], notes, [])


def _olmo(run: RunConfig, request: Request) -> Export:
    from scaling.exports import olmo
    from scaling.exports.plan import caveats

    _checked(run, "olmo-core", olmo.OPTIMIZERS, olmo.faults(run))
    plan = olmo.plan_of(run)
    notes = [*caveats(plan, clips_by_plain_norm=True), *olmo.NOTES]
    return Export(olmo.export_files(run, _batch(run, request)), plan.to_dict()["tensors"], notes, [])


def _megatron(run: RunConfig, request: Request) -> Export:
    from scaling.exports import megatron
    from scaling.parametrization import tensor_rules

    if request.form == "folded":
        return _megatron_folded(run, request)
    _checked(run, "megatron", megatron.OPTIMIZERS, megatron.faults(run, sorted(request.accept)))
    found = [line for lines in megatron.differences(run).values() for line in lines]
    notes = ["--use-mup has one weight decay for all matrices and keeps eps of embedding, readout and gains"]
    notes += [late] if (late := megatron.warmup_note(run)) else []
    tensors = [rule.to_dict() | {"megatron": vars(megatron.native(run, rule))} for rule in tensor_rules(run)]
    return Export(megatron.export_files(run, _batch(run, request)), tensors, notes, found)


def _megatron_folded(run: RunConfig, request: Request) -> Export:
    from scaling.exports import megatron, megatron_folded
    from scaling.exports.plan import caveats

    if request.accept:
        what = "accepts what --use-mup does otherwise, and the folded form has every value"
        raise ConfigError(Fault(f"--accept {', '.join(sorted(request.accept))}", what, "leave it out"))
    _checked(run, "megatron", megatron.OPTIMIZERS, megatron_folded.faults(run))
    plan = megatron_folded.plan_of(run)
    notes = [*caveats(plan, clips_by_plain_norm=True), "written for megatron-core 0.19"]
    return Export(megatron_folded.export_files(run, _batch(run, request)), plan.to_dict()["tensors"], notes, [])


WRITERS: dict[str, Callable[[RunConfig, Request], Export]] = {
    "pytorch": _pytorch,
    "deepspeed": _deepspeed,
    "hf": _hf,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "olmo-core": _olmo,
}
