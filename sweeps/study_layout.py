"""Whether the runs of a study can be laid over processes as its `runtime.parallel` says: asked before the first of them is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from scaling.config import RunConfig
from scaling.config_file import ConfigSource, locate
from scaling.errors import ConfigError, Fault
from scaling.parallel import Layout, require_layout
from scaling.torchrun import started_by_torchrun, world_size
from sweeps.axes import AxisName
from sweeps.study import StudyConfig

DIVIDED: tuple[AxisName, ...] = ("batch_size", "depth")
"""Axes whose values a layout divides."""


def check_layout(config: StudyConfig, source: ConfigSource) -> None:
    """Raise ConfigError with everything that keeps a run of any of the study's widths and batches from the study's layout."""
    given = world_size(os.environ) if started_by_torchrun(os.environ) else None
    faults: list[Fault] = []
    for run in _extremes(config):
        try:
            require_layout(run, given)
        except ConfigError as error:
            faults += [replace(fault, where=_key(fault.where)) for fault in error.faults]
    if faults:
        raise locate(ConfigError(*dict.fromkeys(faults)), source)


def _extremes(config: StudyConfig) -> Iterator[RunConfig]:
    """Runs that differ in what a layout divides."""
    kind, low = next(iter(config.parametrizations)), config.log2_lr.low
    for width in config.widths:
        yield config.run(kind, width, low, 0)
    for name in DIVIDED:
        for value in config.axes[name].values or () if name in config.axes else ():
            yield config.run(kind, config.axis_widths(name)[0], low, 0, ((name, value),))


def _key(where: str) -> str:
    """The config's key for a place that a layout's fault names by an option of the command line."""
    name = where.removeprefix("--parallel").strip()
    if name in Layout.model_fields:
        return f"runtime.parallel.{name}"
    return "runtime.parallel" if where.startswith("--parallel") else where
