"""Use submitit as a thin wrapper on the batch host: its job runs the same script, which starts our own srun step.

Submitit's Python never enters the image, its `srun` is disabled, its USR2 signal (which would kill the training) is
replaced with a harmless one, and the job exits with the script's exit status.

Submitit passes a pickle to its job by renaming a file once it knows the job id, and the job waits a minute for it. If
the launcher is killed in between, the job would fail. Therefore the job's set-up lines can supply the pickle as well.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.job.job import Job
from fp8launch.rundir.atomic_io import make_folders
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Capabilities
from fp8launch.schedulers.environment import cleaned_process_environment
from fp8launch.schedulers.slurm.options import sbatch_options
from fp8launch.schedulers.slurm.sbatch import Group, array_options, refusal, write_tasks
from fp8launch.schedulers.slurm.slurm_scheduler import SlurmScheduler

# The file in a submission's folder that its jobs unpickle.
_TASK = "task.pkl"


class RunScript:
    """The callable that submitit pickles. It runs a script and exits with its status."""

    def __init__(self, script: str) -> None:
        self.script = script

    def __call__(self) -> None:
        status = subprocess.run(["bash", self.script], check=False).returncode
        if status:
            # SystemExit bypasses submitit's error handling, which would turn every failure into exit status 1.
            raise SystemExit(status if status > 0 else 128 - status)


class RunTask:
    """The callable for a job array. Task N runs the script of the Nth run folder listed in a file."""

    def __init__(self, tasks: str) -> None:
        self.tasks = tasks

    def __call__(self) -> None:
        folders = Path(self.tasks).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        RunScript(f"{folders[int(os.environ['SLURM_ARRAY_TASK_ID'])]}/job.sbatch")()


class SubmititScheduler(SlurmScheduler):
    name = "submitit"
    capabilities = Capabilities(arrays=True, pyxis=True, continue_by=("requeue", "dependency"))

    def require(self) -> None:
        super().require()
        _load()

    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        options = sbatch_options(job, key)
        return _submit(RunScript(str(run.script)), 1, options, run.path / "submitit" / key, run.script)[0]

    def submit_array(self, group: Group, key: str, folder: Path, max_running: int | None = None) -> list[str]:
        tasks = write_tasks(group, key, folder)
        options = array_options(group, key, folder)
        return _submit(RunTask(str(tasks)), len(group), options, folder / "submitit" / key, tasks, max_running)


def _submit(
    task: RunScript | RunTask,
    count: int,
    options: Mapping[str, str | None],
    folder: Path,
    script: Path,
    max_running: int | None = None,
) -> list[str]:
    """Submit a task `count` times, as an array if `count` is above 1, and return the job ids."""
    _load()
    from submitit.core.utils import DelayedSubmission, FailedJobError

    executor = _executor(options, folder)
    executor.update_parameters(array_parallelism=max_running or count)
    spare = DelayedSubmission(task)
    spare.set_timeout(1, 0)
    spare.dump(folder / _TASK)
    try:
        with cleaned_process_environment(), executor.batch():
            submitted = [executor.submit(task) for _ in range(count)]
    except FailedJobError as exc:
        raise refusal(str(exc).rsplit("->", 1)[-1], script) from None
    return [str(one.job_id) for one in submitted]


def _load() -> None:
    """Raise UserError (exit code 3) if this Python cannot import submitit."""
    try:
        import submitit  # noqa: F401
    except ImportError as exc:
        message = f"the submitit backend needs submitit in {sys.executable}, which cannot import it: {exc}"
        fix = f"{sys.executable} -m pip install 'submitit>=1.5.3,<2', or use --backend sbatch"
        raise error("no-submitit", message, "--backend submitit", fix, exit_code=3) from None


def _executor(options: Mapping[str, str | None], folder: Path) -> Any:
    """Return submitit's executor for jobs with these sbatch options. Raises UserError without Slurm."""
    from submitit import SlurmExecutor

    # Jobs execute the pickle in this folder, and submitit leaves its mode to the umask, so keep everyone else out.
    make_folders(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        executor = SlurmExecutor(folder=folder, python=shlex.quote(sys.executable))
    except RuntimeError:
        raise error("no-slurm", "submitit finds no srun on this machine", "--backend submitit", exit_code=3) from None
    # wckey=None, because sites that enforce workload keys refuse submitit's default.
    executor.update_parameters(
        use_srun=False,
        stderr_to_stdout=True,
        wckey=None,
        setup=_supply_pickle(folder),
        additional_parameters=_parameters(options),
    )
    return executor


def _supply_pickle(folder: Path) -> list[str]:
    """Return shell lines that supply a job's pickle under submitit's name if the launcher was killed before it could.

    They also change the job's working folder to `folder`.
    """
    job = '"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"'
    quoted = shlex.quote(str(folder))
    return [
        # Submitit starts Python with -m, which imports from the working folder first. The folder where the user submits
        # may hold other people's modules, and this folder only has submitit's own files.
        f"cd {quoted}",
        f"pickle={quoted}/{job}_submitted.pkl",
        f'[ -e "$pickle" ] || {{ cp {quoted}/{_TASK} "$pickle.new" && mv -n "$pickle.new" "$pickle"; }}',
    ]


def _parameters(options: Mapping[str, str | None]) -> dict[str, object]:
    """Return sbatch options in the form in which submitit writes them to its own script."""
    found: dict[str, object] = {}
    for name, value in options.items():
        found[name] = True if value is None else value
    # Submitit sets job_name. With a dash, ours would be a second option, and the last one counts.
    found["job_name"] = found.pop("job-name")
    # Submitit always requests a signal before the time limit. Without B:, it would reach every rank. CONT is harmless.
    return {"signal": "B:CONT@1", **found}
