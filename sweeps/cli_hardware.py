"""`mutransfer layout`: how a large run may be spread over devices, which layouts fit, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scaling.errors import ConfigError, Fault, raise_all
from sweeps.cli_common import DOTTED, NOT_OK, OK, answer, overrides

if TYPE_CHECKING:
    from analysis.hardware import Device
    from analysis.layouts import LayoutSearch
    from scaling.config import RunConfig

Given = typer.Option(min=1, show_default=False)


def register(app: typer.Typer) -> None:
    app.command("layout", context_settings=DOTTED)(layout_command)


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
    node_gpus: Annotated[int | None, typer.Option(help="Devices of a node; default 8.", min=1, show_default=False)] = None,
    show: Annotated[int, typer.Option(help="Layouts that are listed.", min=1, max=1000)] = 10,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the run: --set a.b=c.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Which layouts of a run fit on the devices, ranked by speed: memory by term, communication, pipeline bubble, MFU, hours."""
    from analysis.hardware import device_called
    from analysis.layouts import LayoutSearch, search_layouts
    from scaling.config import RunConfig
    from scaling.config_file import load_config

    config = load_config(run, RunConfig, overrides(settings or [], context.args))
    bandwidths = {"link_gb_s": link_gb_s, "network_gb_s": network_gb_s, "node_devices": node_gpus}
    found = device_called(device, peak_tflops=peak_tflops, memory_gib=memory_gib, **bandwidths)  # type: ignore[arg-type]
    kind = _arithmetic(arithmetic, found)
    known = _known(config, run, sharding, checkpointing)
    search = LayoutSearch(tp, pp, cp, dp, micro_batch, virtual_stages, **known)
    _possible(config, search, gpus, found)
    plan = search_layouts(config.model, found, gpus, config.training.batch_size, config.tokens, search, kind)
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


def _possible(config: RunConfig, search: LayoutSearch, gpus: int, device: Device) -> None:
    """Raise ConfigError with everything that makes the given sizes impossible, whatever the others are."""
    from analysis.layouts import fixed_faults

    faults = fixed_faults(config.model, search, gpus, config.training.batch_size, device.node_devices)
    raise_all(faults, ConfigError)
