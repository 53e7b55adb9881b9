"""The text of a batch script for Slurm: one pure function for each kind of job.

A job without a run folder gets a portable script: it makes its own run folder, and needs no fp8launch to be submitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8launch import __version__
from fp8launch.engines.base import OWN_ENTRY_TITLE
from fp8launch.job.job import Job
from fp8launch.job.script import (
    AUTHOR,
    END_WATCH,
    WITH_ENVIRONMENT,
    argument_lines,
    attempt_places,
    begin_attempt,
    container_environment,
    end_attempt,
    environment_lines,
    health_lines,
    host_python,
    join_blocks,
    process_command,
    run_places,
    script_variables,
    setup_lines,
    start_arguments,
    start_in_container,
    training_step,
    watch_attempt,
)
from fp8launch.job.shell_quoting import INDENT, RawShell, Word, quote
from fp8launch.schedulers.slurm import pyxis
from fp8launch.schedulers.slurm.options import sbatch_lines, sbatch_options
from fp8launch.wording import counted

_JOB_ID = "${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-local}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
_RESTART = "SLURM_RESTART_COUNT"
# Parts of a portable script.
_PORTABLE_RUN = '"$code/slurm/portable_run.py"'
_HOW_TO_SUBMIT = [
    "# Submit from the top of an fp8launch checkout: sbatch slurm/NAME.sbatch. Set the account,",
    "# the partition and other options on the command line, or in #SBATCH lines below these.",
]
_MORE_ARGUMENTS = [
    "# Arguments after the script's name on sbatch's command line go to Megatron and override these.",
    'megatron_args+=("$@")',
]
# The run folder must not belong to another run, and must not be a link.
_MAKE_RUN_FOLDER = [
    "# Only you can change what this job writes, whatever the umask of the submitting shell.",
    "umask go-w",
    "# Slurm reuses job ids, so a new job never uses an existing folder. A requeued job finds its own.",
    'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [ -L "$run_folder" ] || [ ! -O "$run_folder" ]; then',
    f'{INDENT}if ! (mkdir -p "$runs" && mkdir "$run_folder"); then',
    f'{2 * INDENT}echo "fp8launch: fix: set FP8LAUNCH_RUNS to another folder that you can write to" >&2',
    f"{2 * INDENT}exit 2",
    f"{INDENT}fi",
    "fi",
    'mkdir -p "$run_folder/logs"',
    'echo "fp8launch: run folder $run_folder"',
]


def batch_script(job: Job) -> str:
    """Return the script that sbatch runs for `job`, and that the submitit backend runs on the batch host."""
    return join_blocks(
        [
            _header(job),
            _places(job),
            setup_lines(job),
            begin_attempt(job),
            environment_lines(job),
            argument_lines(job, *_MORE_ARGUMENTS if job.folder is None else ()),
            _record_run(job) if job.folder is None else [],
            _rendezvous(),
            container_environment(job, *script_variables(job)),
            health_lines(job, "--all-nodes"),
            pyxis.remove_left_containers(job),
            start_arguments(job),
            _step(job),
        ]
    )


def array_script(options: Iterable[tuple[str, str | None]], tasks: str) -> str:
    """Return the script of a job array: task N runs the script of the Nth run folder in the file `tasks`."""
    return "\n".join(
        [
            "#!/bin/bash",
            f"# A job array: runs with the same resources and different values. {AUTHOR}",
            *sbatch_lines(options),
            "",
            "set -euo pipefail",
            f"mapfile -t runs < {quote(tasks)}",
            'exec bash "${runs[SLURM_ARRAY_TASK_ID]}/job.sbatch"',
            "",
        ]
    )


def _header(job: Job) -> list[str]:
    size = f"{counted(job.nodes, 'node')} x {counted(job.processes_per_node, 'process')}"
    return [
        "#!/bin/bash",
        f"# {job.name}: {size}. {AUTHOR}",
        *(_HOW_TO_SUBMIT if job.folder is None else ()),
        *sbatch_lines(sbatch_options(job).items()),
    ]


def _places(job: Job) -> list[str]:
    if job.folder is None:
        return [*_find_places(job), *attempt_places(_JOB_ID, _RESTART, _MAKE_RUN_FOLDER)]
    return [*run_places(job, job.folder), *attempt_places(_JOB_ID, _RESTART)]


def _find_places(job: Job) -> list[str]:
    """Find a checkout of fp8launch, the future run folder, and Python, for a portable script."""
    lines = [
        "set -euo pipefail",
        "# sbatch runs a copy of this script, so paths are relative to the folder where it was submitted.",
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


def _record_run(job: Job) -> list[str]:
    """Write the manifest. Training does not need it, so a failure only says what to do instead."""
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
        f'{host_python(job)} {_PORTABLE_RUN} record "$run_folder" "$attempt" \\',
        *(f"{INDENT}{quote(fact)} \\" for fact in facts),
        f"{INDENT}{' '.join(places)} \\",
        f'{INDENT}"${{environment[@]/#/--env=}}" --overrides=$# -- "${{megatron_args[@]}}" ||',
        f'{INDENT}echo "fp8launch: $run_folder has no manifest: use $attempt.log instead of the folder" >&2',
    ]


def _rendezvous() -> list[str]:
    return [
        "# All processes rendezvous on the job's first node, on a port derived from the job id.",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
    ]


def _mount_folder(job: Job) -> list[str]:
    """Make the folder on which ch-run mounts a .sqsh file, on every node.

    Each ch-run makes it if it is missing, and fails if another one on the node has just done so.
    """
    image = job.container
    if image is None or image.runtime != "charliecloud" or job.resources.tasks_per_node == 1:
        return []
    if job.folder is not None and not image.image.endswith(".sqsh"):
        return []
    return [
        "# Tasks that start at once on a node cannot all make the folder on which ch-run mounts the image.",
        'srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \\',
        f'{INDENT}mkdir -p "/var/tmp/$USER.ch/mnt" || true',
    ]


def _step(job: Job) -> list[str]:
    srun: list[list[Word]] = [
        [WITH_ENVIRONMENT, "srun"],
        # A failing rank ends all others at once. Finished ranks wait for a rank that is still saving.
        ["--label", "--kill-on-bad-exit=1", "--wait=300"],
        [RawShell('--output="$attempt.log"'), "--open-mode=append"],
    ]
    need = job.resources
    if need.options.get("mpi"):
        srun.append([f"--mpi={need.options['mpi']}"])
    if need.cpus_per_task:
        # srun of Slurm 22.05 and 23.02 does not take this from the job.
        srun.append([f"--cpus-per-task={need.cpus_per_task}"])
    command = [*srun, *pyxis.srun_options(job), *start_in_container(job), *process_command(job)]
    lines = training_step(command, after=END_WATCH if job.survival else [])
    more = pyxis.remove_killed_containers(job)
    if job.folder is None:
        explain = f'{host_python(job)} {_PORTABLE_RUN} explain "$run_folder" "$attempt" "$status" || true'
        more.append(f'[ "$status" = 0 ] || {explain}')
    lines[-1:-1] = more
    lines = [*_mount_folder(job), *lines]
    if job.survival is None:
        return lines
    return [
        "# End the training if its log stops growing.",
        watch_attempt(job),
        *lines[:-1],
        "# Decide what happens next: nothing, another attempt, or a stop.",
        end_attempt(job),
    ]
