"""Programs that run as Slurm jobs without a training run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.job.job import Resources
from fp8launch.job.script import AUTHOR
from fp8launch.rundir.atomic_io import write_atomically
from fp8launch.schedulers.slurm import sbatch, slurm_cli
from fp8launch.schedulers.slurm.options import extra_options, sbatch_lines, site_comment, site_options, size_options

# The number of its task, from 0, in the shell lines of a program with several tasks.
TASK = "$FP8LAUNCH_TASK"


@dataclass(frozen=True)
class Program:
    """Shell lines that run as a job without a run folder.

    Its script and the job's output are in `folder`; `file` is the script's name without its suffix, and `about` its
    first comment. With `tasks`, so many jobs run the same lines, each with its own number (`TASK`).
    """

    name: str
    about: str
    folder: Path
    file: str
    lines: tuple[str, ...]
    resources: Resources
    tasks: int | None = None


def program_script(program: Program) -> str:
    """Return the script of a program, a job array if it has several tasks."""
    need = program.resources
    options = size_options(program.name, need) | site_options(need) | extra_options(need)
    body = ["set -euo pipefail"]
    output = "slurm-%j.out"
    if program.tasks is not None:
        options["array"] = f"0-{program.tasks - 1}"
        output = "slurm-%A_%a.out"
        body.append("export FP8LAUNCH_TASK=$SLURM_ARRAY_TASK_ID")
    options["output"] = str(program.folder / output)
    head = ["#!/bin/bash", f"# {program.about}. {AUTHOR}", *sbatch_lines(options.items())]
    return "\n".join([*head, "", *body, *program.lines, ""])


def submit_program(program: Program, key: str, after: str | None = None) -> str:
    """Submit a program under a key that `find_jobs` knows; return the job id, of several tasks their common one.

    It starts when the job `after` has succeeded, and is dropped if that job fails. Raises UserError if Slurm does not
    accept it.
    """
    script = program.folder / f"{program.file}.sbatch"
    write_atomically(script, program_script(program))
    options = []
    if after is not None:
        options = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    return sbatch.submit(script, key, *options, comment=site_comment(program.resources))


def waiting_or_running(jobs: Sequence[str]) -> list[str]:
    """Return the jobs that have not ended. Raises UserError if Slurm does not answer."""
    # Not asked by number: squeue calls the number of a job that ended long ago an error.
    shown = slurm_cli.call("squeue", "-h", "-o", "%F", "-u", str(os.getuid()))
    if shown.returncode:
        raise error("slurm-silent", slurm_cli.trouble(shown), None, "try again when Slurm answers", MACHINE_LACKS)
    known = shown.stdout.split()
    return [job for job in jobs if job in known]
