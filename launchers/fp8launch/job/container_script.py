"""The container in a batch script: how the processes start in it, what it must be given, and what is removed."""

from __future__ import annotations

from collections.abc import Iterable

from fp8launch.job.job import Container, Job
from fp8launch.job.shell_quoting import INDENT, RawShell, Word, quote

_REMOVE_CONTAINERS = 'bash "$code/remove_containers.sh" --all-nodes "$SLURM_JOB_ID"'


def start_in_container(job: Job) -> list[list[Word]]:
    """How the runtime starts the processes in the image: empty without a container."""
    container = job.container
    if container is None:
        return []
    image: Word = RawShell('"$image"') if job.folder is None else container.image
    if container.runtime == "pyxis":
        return _pyxis(job, container, image)
    # The run folder last: a mount made later hides those below its place.
    binds: list[Word] = []
    for mount in container.mounts:
        binds.append(RawShell(f"--bind={quote(str(mount))}"))
    for own in _own_mounts(job):
        binds.append(RawShell(f'--bind="{own}"'))
    if container.runtime == "apptainer":
        start: list[Word] = ["apptainer", "exec"]
        if container.gpus:
            start.append("--nv")
        return [[*start, RawShell('--pwd="$run_folder"')], binds, [image]]
    return [["ch-run", RawShell('--cd="$run_folder"')], binds, [image, "--"]]


def _pyxis(job: Job, container: Container, image: Word) -> list[list[Word]]:
    own = ",".join(_own_mounts(job))
    mounts = ",".join([*map(quote, map(str, container.mounts)), f'"{own}"'])
    return [
        [RawShell(f"--container-image={quote(image)}")],
        [RawShell(f"--container-mounts={mounts}")],
        [RawShell('--container-workdir="$run_folder"'), "--no-container-mount-home"],
        ["--container-env=" + ",".join([*_names(job), *script_variables(job)])],
    ]


def _own_mounts(job: Job) -> list[str]:
    """The mounts of every job, by the script's variables: a portable script needs the checkout too."""
    mounts = ["$run_folder:$run_folder"]
    if job.folder is None:
        mounts.append("$home:$home")
    return mounts


def _names(job: Job) -> Iterable[str]:
    """The variables of the recipe and the cluster, which must win over what an image sets."""
    of_phases: dict[str, str] = {}
    for phase in job.phases:
        of_phases |= dict(phase.environment)
    return (*dict(job.environment), *job.secrets, *of_phases)


def script_variables(job: Job) -> list[str]:
    """Variables that the script itself sets for the processes."""
    names = ["MASTER_ADDR", "MASTER_PORT"]
    if job.survival:
        names.append("FP8LAUNCH_STOP_AT")
    return names


def container_environment(job: Job, *from_the_script: str) -> list[str]:
    """Export the job's variables for Apptainer; the other runtimes inherit them, or take them by an option."""
    if job.container is None or job.container.runtime != "apptainer":
        return []
    prefixed = 'environment+=("${environment[@]/#/APPTAINERENV_}")'
    exports = [f'export APPTAINERENV_{name}="${name}"' for name in (*job.secrets, *from_the_script)]
    return [
        "# An image's own environment wins over the host's, unless a variable has this prefix.",
        prefixed,
        *exports,
    ]


def remove_left_containers(job: Job) -> list[str]:
    """Make room for the containers of a job that Slurm started again; see remove_containers.sh."""
    if job.container is None or job.container.runtime != "pyxis":
        return []
    return [
        "# pyxis names containers by the job's number: what an earlier start left has the name that this one needs.",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then',
        INDENT + _REMOVE_CONTAINERS,
        "fi",
    ]


def remove_killed_containers(job: Job) -> list[str]:
    """A step that is killed leaves its containers, and the run may continue on other nodes."""
    if job.container is None or job.container.runtime != "pyxis":
        return []
    return [f'[ "$status" -eq 0 ] || {_REMOVE_CONTAINERS}']
