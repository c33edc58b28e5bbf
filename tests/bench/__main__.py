"""`make bench`: what a study costs beside its training, and which way of training is fastest; ratios within one run.

Prints tables; asserts nothing, since machines differ. Targets stand beside the figures.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bench import (
    board,
    building,
    coordinates,
    driver,
    faults,
    fits,
    layouts,
    noise_scale,
    products,
    pruning,
    rank_kills,
    schedules,
    search,
    shard_writes,
    status,
    throughput,
    transfer,
    variants,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "--only",
        choices=(
            "driver",
            "workers",
            "variants",
            "coord",
            "search",
            "board",
            "status",
            "faults",
            "rank-kills",
            "agent-kill",
            "shard-writes",
            "layout-optima",
            "layout-bf16",
            "layout-speeds",
            "layout-building",
            "pruning",
            "products",
            "throughput",
            "fits",
            "transfer",
            "schedules",
            "noise-scale",
        ),
        help="one benchmark instead of all",
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256], help="widths of the variants")
    parser.add_argument("--repeats", type=int, default=1, help="simulated studies of every kind for the search, 39 at each noise")
    parser.add_argument(
        "--grid", type=Path, help="folder that keeps the trained grid of the early-stopping bench, for the next time"
    )
    arguments = parser.parse_args()
    if arguments.only in (None, "driver"):
        driver.report()
    if arguments.only in (None, "workers"):
        variants.report_workers()
    if arguments.only in (None, "coord"):
        coordinates.report()
    if arguments.only in (None, "board"):
        board.report()
    if arguments.only in (None, "schedules"):
        schedules.report()
    if arguments.only in (None, "products"):
        products.report()
    if arguments.only in (None, "status"):
        status.report()
    # Half an hour of kills, and no ratio: not among the benchmarks that run by themselves.
    if arguments.only == "faults":
        faults.report(seed=int(os.environ.get("KILL_SEED", "0")))
    if arguments.only == "rank-kills":
        rank_kills.report(seed=int(os.environ.get("KILL_SEED", "0")))
    if arguments.only == "agent-kill":
        rank_kills.report_two_agents()
    if arguments.only in (None, "shard-writes"):
        shard_writes.report()
    if arguments.only in (None, "layout-optima"):
        layouts.report_optima()
    if arguments.only in (None, "layout-bf16"):
        layouts.report_bf16()
    if arguments.only in (None, "layout-speeds"):
        layouts.report_speeds()
    if arguments.only in (None, "layout-building"):
        building.report()
    if arguments.only in (None, "search"):
        search.report(arguments.repeats)
    if arguments.only in (None, "pruning"):
        pruning.report(arguments.grid)
    if arguments.only in (None, "fits"):
        fits.report()
    if arguments.only in (None, "transfer"):
        transfer.report()
    if arguments.only in (None, "noise-scale"):
        noise_scale.report()
    if arguments.only in (None, "throughput"):
        throughput.report()
    if arguments.only in (None, "variants"):
        variants.report_variants(arguments.widths)


if __name__ == "__main__":
    main()
