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
USUAL_SHARE: Mapping[Arithmetic, float] = MappingProxyType({"bf16": 0.80, "fp8": 0.71})
"""Of the peak in the best single product of a device that nobody measured: the H100's."""


@dataclass(frozen=True)
class Device:
    """One accelerator and the machine it usually stands in.

    peak_flops: at 16-bit, peak_fp8_flops: at 8-bit (NaN: none). memory_bytes: what the driver reports, or the data sheet's figure where
    that is smaller. link_bandwidth: to the devices of its node; network_bandwidth: to other nodes; memory_bandwidth: of its own memory.
    NaN: not stated. product_share, product_fp8_share: share of the peak that the best single matrix product was measured to reach
    (NaN: not measured).
    """

    name: str
    peak_flops: float
    memory_bytes: float
    link_bandwidth: float
    network_bandwidth: float
    source: str
    peak_fp8_flops: float = math.nan
    node_devices: int = 8
    memory_bandwidth: float = math.nan
    product_share: float = math.nan
    product_fp8_share: float = math.nan

    def peak(self, arithmetic: Arithmetic) -> float:
        """FLOP/s; NaN where the device has no such arithmetic."""
        return self.peak_fp8_flops if arithmetic == "fp8" else self.peak_flops

    def sustained(self, arithmetic: Arithmetic) -> float:
        """FLOP/s of the best single product: as measured, or the usual share of the peak where it was not."""
        measured = self.product_fp8_share if arithmetic == "fp8" else self.product_share
        return self.peak(arithmetic) * (USUAL_SHARE[arithmetic] if math.isnan(measured) else measured)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


NO_FP8 = math.nan
_RATES: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {
        "a100-40": (1.555, 271.2 / 312, math.nan),
        "a100": (2.039, 271.2 / 312, math.nan),
        "h100": (3.35, 794.5 / 989, 1402.6 / 1979),
        # Its own file places its real peak between 835 (H100 NVL) and 989 TFLOP/s (SXM): the middle.
        "h100-500w": (2.4, 794.5 / 989 * 912 / 989, 1402.6 / 1979 * 912 / 989),
        "h800": (3.35, 794.5 / 989, 1402.6 / 1979),
        "h200": (4.8, 794.5 / 989, 1402.6 / 1979),
        "b200": (8.0, 1745.0 / 2250, math.nan),
        "mi300x": (5.3, 668.4 / 1307, math.nan),
    }
)
"""TB/s of the device's memory by its data sheet, and the measured share of the peak in the best single product, 16 and 8 bit.

Shares: "maximum achievable matmul FLOPS" of stas00/ml-engineering (compute/accelerator), torch 2.5 to 2.7; h800 and h200 are the same chip
as the h100.
"""


def _device(
    name: str, peak: float, fp8: float, memory_gib: float, link: float, network: float, source: str, node: int = 8
) -> Device:
    """TFLOP/s, GiB and GB/s, as data sheets write them."""
    bandwidth, share, fp8_share = _RATES[name]
    rates = {"memory_bandwidth": bandwidth * 1e12, "product_share": share, "product_fp8_share": fp8_share}
    return Device(name, peak * 1e12, memory_gib * GIB, link * 1e9, network * 1e9, source, fp8 * 1e12, node, **rates)


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
                "h100-500w",
                989,
                1979,
                89.4,
                450,
                50,
                "torchtitan's H100: 96 GB of HBM2e, power limit of 500 W (benchmarks/llama3_h100_202412); network 400 Gb/s a GPU",
            ),
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
    memory_gb_s: float | None = None,
    node_devices: int | None = None,
) -> Device:
    """The device `name`; what is given replaces what is listed.

    peak_tflops: dense, at the arithmetic that the run uses; memory_gib: usable; link_gb_s, network_gb_s: GB/s, one direction;
    memory_gb_s: GB/s of its memory.
    Raises ConfigError, naming all that is missing, for a device that is not listed and whose peak or memory is not given.
    """
    key = name.lower()
    bandwidths = {"link_gb_s": link_gb_s, "network_gb_s": network_gb_s, "memory_gb_s": memory_gb_s}
    raise_all(_not_positive(peak_tflops=peak_tflops, memory_gib=memory_gib, **bandwidths), ConfigError)
    known = DEVICES.get(key)
    if known is None:
        raise_all(_missing(name, peak_tflops, memory_gib), ConfigError)
        known = Device(key, math.nan, math.nan, math.nan, math.nan, "as given", node_devices=8)
    changes: dict[str, Any] = {}
    if peak_tflops is not None:
        changes |= {"peak_flops": peak_tflops * 1e12, "peak_fp8_flops": peak_tflops * 1e12}
    if memory_gib is not None:
        changes["memory_bytes"] = memory_gib * GIB
    changes |= {key.replace("gb_s", "bandwidth"): 1e9 * value for key, value in bandwidths.items() if value is not None}
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
