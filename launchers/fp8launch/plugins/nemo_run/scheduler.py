"""Submission by NeMo-Run: its experiment, SlurmExecutor and tunnel, around our own batch script.

The script that NeMo-Run writes prints every line of itself, exports variables unquoted under names in upper case, and
joins srun's arguments without quotes. So nothing of a recipe passes through it: its set-up lines replace the batch
shell by our script, which starts our own srun step and whose exit status is the job's. NeMo-Run's own step is never
reached; inside it, our script would get the size of that step for the size of the job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.job.job import Job
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Capabilities
from fp8launch.schedulers.environment import cleaned_process_environment
from fp8launch.schedulers.slurm.options import sbatch_options
from fp8launch.schedulers.slurm.sbatch import refusal
from fp8launch.schedulers.slurm.slurm_jobs import find_jobs
from fp8launch.schedulers.slurm.slurm_scheduler import SlurmScheduler

# NeMo-Run passes the path of its script to a shell unquoted.
_PLAIN_PATH = re.compile(r"[\w./@+=:,-]+")
# Its name for the job's folder in a container; without a container it replaces this text in the whole script.
_RUNDIR = "/nemo_run"


class NemoRunScheduler(SlurmScheduler):
    """NeMo-Run is imported to submit, and for nothing else: states and cancelling are Slurm's."""

    name = "nemo-run"
    capabilities = Capabilities(pyxis=True, continue_by=("requeue", "dependency"))

    def validate(self, job: Job) -> None:
        super().validate(job)
        options = sbatch_options(job)
        if "account" not in options:
            raise error(
                "nemo-run-account",
                "NeMo-Run needs an account to submit a job, but the cluster profile sets none",
                "cluster profile: account",
                "set `account:` in the cluster profile; `sacctmgr show assoc user=$USER` lists yours",
            )
        home = str(_home())
        if not _PLAIN_PATH.fullmatch(home):
            raise error(
                "nemo-run-home",
                f"NeMo-Run passes its paths to a shell without quotes, but its folder {home!r} needs quotes",
                "NEMORUN_HOME",
                "export NEMORUN_HOME=/a/plain/path on a file system that the submitting host can access",
            )
        for place in (str(job.folder), *filter(None, options.values())):
            if _RUNDIR in place:
                raise error(
                    "nemo-run-path",
                    f"NeMo-Run replaces {_RUNDIR} in its script with a path, and {place!r} contains it",
                    "--run-root",
                    "choose paths without this text",
                )

    def require(self) -> None:
        super().require()
        _load()

    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        """Make an experiment with the run as its only task, and launch it detached."""
        nemo_run = _load()
        from invoke.exceptions import UnexpectedExit  # type: ignore[import-not-found, unused-ignore]

        try:
            with cleaned_process_environment(), _quiet():
                # The title is a folder in the path of NeMo-Run's script, so Slurm shows the key with the command.
                experiment = nemo_run.Experiment(
                    key, log_level="ERROR", skip_status_at_exit=True, enable_goodbye_message=False
                )
                # Before sbatch: a job whose answer is lost is recognized by its experiment.
                run.update(nemo_run={"experiment": experiment._id, "version": nemo_run.__version__})
                with experiment:
                    task = nemo_run.Script(path=str(run.script))
                    experiment.add(task, executor=_executor(nemo_run, job, run, key), name=job.name)
                    experiment.run(detach=True)
        except UnexpectedExit as exc:
            # An sbatch that gives up waiting may have submitted all the same.
            late = "timed out" in exc.result.stderr.lower()
            if late and (known := find_jobs([key])):
                return known[key]
            raise refusal(exc.result.stderr, run.script) from None
        # slurm_tunnel://nemo_run/<id>, or <id>;<cluster>
        match = re.search(r"/(\d+)(;[^/]*)?$", experiment.jobs[0].handle)
        if match is None:
            raise refusal(f"sbatch answered {experiment.jobs[0].handle!r}", run.script)
        return match[1]


def setup_lines(job: Job, run: RunFolder) -> str:
    """Return the lines of NeMo-Run's script that run instead of its own step.

    That script is printed into the log as it runs, so these lines hold a path and nothing else of the run.
    """
    lines = ["# fp8launch's own script from here on; what follows is not reached.", "{ set +vx; } 2>/dev/null"]
    if "no-requeue" in sbatch_options(job):
        # NeMo-Run submits with --requeue, which on the command line wins over the script's options.
        lines.append('scontrol update JobId="$SLURM_JOB_ID" Requeue=0 || exit')
    # It makes srun give every process a terminal, which changes what they print; plain sbatch would not set it.
    lines.append("unset SLURM_UNBUFFEREDIO TORCHX_MAX_RETRIES")
    lines.append(f"exec bash {shlex.quote(str(run.script))}")
    return "\n".join(lines)


def _executor(nemo_run: ModuleType, job: Job, run: RunFolder, key: str) -> Any:
    """Return NeMo-Run's executor for a job. Its script gets each of our options under the same name."""
    from fp8launch.plugins.nemo_run.logs import RunLogs

    options: dict[str, object] = {}
    for name, value in sbatch_options(job, key).items():
        options[name.replace("-", "_")] = True if value is None else value
    executor = nemo_run.SlurmExecutor(
        account=options["account"],
        nodes=job.nodes,
        ntasks_per_node=int(str(options.get("ntasks_per_node", 1))),
        time=options.get("time", "00:10:00"),
        additional_parameters=options,
        setup_lines=setup_lines(job, run),
        # The run folder carries what the job needs: nothing of a checkout is packed, committed or not.
        packager=nemo_run.Packager(),
        # NeMo-Run finds its script again only in its own folder.
        tunnel=nemo_run.LocalTunnel(job_dir=str(_home() / "experiments")),
        retries=0,
        poll_estimated_start_time=False,
    )
    # What `nemo experiment logs` reads: the logs of our attempts.
    executor.job_details = RunLogs(folder=str(run.path / "logs"))
    return executor


def _home() -> Path:
    """Return NeMo-Run's folder, found as NeMo-Run finds it."""
    return Path(os.environ.get("NEMORUN_HOME") or "~/.nemo_run").expanduser().absolute()


def _load() -> ModuleType:
    """Import NeMo-Run. Raises UserError (exit code 3) if this Python cannot."""
    try:
        with _quiet():
            import nemo_run
    except Exception as exc:
        # Its dependencies fail in many ways while they are imported, by other errors than ImportError too.
        raise error(
            "no-nemo-run",
            f"the nemo-run backend needs NeMo-Run in {sys.executable}, which cannot import it: "
            f"{type(exc).__name__}: {exc}",
            "--backend nemo-run",
            f"{sys.executable} -m pip install 'nemo-run>=0.11,<0.12' 'leptonai<0.28' (NeMo-Run cannot be imported with "
            "later versions of leptonai)",
            exit_code=3,
        ) from None
    module: ModuleType = nemo_run
    return module


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence NeMo-Run, which prints progress on stdout and sets up logging for the whole process."""
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
