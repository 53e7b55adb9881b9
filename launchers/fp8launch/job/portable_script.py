"""A batch script for plain `sbatch`: the parts that make its run folder and name the cause of a failure."""

from __future__ import annotations

from fp8launch import __version__
from fp8launch.engines.base import OWN_ENTRY_TITLE
from fp8launch.job.job import Job
from fp8launch.job.shell_quoting import INDENT, quote

_PROGRAM = '"$code/supervisor/portable_run.py"'


def portable_places(job: Job) -> list[str]:
    """The lines that find a checkout of fp8launch, the run folder to be, and Python."""
    lines = [
        "# sbatch runs a copy of this script elsewhere, so places come from where it was submitted.",
        "home=${FP8LAUNCH_HOME:-$SLURM_SUBMIT_DIR}",
        "code=$home/launchers/fp8launch/injob",
        "runs=${FP8LAUNCH_RUNS:-runs}",
        "[[ $runs == /* ]] || runs=$SLURM_SUBMIT_DIR/$runs",
        f"run_folder=$runs/{quote(job.name)}-$SLURM_JOB_ID",
        f"python=${{FP8LAUNCH_PYTHON:-{quote(job.python)}}}",
        'if [ ! -f "$code/rank/worker.py" ]; then',
        f'{INDENT}echo "fp8launch: no $code/rank/worker.py: set FP8LAUNCH_HOME to a checkout of fp8launch" >&2',
        f"{INDENT}exit 2",
        "fi",
    ]
    if job.container is not None:
        lines += [
            "# The container image: a URI, or a .sqsh on a file system that every node sees.",
            f"image=${{FP8LAUNCH_IMAGE:-{quote(job.container.image)}}}",
        ]
    return lines


def make_run_folder() -> list[str]:
    """The lines that make the run folder, which must not belong to another run or lead elsewhere."""
    return [
        "# Nobody else may change what this job writes, whatever the umask of the shell that submitted it.",
        "umask go-w",
        "# Slurm reuses job numbers: a new job never uses a folder that is there. A requeued job finds its own.",
        'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [ -L "$run_folder" ] || [ ! -O "$run_folder" ]; then',
        f'{INDENT}if ! (mkdir -p "$runs" && mkdir "$run_folder"); then',
        f'{2 * INDENT}echo "fp8launch: fix: set FP8LAUNCH_RUNS to another folder that you can write to" >&2',
        f"{2 * INDENT}exit 2",
        f"{INDENT}fi",
        "fi",
        'mkdir -p "$run_folder/logs"',
        'echo "fp8launch: run folder $run_folder"',
    ]


def record_run(job: Job) -> list[str]:
    """The lines that write the manifest. Training does not need it, so a failure only says what to do instead."""
    if job.folder is not None:
        return []
    facts = [f"--name={job.name}", f"--gpu={job.gpu}", f"--fp8launch={__version__}"]
    if job.recipe_digest:
        facts.append(f"--digest={job.recipe_digest}")
    if job.megatron:
        facts.append(f"--megatron={job.megatron}")
    if job.mode == "torchrun":
        facts.append(f"--nproc-per-node={job.processes_per_node}")
    if job.entry.title != OWN_ENTRY_TITLE:
        facts.append(f"--entry={job.entry.title}")
    facts += [f"--secret={name}" for name in job.secrets]
    places = ['--python="$python"']
    if job.container is not None:
        places += [f"--runtime={job.container.runtime}", '--image="$image"']
    return [
        "# The manifest makes the folder a run: `fp8launch parse`, `compare` and others take the folder's name.",
        f'{host_python(job)} {_PROGRAM} record "$run_folder" "$attempt" \\',
        *(f"{INDENT}{quote(fact)} \\" for fact in facts),
        f"{INDENT}{' '.join(places)} \\",
        f'{INDENT}"${{environment[@]/#/--env=}}" --overrides=$# -- "${{megatron_args[@]}}" ||',
        f'{INDENT}echo "fp8launch: $run_folder has no manifest: use $attempt.log instead of the folder" >&2',
    ]


def explain_failure(job: Job) -> list[str]:
    """The lines that name the cause of a failure in the job's own output."""
    if job.folder is not None:
        return []
    return [f'[ "$status" = 0 ] || {host_python(job)} {_PROGRAM} explain "$run_folder" "$attempt" "$status" || true']


def host_python(job: Job) -> str:
    """The Python for programs that run next to the container, where Slurm's commands are: never the image's."""
    return '"$python"' if job.container is None else "python3"
