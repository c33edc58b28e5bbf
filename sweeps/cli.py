"""`mutransfer`: the command line. Owns `main`, and the commands that make runs: study, plan, run, status, retry.

Nothing heavy is imported before a command runs, so that `--help` stays fast.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaling.errors import ConfigError, Fault, Interrupted, StudyError, UserError, program
from scaling.torchrun import follows, leave, started_by_torchrun, was_in_group
from sweeps import cli_analysis, cli_batch, cli_coordinates, cli_export, cli_fit, cli_hardware, cli_import, cli_recommend, cli_run
from sweeps.cli_common import (
    DOTTED,
    NOT_OK,
    OK,
    WRONG_USE,
    answer,
    command_line,
    follow_rank_0,
    messages,
    overrides,
    report_error,
    stop_on_sigterm,
)

if TYPE_CHECKING:
    from sweeps.driver import Outcome
    from sweeps.study_dir import Study

BAD_PATH = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP)

app = typer.Typer(
    name="mutransfer",
    help="From cheap proxy runs to the hyperparameters of a large training run, with evidence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

StudyPath = Annotated[Path, typer.Argument(help="A study's YAML file, or its directory once it exists.", show_default=False)]
Out = Annotated[Path | None, typer.Option(help="Study directory; default studies/NAME.", show_default=False)]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Override a config key: --set a.b=value.", show_default=False)]
Jobs = Annotated[int | None, typer.Option(min=1, help="Worker processes; default one a core, or a GPU.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def _open(context: typer.Context, path: Path, out: Path | None, settings: list[str] | None, *, save: bool = True) -> Study:
    from sweeps.study_dir import open_study

    study = open_study(path, out, overrides(settings or [], context.args), save=save)
    if study.changes:
        words = "; ".join(study.changes)
        messages().print(f"{study.directory} changes, finished runs are kept: {words}", markup=False, highlight=False)
    return study


def _refuse_torchrun() -> None:
    """Raise StudyError in a command that starts the processes of its runs by itself."""
    if started_by_torchrun(os.environ):
        cure = "under torchrun start `worker` (a study in a database) or `train`; or set runtime.processes, without torchrun"
        raise StudyError(Fault("torchrun", "would start this command, and its pool of workers, once for each rank", cure))


def _drive(study: Study, jobs: int | None) -> Outcome:
    _refuse_torchrun()
    from sweeps.driver import drive
    from sweeps.pinning import crowded, default_jobs, topology
    from sweeps.progress import watcher_for

    stop_on_sigterm()
    runtime = study.config.runtime
    machine = topology(runtime)
    count = jobs or default_jobs(runtime, machine)
    if note := crowded(machine, count, runtime):
        _say(note)
    if study.config.storage is not None:
        from sweeps.fleet import drive_shared

        return drive_shared(study, count, _say, command_line())
    return drive(study.directory, study.config, count, watcher_for(messages(), count), study.data_arguments(), command_line())


def _say(text: str) -> None:
    messages().print(text, markup=False, highlight=False)


def _outcome_text(study: Study, outcome: Outcome) -> str:
    from sweeps.progress import duration

    pruned = f"{outcome.pruned} pruned, " if outcome.pruned else ""
    counts = f"{outcome.complete} complete, {outcome.diverged} diverged, {pruned}{len(outcome.failed)} failed"
    done = f"{counts} of {outcome.planned} runs"
    if not outcome.made and not outcome.failed and not outcome.missing:
        return f"Nothing left to do in {study.directory}: {done}."
    lines = [f"Made {outcome.made} runs in {duration(outcome.wall_s)}: {done}."]
    lines += [f"  failed {run_id}: {reason}" for run_id, reason in outcome.failed.items()]
    if outcome.failed:
        lines.append(f"Read runs/RUN_ID/error.txt, then type: {program()} retry {study.directory}")
    return "\n".join(lines)


def _outcome_document(study: Study, outcome: Outcome) -> dict[str, Any]:
    keys = ("planned", "made", "complete", "diverged", "pruned", "missing", "failed", "wall_s")
    return {"study": str(study.directory)} | {key: getattr(outcome, key) for key in keys}


@app.command("study", context_settings=DOTTED)
def study_command(
    context: typer.Context, path: StudyPath, out: Out = None, jobs: Jobs = None, settings: Settings = None, json: Json = False
) -> int:
    """The whole way: plan, train, judge the transfer, recommend, write report.html. Run it again to continue."""
    study = _open(context, path, out, settings)
    outcome = _drive(study, jobs)
    messages().print(_outcome_text(study, outcome), markup=False, highlight=False)
    if outcome.failed or outcome.missing:
        answer(_outcome_document(study, outcome), "", json)
        return NOT_OK
    return cli_analysis.conclude(study, _outcome_document(study, outcome), json)


@app.command("run", context_settings=DOTTED)
def run_command(
    context: typer.Context, path: StudyPath, out: Out = None, jobs: Jobs = None, settings: Settings = None, json: Json = False
) -> int:
    """Make the runs that a study still needs, without judging them."""
    study = _open(context, path, out, settings)
    outcome = _drive(study, jobs)
    answer(_outcome_document(study, outcome), _outcome_text(study, outcome), json)
    return NOT_OK if outcome.failed or outcome.missing else OK


@app.command("plan", context_settings=DOTTED)
def plan_command(
    context: typer.Context,
    path: StudyPath,
    out: Out = None,
    jobs: Jobs = None,
    timing: Annotated[bool, typer.Option(help="Time a few real steps a width (seconds) for the estimate.")] = True,
    settings: Settings = None,
    json: Json = False,
) -> int:
    """Print every run that a study needs, with parameters, tokens, FLOPs and estimated time, before anything runs."""
    from sweeps.pinning import default_jobs
    from sweeps.plan_table import plan_document, plan_text

    _refuse_torchrun()
    study = _open(context, path, out, settings, save=False)
    document = plan_document(study, jobs or default_jobs(study.config.runtime), timing)
    answer(document, lambda: plan_text(document), json)
    return OK


@app.command("status")
def status_command(path: StudyPath, out: Out = None, json: Json = False) -> int:
    """How far a study is: runs expected, complete, diverged, pruned, failed, missing, and what to type next."""
    from sweeps.status import status_document, status_text
    from sweeps.study_dir import find_study

    document = status_document(find_study(path, out))
    answer(document, lambda: status_text(document), json)
    return OK if document["finished"] else NOT_OK


@app.command("worker", context_settings=DOTTED)
def worker_command(
    context: typer.Context,
    place: Annotated[
        str, typer.Argument(help="A study's directory or YAML file, or the URL of its database.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option(help="The study, where the database holds several.", show_default=False)] = None,
    out: Out = None,
    grace: Annotated[float, typer.Option(min=1, help="Seconds of silence after which a run goes to another worker.")] = 60.0,
    settings: Settings = None,
) -> int:
    """Make runs of a shared study, beside any number of other workers anywhere, until none is left."""
    from sweeps.fleet import left_text, once_there, pull, require_database, study_at, work
    from sweeps.study_dir import open_study

    if follows(os.environ):
        return follow_rank_0()
    stop_on_sigterm()
    options = overrides(settings or [], context.args)
    if "://" in place:
        study = once_there(lambda: study_at(place, name, out), _say)
        study = open_study(study.directory, None, options) if options else study
    else:
        require_database(open_study(Path(place), out, options, save=False))
        study = _open(context, Path(place), out, settings)
    made = work(study, _say, grace_s=grace)
    once_there(lambda: pull(study), _say)
    _say(f"made {made} runs; {left_text(study)}")
    return OK


@app.command("submit", context_settings=DOTTED)
def submit_command(
    context: typer.Context,
    path: StudyPath,
    out: Out = None,
    workers: Annotated[int, typer.Option(min=1, help="Tasks of the array.")] = 8,
    cluster: Annotated[str, typer.Option(help="slurm, or local for a trial on this machine.")] = "slurm",
    minutes: Annotated[int, typer.Option(min=1, help="Time limit of a task; at its end it is requeued.")] = 240,
    cpus: Annotated[int, typer.Option(min=1, help="Processors of a task.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a task.")] = 0,
    memory_gb: Annotated[float, typer.Option(min=0.1, help="Memory of a task.")] = 8.0,
    param: Annotated[
        list[str] | None, typer.Option(help="submitit's own: --param slurm_partition=gpu.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the sbatch script instead.")] = False,
    settings: Settings = None,
    json: Json = False,
) -> int:
    """Submit workers of a shared study as a SLURM array; pre-empted ones give their run back and come again."""
    from sweeps.fleet import require_database
    from sweeps.slurm import Submission, script, submit
    from sweeps.study_dir import open_study

    if cluster not in ("slurm", "local"):
        raise ConfigError(Fault(f"--cluster {cluster}", "is neither slurm nor local"))
    pairs = [text.partition("=") for text in param or []]
    wrong = [Fault(f"--param {name}", "has no value", "--param NAME=VALUE") for name, separator, _ in pairs if not separator]
    if wrong:
        raise ConfigError(*wrong)
    if not dry_run:
        require_database(open_study(path, out, overrides(settings or [], context.args), save=False))
    study = _open(context, path, out, settings)
    extra = {name: int(text) if text.isdigit() else text for name, _, text in pairs}
    asked = Submission(workers, "slurm" if cluster == "slurm" else "local", minutes, cpus, gpus, memory_gb, extra)
    if dry_run:
        print(script(study, asked))
        return OK
    jobs = submit(study, asked)
    text = f"submitted {len(jobs)} workers ({', '.join(jobs)}); logs in {study.directory}/slurm\n"
    text += f"watch: {program()} status {study.directory}"
    answer({"study": str(study.directory), "jobs": jobs}, text, json)
    return OK


@app.command("fetch")
def fetch_command(
    url: Annotated[str, typer.Argument(help="The database's URL.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="The study, where the database holds several.", show_default=False)] = None,
    out: Out = None,
) -> int:
    """Bring a shared study's config and finished runs here, so that status, transfer and report can read them."""
    from sweeps.fleet import pull, study_at

    study = study_at(url, name, out)
    _say(f"{pull(study)} runs fetched to {study.directory}")
    return OK


@app.command("retry")
def retry_command(path: StudyPath, out: Out = None, jobs: Jobs = None, json: Json = False) -> int:
    """Forget the failures of a study's runs and make those runs again."""
    from scaling.locks import driver_lock
    from scaling.records import read_records
    from sweeps.queue import Queue
    from sweeps.study_dir import find_study

    study = find_study(path, out)
    if study.config.storage is not None:
        from sweeps.fleet import board_of

        _say(f"{board_of(study).retry_failed()} failed runs will be made again.")
        outcome = _drive(study, jobs)
        answer(_outcome_document(study, outcome), _outcome_text(study, outcome), json)
        return NOT_OK if outcome.failed or outcome.missing else OK
    with driver_lock(study.directory):
        finished = {record.run_id for record in read_records(study.directory)}
        forgotten = Queue(study.directory, study.config).forget_failures(finished)
    messages().print(f"{forgotten} failed runs will be made again.", highlight=False)
    outcome = _drive(study, jobs)
    answer(_outcome_document(study, outcome), _outcome_text(study, outcome), json)
    return NOT_OK if outcome.failed or outcome.missing else OK


cli_analysis.register(app)
cli_recommend.register(app)
cli_run.register(app)
cli_coordinates.register(app)
cli_import.register(app)
cli_fit.register(app)
cli_export.register(app)
cli_batch.register(app)
cli_hardware.register(app)


def main() -> None:
    """Entry point: runs the command and turns errors into messages and exit codes."""
    code = _main()
    if was_in_group():
        leave(code)
    exec(
        ""
    )  # A Ctrl-C that came inside of any `exec` of a text (dataclasses do it) would make Python die of it yet: this forgets it.
    sys.exit(code)


def _main() -> int:
    try:
        result = app(standalone_mode=False)
        return result if isinstance(result, int) else OK
    except UserError as error:
        return report_error(error)
    except KeyboardInterrupt:
        messages().print(f"stopped; nothing finished is lost. To continue, type: {command_line()}", markup=False, highlight=False)
        return NOT_OK
    except BrokenPipeError:
        return NOT_OK
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            cure = f"free some space and type again: {command_line()} (finished runs are kept)"
            return report_error(Interrupted(Fault(str(error.filename or ""), "no space left on the disk", cure)))
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            cure = "give a folder that you may write to: --out DIR"
            return report_error(StudyError(Fault(str(error.filename or ""), f"cannot be written: {error.strerror}", cure)))
        if error.errno in BAD_PATH:
            return report_error(StudyError(Fault(str(error.filename), f"{error.strerror}".lower(), "give another path")))
        raise
    except MemoryError:
        return report_error(ConfigError(Fault("", "not enough memory for what the config asks", "make it smaller")))
    except typer.Exit as stop:
        return int(stop.exit_code)
    except Exception as error:
        return _usage_error(error)


def _usage_error(error: Exception) -> int:
    """Typer's own complaints about options and arguments; anything else is a bug and keeps its traceback."""
    message = getattr(error, "format_message", None)
    if message is None and "allocate memory" in str(error):
        return report_error(ConfigError(Fault("", "not enough memory for what the config asks", "make it smaller")))
    if type(error).__name__ in ("OperationalError", "InterfaceError") and type(error).__module__.startswith("sqlalchemy"):
        what = f"the database does not answer: {str(error).splitlines()[0]}"
        return report_error(
            StudyError(Fault("", what, f"once it is back, type again: {command_line()} (finished runs are kept)"))
        )
    if message is None:
        raise error
    text = message()
    if text:
        return report_error(ConfigError(Fault("", text, "mutransfer --help, or mutransfer COMMAND --help")))
    return WRONG_USE


if __name__ == "__main__":
    main()
