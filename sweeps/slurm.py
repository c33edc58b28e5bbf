"""Workers of a shared study as a SLURM job array, through submitit; the same on this machine for a trial.

Owns the job and its submission. A task is a worker (`sweeps.fleet.work`). When SLURM pre-empts it, its run goes back to the board at once
and the task is requeued; with `runtime.checkpoint_every_steps` and a shared folder the run goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scaling.errors import ConfigError, Fault, MissingExtra, StudyError
from sweeps.study_dir import Study

if TYPE_CHECKING:
    from submitit import AutoExecutor
    from submitit.helpers import DelayedSubmission

Cluster = Literal["slurm", "local"]
REQUEUES = 1000
"""A worker may be pre-empted or run out of its time as often: each time it has made some runs."""


@dataclass(frozen=True)
class Submission:
    """What is asked of the cluster, for each worker."""

    workers: int
    cluster: Cluster = "slurm"
    minutes: int = 240
    cpus: int = 1
    gpus: int = 0
    memory_gb: float = 8
    extra: Mapping[str, Any] = field(default_factory=dict)
    """submitit's own parameters, such as slurm_partition."""


class WorkerJob:
    """One task of the array: pickled where it is submitted, called where it runs, asked what to do when it is told to go."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory.resolve())

    def __call__(self) -> int:
        from sweeps.fleet import work
        from sweeps.study_dir import find_study

        return work(find_study(Path(self.directory)), lambda text: print(text, flush=True))

    def checkpoint(self) -> DelayedSubmission:
        """submitit's hook, called in the task: give the run back, and come again."""
        from submitit.helpers import DelayedSubmission

        from sweeps.fleet import board_of
        from sweeps.study_dir import find_study

        board_of(find_study(Path(self.directory))).give_back_of(platform.node(), os.getpid())
        return DelayedSubmission(WorkerJob(Path(self.directory)))


def submit(study: Study, submission: Submission) -> list[str]:
    """Submit the array and return its jobs' ids. Raises StudyError without a database or SLURM, ConfigError for what submitit refuses."""
    from sweeps.fleet import board_of, enter

    board = board_of(study)
    enter(study, board)
    board.close()
    executor = _executor(study, submission)
    with executor.batch():
        jobs = [executor.submit(WorkerJob(study.directory)) for _ in range(submission.workers)]
    return [str(job.job_id) for job in jobs]


def script(study: Study, submission: Submission) -> str:
    """The sbatch script that `submit` would hand to SLURM."""
    inner: Any = _executor(study, submission)._executor
    inner.parameters["map_count"] = submission.workers
    return str(inner._make_submission_file_text(inner._submitit_command_str, "script"))


def _executor(study: Study, submission: Submission) -> AutoExecutor:
    try:
        import submitit
    except ImportError:
        raise MissingExtra("submitit", "slurm", "submit") from None
    folder = study.directory.resolve() / "slurm"
    parameters: dict[str, Any] = {
        "name": study.config.name,
        "timeout_min": submission.minutes,
        "cpus_per_task": submission.cpus,
        "mem_gb": submission.memory_gb,
        "gpus_per_node": submission.gpus,
    }
    if submission.cluster == "slurm":
        threads = study.config.runtime.threads
        parameters |= {"slurm_setup": [f"export OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads}"]}
        parameters |= {"slurm_additional_parameters": {"requeue": True}, "slurm_array_parallelism": submission.workers}
    try:
        options = {"slurm_max_num_timeout": REQUEUES} if submission.cluster == "slurm" else {}
        executor = submitit.AutoExecutor(folder=folder, cluster=submission.cluster, **options)
    except RuntimeError as error:
        cure = "type it on a machine of the cluster, or try --cluster local"
        raise StudyError(Fault("submit", f"no SLURM here: {error}", cure)) from None
    try:
        executor.update_parameters(**parameters | dict(submission.extra))
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(Fault("--param", str(error), "names are submitit's: --param slurm_partition=gpu")) from None
    return executor
