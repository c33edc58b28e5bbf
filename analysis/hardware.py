"""Devices that a large run may use: peak, memory and bandwidths, each with its source. Torch-free.

Owns Device and the list of known ones. Nothing is assumed about a device that is not listed: its peak and memory must be given.
Peaks are dense, without sparsity, in FLOP/s; bandwidths are bytes/s of one device in one direction.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from scaling.errors import ConfigError, Fault, raise_all

GIB = float(2**30)
Arithmetic = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class Device:
    """One accelerator and the machine it usually stands in.

    peak_flops: at 16-bit, peak_fp8_flops: at 8-bit (NaN: none). memory_bytes: what the driver reports, or the data sheet's figure where
    that is smaller. link_bandwidth: to the devices of its node; network_bandwidth: to other nodes. NaN: not stated.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    link_bandwidth: float
    network_bandwidth: float
    source: str
    peak_fp8_flops: float = math.nan
    node_devices: int = 8

    def peak(self, arithmetic: Arithmetic) -> float:
        """FLOP/s; NaN where the device has no such arithmetic."""
        return self.peak_fp8_flops if arithmetic == "fp8" else self.peak_flops

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _device(
    name: str, peak: float, fp8: float, memory_gib: float, link: float, network: float, source: str, node: int = 8
) -> Device:
    """TFLOP/s, GiB and GB/s, as data sheets write them."""
    return Device(name, peak * 1e12, memory_gib * GIB, link * 1e9, network * 1e9, source, fp8 * 1e12, node)


NO_FP8 = math.nan
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _device(
                "a100-40", 312, NO_FP8, 39.4, 300, 25, "NVIDIA A100 SXM4 40 GB data sheet; network of a DGX A100, 200 Gb/s a GPU"
            ),
            _device(
                "a100", 312, NO_FP8, 79.2, 300, 25, "NVIDIA A100 SXM4 80 GB data sheet; network of a DGX A100, 200 Gb/s a GPU"
            ),
            _device("h100", 989, 1979, 79.1, 450, 50, "NVIDIA H100 SXM5 80 GB data sheet; network of a DGX H100, 400 Gb/s a GPU"),
            _device(
                "h800", 989, 1979, 79.1, 200, 50, "NVIDIA H800 SXM5: an H100 with NVLink of 400 GB/s; network 400 Gb/s a GPU"
            ),
            _device("h200", 989, 1979, 139.8, 450, 50, "NVIDIA H200 SXM data sheet; network of a DGX H200, 400 Gb/s a GPU"),
            _device("b200", 2250, 4500, 167.6, 900, 50, "NVIDIA DGX B200 data sheet, 180 GB a GPU; network 400 Gb/s a GPU"),
            _device("mi300x", 1307, 2615, 178.8, 448, 50, "AMD Instinct MI300X data sheet, 192 GB; network 400 Gb/s a GPU"),
        )
    }
)
"""By the name that is typed."""


def device_called(
    name: str,
    *,
    peak_tflops: float | None = None,
    memory_gib: float | None = None,
    link_gb_s: float | None = None,
    network_gb_s: float | None = None,
    node_devices: int | None = None,
) -> Device:
    """The device `name`; what is given replaces what is listed.

    peak_tflops: dense, at the arithmetic that the run uses; memory_gib: usable; link_gb_s, network_gb_s: GB/s, one direction.
    Raises ConfigError, naming all that is missing, for a device that is not listed and whose peak or memory is not given.
    """
    key = name.lower()
    wrong = _not_positive(peak_tflops=peak_tflops, memory_gib=memory_gib, link_gb_s=link_gb_s, network_gb_s=network_gb_s)
    raise_all(wrong, ConfigError)
    known = DEVICES.get(key)
    if known is None:
        raise_all(_missing(name, peak_tflops, memory_gib), ConfigError)
        known = Device(key, math.nan, math.nan, math.nan, math.nan, "as given", node_devices=8)
    changes: dict[str, Any] = {}
    if peak_tflops is not None:
        changes |= {"peak_flops": peak_tflops * 1e12, "peak_fp8_flops": peak_tflops * 1e12}
    if memory_gib is not None:
        changes["memory_bytes"] = memory_gib * GIB
    if link_gb_s is not None:
        changes["link_bandwidth"] = link_gb_s * 1e9
    if network_gb_s is not None:
        changes["network_bandwidth"] = network_gb_s * 1e9
    if node_devices is not None:
        changes["node_devices"] = node_devices
    if changes and key in DEVICES:
        changes["source"] = f"{known.source}; as given: {', '.join(changes)}"
    return replace(known, **changes)


def budget_flops(gpu_hours: float, device: Device, mfu: float, arithmetic: Arithmetic = "bf16") -> float:
    """FLOP that so many hours of one device do at this share of its peak."""
    return gpu_hours * 3600.0 * device.peak(arithmetic) * mfu


def _not_positive(**given: float | None) -> list[Fault]:
    return [
        Fault(f"--{key.replace('_', '-')}", f"{value:g} is no positive number")
        for key, value in given.items()
        if value is not None and not (math.isfinite(value) and value > 0)
    ]


def _missing(name: str, peak_tflops: float | None, memory_gib: float | None) -> list[Fault]:
    near = difflib.get_close_matches(name.lower(), DEVICES, n=1)
    known = f"{f'did you mean {near[0]!r}? ' if near else ''}known: {', '.join(DEVICES)}"
    needed = {
        "--peak-tflops": (peak_tflops, "its dense peak, from its data sheet"),
        "--memory-gib": (memory_gib, "its usable memory, as its driver reports it"),
    }
    return [
        Fault(f"--device {name}", f"is not a known device, and {option} is not given", f"{option} NUMBER ({what}); {known}")
        for option, (value, what) in needed.items()
        if value is None
    ]
