"""`mutransfer layout`: which layouts of a large run fit on given devices, and how long they take; `mutransfer budget`: the size and
the tokens that a budget of FLOP or of device hours is best spent on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scaling.errors import ConfigError, Fault, raise_all
from sweeps.cli_common import DOTTED, NOT_OK, OK, answer, messages, overrides

if TYPE_CHECKING:
    from analysis.hardware import Device
    from analysis.layouts import LayoutSearch
    from scaling.config import RunConfig
    from scaling.model_config import ModelConfig


def register(app: typer.Typer) -> None:
    app.command("layout", context_settings=DOTTED)(layout_command)
    app.command("budget")(budget_command)


def layout_command(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The large run's config, such as recommended.yaml.", show_default=False)],
    gpus: Annotated[int, typer.Option(help="How many devices there are.", min=1, max=2**20, show_default=False)],
    device: Annotated[str, typer.Option(help="h100, a100, h200, ...; another needs --peak-tflops and --memory-gib.")],
    tp: Annotated[int | None, typer.Option(help="Tensor parallel; default: searched.", min=1, show_default=False)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages; default: searched.", min=1, show_default=False)] = None,
    cp: Annotated[int | None, typer.Option(help="Context parallel; default: searched.", min=1, show_default=False)] = None,
    dp: Annotated[int | None, typer.Option(help="Data parallel; default: what is left.", min=1, show_default=False)] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences a forward pass; default: searched.", min=1, show_default=False)
    ] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Model parts a pipeline stage; default: searched.", min=1, show_default=False)
    ] = None,
    sharding: Annotated[
        list[str] | None, typer.Option(help="zero0 to zero3, fsdp, megatron, megatron-dist, megatron-fsdp.", show_default=False)
    ] = None,
    checkpointing: Annotated[
        list[str] | None, typer.Option(help="none, selective, selective-op or full.", show_default=False)
    ] = None,
    arithmetic: Annotated[str, typer.Option(help="Of matrix products: bf16 or fp8.")] = "bf16",
    peak_tflops: Annotated[
        float | None, typer.Option(help="Dense peak of a device, TFLOP/s at this arithmetic.", show_default=False)
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Usable memory of a device, GiB.", show_default=False)] = None,
    link_gb_s: Annotated[
        float | None, typer.Option(help="To devices of its node, GB/s in one direction.", show_default=False)
    ] = None,
    network_gb_s: Annotated[float | None, typer.Option(help="To other nodes, GB/s in one direction.", show_default=False)] = None,
    memory_gb_s: Annotated[float | None, typer.Option(help="Of a device's own memory, GB/s.", show_default=False)] = None,
    ep: Annotated[
        int | None, typer.Option(help="Expert parallel, within dp x cp; default: searched.", min=1, show_default=False)
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Experts in place of each MLP; with --top-k and --expert-width.", min=1, show_default=False)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts that a token goes through.", min=1, show_default=False)] = None,
    expert_width: Annotated[int | None, typer.Option(help="MLP width of an expert.", min=1, show_default=False)] = None,
    shared_width: Annotated[
        int | None, typer.Option(help="MLP width that every token goes through beside them.", min=1, show_default=False)
    ] = None,
    fused: Annotated[
        bool, typer.Option("--fused/--unfused", help="Norms, rotary positions and gates a kernel each (compiled).")
    ] = True,
    node_gpus: Annotated[int | None, typer.Option(help="Devices of a node; default 8.", min=1, show_default=False)] = None,
    show: Annotated[int, typer.Option(help="Layouts that are listed.", min=1, max=1000)] = 10,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the run: --set a.b=c.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Which layouts of a run fit on the devices, ranked by speed: memory by term, communication, pipeline bubble, MFU, hours."""
    from analysis.hardware import device_called
    from analysis.layout_of_run import plan_of_run, search_of_run
    from analysis.layouts import LayoutSearch
    from scaling.config import RunConfig
    from scaling.config_file import load_config
    from sweeps.recommended_from import check_origin

    config = load_config(run, RunConfig, overrides(settings or [], context.args))
    if note := check_origin(config, run):
        messages().print(note, markup=False, highlight=False)
    bandwidths = {"link_gb_s": link_gb_s, "network_gb_s": network_gb_s, "memory_gb_s": memory_gb_s, "node_devices": node_gpus}
    found = device_called(device, peak_tflops=peak_tflops, memory_gib=memory_gib, **bandwidths)  # type: ignore[arg-type]
    experts_asked = {"experts": experts, "top_k": top_k, "expert_width": expert_width, "shared_width": shared_width}
    kind = _arithmetic(arithmetic, found)
    known = _known(config, run, sharding, checkpointing)
    model = _with_experts(config.model, experts_asked)
    search = LayoutSearch(tp, pp, cp, dp, micro_batch, virtual_stages, **known, ep=ep, fused=fused)
    _possible(model, config.training.batch_size, search_of_run(config, search), gpus, found)
    plan = plan_of_run(config, model, found, gpus, search, kind)
    answer(plan.to_dict(show), lambda: plan.text(show), json)
    return OK if plan.ranked and plan.ranked[0].fits == "yes" else NOT_OK


def _arithmetic(text: str, device: Device) -> Literal["bf16", "fp8"]:
    if text not in ("bf16", "fp8"):
        raise ConfigError(Fault(f"--arithmetic {text}", "is neither bf16 nor fp8"))
    kind: Literal["bf16", "fp8"] = "fp8" if text == "fp8" else "bf16"
    if not device.peak(kind) > 0:
        raise ConfigError(Fault(f"--arithmetic {text}", f"{device.name} has no {text} arithmetic", "--arithmetic bf16"))
    return kind


def _known(config: RunConfig, run: Path, sharding: Sequence[str] | None, kept: Sequence[str] | None) -> dict[str, Any]:
    """Shardings and kinds of checkpointing that were asked for. Raises ConfigError for unknown ones, and for an unknown vocabulary."""
    from analysis.memory_plan import CHECKPOINTING, SCHEMES

    faults = []
    for option, given, names in (("--sharding", sharding, tuple(SCHEMES)), ("--checkpointing", kept, CHECKPOINTING)):
        for text in given or ():
            if text not in names:
                faults.append(Fault(f"{option} {text}", "is not known", f"one of {', '.join(names)}"))
    if config.model.vocab_size is None:
        faults.append(
            Fault(f"{run}: model.vocab_size", "is not given, and no data is read here", "--set model.vocab_size=NUMBER")
        )
    raise_all(faults, ConfigError)
    asked = {"shardings": tuple(sharding or ()), "checkpointing": tuple(kept or ())}
    return {name: value for name, value in asked.items() if value}


def _with_experts(model: ModelConfig, asked: dict[str, int | None]) -> ModelConfig:
    """The model, with experts where they are asked for. Raises ConfigError for half a question, and for sizes that do not go together."""
    from analysis.layout_experts import with_experts

    given = {name: value for name, value in asked.items() if value is not None}
    if not given:
        return model
    needed = ("experts", "top_k", "expert_width")
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in given]
    raise_all([Fault(option, "is needed for a model with experts", f"{option} NUMBER") for option in missing], ConfigError)
    if given["top_k"] > given["experts"]:
        what = f"is more than the {given['experts']} experts"
        raise ConfigError(Fault(f"--top-k {given['top_k']}", what, f"{given['experts']} at most"))
    return with_experts(model, **given)


def _possible(model: ModelConfig, batch_size: int, search: LayoutSearch, gpus: int, device: Device) -> None:
    """Raise ConfigError with everything that makes the given sizes impossible, whatever the others are."""
    from analysis.layouts import fixed_faults

    raise_all(fixed_faults(model, search, gpus, batch_size, device.node_devices), ConfigError)


def budget_command(
    table: Annotated[Path, typer.Argument(help="A study directory, or a CSV/Parquet table of runs.", show_default=False)],
    flops: Annotated[float | None, typer.Option(help="The budget, FLOP (6 N D).", show_default=False)] = None,
    gpu_hours: Annotated[float | None, typer.Option(help="Or in hours of one device, all together.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="With --gpu-hours: h100, a100, ...", show_default=False)] = None,
    mfu: Annotated[
        float | None, typer.Option(help="With --gpu-hours: share of the peak; measure it, or see `layout`.", show_default=False)
    ] = None,
    arithmetic: Annotated[str | None, typer.Option(help="With --gpu-hours: bf16 (default) or fp8.", show_default=False)] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="Dense peak of an unlisted device.", show_default=False)] = None,
    law: Annotated[str, typer.Option(help="The scaling law that is fitted and split, as for `fit`.")] = "chinchilla",
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="Name of a column: --column params=N.", show_default=False)
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", help="Rows to keep: --where 'loss<4'.", show_default=False)
    ] = None,
    parametrization: Annotated[str | None, typer.Option(help="Only runs of this one.", show_default=False)] = None,
    params_include: Annotated[
        str | None, typer.Option(help="What params count: embedding or non-embedding.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """The compute-optimal size and tokens of a budget, with intervals, by a scaling law fitted to a table of runs."""
    from analysis.fit import fit
    from analysis.hardware import budget_flops, device_called

    needed = {"--device": device, "--mfu": mfu}
    more = {"--arithmetic": arithmetic, "--peak-tflops": peak_tflops}
    raise_all(_budget_faults(flops, gpu_hours, needed, more, columns or ()), ConfigError)
    how = "as given"
    if gpu_hours is not None and device is not None and mfu is not None:
        # Memory is not read here, and need not be given.
        found = device_called(device, peak_tflops=peak_tflops, memory_gib=1.0)
        kind = _arithmetic(arithmetic or "bf16", found)
        flops = budget_flops(gpu_hours, found, mfu, kind)
        how = f"{gpu_hours:g} hours of {found.name} at {mfu:.0%} of its {kind} peak [{found.source}]"
    assert flops is not None, "one of the two is given"
    pairs = dict(text.split("=", 1) for text in columns or ())
    result = fit(table, law, columns=pairs, where=where or (), params_include=params_include, parametrization=parametrization)
    split = result.optimal(flops)
    document = {"budget_flops": flops, "budget": how, "optimal": split.to_dict(), "fit": result.to_dict()}
    document |= {"trusted": result.trusted and not split.flags, "flags": [*result.flags, *split.flags]}
    text = f"budget {flops:.4g} FLOP, counted as 6 N D: {how}\n{split}\n\n{result}"
    answer(document, text, json)
    return OK if document["trusted"] else NOT_OK


def _budget_faults(
    flops: float | None, hours: float | None, needed: dict[str, Any], more: dict[str, Any], columns: Sequence[str]
) -> list[Fault]:
    """needed, more: options that hours must, and may, come with."""
    faults = []
    if (flops is None) == (hours is None):
        faults.append(Fault("--flops, --gpu-hours", "one of the two is the budget", "give --flops or --gpu-hours, not both"))
    for option, value in {"--flops": flops, "--gpu-hours": hours, "--mfu": needed["--mfu"]}.items():
        if value is not None and not 0 < value < float("inf"):
            faults.append(Fault(f"{option} {value:g}", "is no positive number"))
    if needed["--mfu"] is not None and needed["--mfu"] > 1:
        faults.append(Fault(f"--mfu {needed['--mfu']:g}", "is more than the peak", "a share: 0.4 is 40 %"))
    cures = {"--device": "--device h100", "--mfu": "--mfu 0.4, as measured, or as `mutransfer layout` expects"}
    if hours is not None:
        missing = [option for option, value in needed.items() if value is None]
        faults += [Fault(option, "is needed to turn hours into FLOP", cures[option]) for option in missing]
    else:
        unread = [option for option, value in (needed | more).items() if value is not None]
        faults += [Fault(option, "says what an hour is worth, and no hours are given", "leave it out") for option in unread]
    names = [text.partition("=")[0] for text in columns]
    faults += [
        Fault(f"--column {text}", "is not of the form NAME=COLUMN", "--column params=N") for text in columns if "=" not in text
    ]
    faults += [Fault(f"--column {name}", "is given twice", "leave one out") for name in {n for n in names if names.count(n) > 1}]
    return faults
