"""What the driver and a living worker add to training."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import yaml

from sweeps.driver import drive
from sweeps.plan_table import plan_document
from sweeps.progress import Watcher
from sweeps.study_dir import open_study

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "studies" / "quickstart.yaml"


def report() -> None:
    """Start-up of a trial in a living worker, and the driver's own time as a share of a quickstart."""
    study_config = yaml.safe_load(QUICKSTART.read_text())
    study_config |= {"name": "bench", "widths": [64], "target": None, "follow_up": {"margin_points": 0}, "seeds": 5}
    study_config["training"] = study_config["training"] | {"steps": 5, "validation_sequences": 16}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bench.yaml"
        config.write_text(yaml.safe_dump(study_config))
        study = open_study(config, Path(folder) / "study")
        cpu = time.process_time()
        outcome = drive(study.directory, study.config, 1, Watcher(1), study.data_arguments(), "bench")
        driver_s = (time.process_time() - cpu) / outcome.made
        plan = plan_document(open_study(QUICKSTART, Path(folder) / "quickstart"), 2, timing=True)
    first, *later = outcome.overhead_s
    quickstart_s = sum(row["seconds"] for row in plan["runs"])
    share = driver_s * plan["total"] / quickstart_s
    print(f"\ndriver and worker, {outcome.made} runs of 5 steps at width 64, one worker")
    print(
        f"  a living worker's start-up of a run   {1e3 * statistics.median(later):7.1f} ms median, {1e3 * max(later):.1f} max (target 50)"
    )
    print(f"  a new worker's first run              {1e3 * first:7.1f} ms (torch loads the rest of itself)")
    print(f"  driver's processor time a run         {1e3 * driver_s:7.1f} ms")
    print(
        f"  that, over the quickstart's training  {share:7.2%}    (target below 1 %; {plan['total']} runs, {quickstart_s:.0f} core seconds)"
    )
