"""Pyxis: containers as options of srun, and the removal of containers that a killed step leaves behind."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from fp8launch.cluster.runtimes import Runtime
from fp8launch.job.job import Job
from fp8launch.job.script import image_word, own_mounts, script_variables, variable_names
from fp8launch.job.shell_quoting import INDENT, RawShell, Word, quote

_REMOVE_CONTAINERS = 'bash "$code/remove_containers.sh" --all-nodes "$SLURM_JOB_ID"'


def uses_pyxis(job: Job) -> bool:
    return job.container is not None and job.container.runtime == "pyxis"


def srun_options(job: Job) -> list[list[Word]]:
    """Return the options with which srun starts the processes in the job's image; empty without pyxis."""
    if job.container is None or not uses_pyxis(job):
        return []
    own = ",".join(own_mounts(job))
    mounts = ",".join([*(quote(str(mount)) for mount in job.container.mounts), f'"{own}"'])
    return [
        [RawShell(f"--container-image={quote(image_word(job))}")],
        [RawShell(f"--container-mounts={mounts}")],
        [RawShell('--container-workdir="$run_folder"'), "--no-container-mount-home"],
        ["--container-env=" + ",".join([*variable_names(job), *script_variables(job)])],
    ]


def remove_left_containers(job: Job) -> list[str]:
    """Make room for the containers of a job that Slurm started again; see remove_containers.sh."""
    if not uses_pyxis(job):
        return []
    return [
        "# pyxis names containers after the job id: one left by an earlier start has the name that this one needs.",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then',
        INDENT + _REMOVE_CONTAINERS,
        "fi",
    ]


def remove_killed_containers(job: Job) -> list[str]:
    """Remove the containers of a step that was killed: the run may continue on other nodes."""
    if not uses_pyxis(job):
        return []
    return [f'[ "$status" -eq 0 ] || {_REMOVE_CONTAINERS}']


def container_runtimes(environment: Mapping[str, str]) -> Iterator[tuple[Runtime, str]]:
    """Yield pyxis if srun has its options, whether or not a controller answers."""
    srun = shutil.which("srun")
    if srun is not None and "--container-image" in _help(srun, tuple(environment.items())):
        yield "pyxis", f"an option of {srun}"


@functools.cache  # called for each point of a grid
def _help(srun: str, environment: tuple[tuple[str, str], ...]) -> str:
    """Return srun's help, to which pyxis adds its options."""
    try:
        shown = subprocess.run(
            [srun, "--help"], capture_output=True, errors="replace", env=dict(environment), timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return shown.stdout
