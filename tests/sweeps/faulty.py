"""A study to do faults to, in real processes: on this machine's journal, or on a board in a database. Counts what is left afterwards.

Shared by the tests of faults and by the table that `python -m tests.bench --only faults` prints.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaling.config_file import load_config
from scaling.records import read_metrics, read_records
from sweeps.plan import make_plan
from sweeps.study import StudyConfig
from sweeps.study_dir import STUDY_FILE
from tests.sweeps.studies import write_study

ROOT = Path(__file__).parents[2]
# A run of about half a second: kills fall into runs.
TRAINING = {"steps": 150, "batch_size": 4, "validation_sequences": 8}

# Everything in Python that asks for the time of day; what times the training does not.
WRONG_CLOCK = """
import datetime, time
real, real_ns = time.time, time.time_ns
time.time, time.time_ns = (lambda: real() + {off_s}), (lambda: real_ns() + int({off_s} * 1e9))
class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = Clock
from sweeps.cli import main
main()
"""


@dataclass(frozen=True)
class Audit:
    """What a study holds once it was made to its end after faults."""

    planned: int
    kept: int
    """Of the runs that were finished when a fault was done: their records are, byte for byte, those of then."""
    lost: int
    """Records that were there when a fault was done and are not, or others, and planned runs without a result."""
    twice: int
    """Results entered more than once, unplanned runs, and metrics that name a step twice."""
    wrong: int
    """Losses that differ from those of a study that nobody disturbed."""

    @property
    def exact(self) -> bool:
        return not (self.lost or self.twice or self.wrong)


def heed_ctrl_c() -> None:
    """A shell starts background jobs with SIGINT ignored, and their children inherit it: this may run in one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Victim:
    """One small study in `folder`, and the processes that work on it."""

    folder: Path
    url: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    seen: dict[str, bytes] = field(default_factory=dict)
    """run_id -> record.json of the runs that were finished at some fault."""
    said: str = ""
    """What all its commands have written."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.directory = self.folder / "study"
        changes = {"training": TRAINING, "widths": [16], **self.changes}
        self.config = write_study(self.folder, **changes | ({"storage": self.url} if self.url else {}))

    def start(
        self, *arguments: str | Path, clock_off_s: float = 0.0, prepare: Callable[[], None] = heed_ctrl_c
    ) -> subprocess.Popen[str]:
        """A mutransfer command in a process of its own. clock_off_s: how wrong its clock is; prepare: called in it first."""
        head = ["-c", WRONG_CLOCK.format(off_s=clock_off_s)] if clock_off_s else ["-m", "sweeps.cli"]
        return subprocess.Popen(
            [sys.executable, *head, *map(str, arguments)],
            cwd=ROOT,
            preexec_fn=prepare,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process: subprocess.Popen[str], seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for a command and note what it said."""
        out, err = process.communicate(timeout=seconds)
        self.said += out + err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def call(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.end(self.start(*arguments))

    def run(self, *options: str) -> list[str | Path]:
        """Arguments of the command that makes this study on this machine."""
        return ["run", self.config, "--out", self.directory, *(options or ("--jobs", "2"))]

    def records(self) -> dict[str, bytes]:
        return {path.parent.name: path.read_bytes() for path in (self.directory / "runs").glob("*/record.json")}

    def remember(self) -> None:
        """A fault is done now: what is finished must stay."""
        self.seen |= self.records()

    def audit(self, quiet: Mapping[str, float | None]) -> Audit:
        """Count, with the losses of a study that nobody disturbed."""
        study = load_config(self.directory / STUDY_FILE, StudyConfig)
        records = {record.run_id: record for record in read_records(self.directory)}
        planned = {item.run_id for item in make_plan(study, records)}
        now = self.records()
        kept = sum(now.get(run_id) == content for run_id, content in self.seen.items())
        entered = Counter(self._trials())
        again = 0
        for run_id in planned & set(records):
            steps = [row["step"] for row in read_metrics(self.directory / "runs" / run_id / "metrics.jsonl") if "loss" in row]
            again += steps != sorted(set(steps))
        unplanned = set(entered) - planned
        return Audit(
            planned=len(planned),
            kept=kept,
            lost=len(self.seen) - kept + len(planned - set(records)) + len(planned - set(entered)),
            twice=sum(count - 1 for count in entered.values()) + again + len(unplanned),
            wrong=sum(record.loss != quiet.get(run_id, record.loss) for run_id, record in records.items())
            + len(set(quiet) ^ planned),
        )

    def _trials(self) -> list[str]:
        """run_id of each result in the Optuna study."""
        import optuna

        if self.url is None:
            from sweeps.queue import Queue

            trials = Queue(self.directory, load_config(self.directory / STUDY_FILE, StudyConfig)).trials()
        else:
            from sweeps.board import with_driver

            storage = optuna.storages.RDBStorage(with_driver(self.url))
            trials = optuna.load_study(study_name="small", storage=storage).get_trials()
            storage.remove_session()
            storage.engine.dispose()
        return [trial.user_attrs["run_id"] for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]


def quiet_losses(folder: Path, **changes: Any) -> dict[str, float | None]:
    """run_id -> loss of the same study that nobody disturbs."""
    victim = Victim(folder, changes=changes)
    done = victim.call(*victim.run())
    assert done.returncode == 0, done.stderr
    return {record.run_id: record.loss for record in read_records(victim.directory)}


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    """Raises TimeoutError when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid` and that make runs: workers of a pool."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and ("spawn_main" in command or "\0worker\0" in command):
            found.append(int(entry.name))
    return found
