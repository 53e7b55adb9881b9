"""The text of a batch script: one pure function."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fp8launch import __version__
from fp8launch.job.job import Job
from fp8launch.job.phase_script import one_by_one, own_arguments, phase_cases, short_of_its_end, tracker
from fp8launch.job.words import INDENT, Expansion, Word, flag_lines, quote

# EX_TEMPFAIL of sysexits.h: the same job may well work elsewhere.
UNHEALTHY = 75
AUTHOR = f"Written by fp8launch {__version__}."

# Names that a recipe cannot use for a variable: those of the script itself, and those that bash keeps for itself.
OWN_VARIABLES = {
    "attempt", "begun", "code", "home", "hosts", "image", "job", "megatron_args", "phase", "phase_end", "python",
    "reached", "run_folder", "status", "FP8LAUNCH_STOP_AT", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
BASH_VARIABLES = {
    "_", "BASHOPTS", "BASHPID", "BASH_ARGC", "BASH_ARGV", "BASH_ARGV0", "BASH_CMDS", "BASH_COMMAND", "BASH_LINENO",
    "BASH_SOURCE", "BASH_SUBSHELL", "BASH_VERSINFO", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME",
    "GROUPS", "HISTCMD", "LINENO", "PPID", "RANDOM", "SECONDS", "SHELLOPTS", "SRANDOM", "UID",
}  # fmt: skip


def batch_script(job: Job) -> str:
    """The script that sbatch runs for `job`, and that the submitit backend runs on the batch host."""
    blocks = [
        _header(job),
        _places(job),
        _setup(job),
        _begin(job),
        _environment(job),
        _rendezvous(),
        _container_environment(job, *_from_the_script(job)),
        _health(job, "--all-nodes"),
        _arguments(job),
        _start(job),
        _step(job),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def array_script(options: Sequence[tuple[str, str | None]], tasks: str) -> str:
    """The batch script of a job array: task N runs the script of the Nth run folder in the file `tasks`."""
    return "\n".join(
        [
            "#!/bin/bash",
            f"# A job array: runs that ask Slurm for the same and differ in values. {AUTHOR}",
            *_sbatch_lines(options),
            "",
            "set -euo pipefail",
            f"mapfile -t runs < {quote(tasks)}",
            'exec bash "${runs[SLURM_ARRAY_TASK_ID]}/job.sbatch"',
            "",
        ]
    )


def local_script(job: Job) -> str:
    """The script of a run on this machine: the same processes, started by torchrun instead of Slurm."""
    head = ["#!/bin/bash", f"# {job.name}: {_count(job.processes_per_node, 'process')}. {AUTHOR}"]
    command = [*_container(job), *process_command(replace(job, mode="torchrun"))]
    step = _with_status(command, '>> "$attempt.log" 2>&1', short_of_its_end(job))
    blocks = [
        head,
        _places(job),
        one_by_one(job),
        _setup(job),
        _environment(job),
        _container_environment(job),
        _health(replace(job, survival=None)),
        _arguments(job),
        _start(job),
        step,
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"


def _header(job: Job) -> list[str]:
    size = f"{_count(job.nodes, 'node')} x {_count(job.processes_per_node, 'process')}"
    lines = ["#!/bin/bash", f"# {job.name}: {size}. {AUTHOR}"]
    if job.folder is None:
        lines += [
            "# Submit it from the top of a checkout of fp8launch: sbatch slurm/NAME.sbatch. Account, partition and",
            "# the like: on sbatch's command line, or as #SBATCH lines below these.",
        ]
    return [*lines, *_sbatch_lines(job.slurm)]


def _sbatch_lines(options: Iterable[tuple[str, str | None]]) -> list[str]:
    return [f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(value)}") for name, value in options]


def _places(job: Job) -> list[str]:
    if job.folder is not None:
        lines = [
            "set -euo pipefail",
            f"run_folder={quote(job.folder)}",
            "code=$run_folder/code",
            f"python={quote(job.python)}",
        ]
    else:
        lines = [
            "set -euo pipefail",
            "# sbatch runs a copy of this script elsewhere, so places come from where it was submitted.",
            "home=${FP8LAUNCH_HOME:-$SLURM_SUBMIT_DIR}",
            "code=$home/launchers/fp8launch/train",
            f"run_folder=${{FP8LAUNCH_RUNS:-$SLURM_SUBMIT_DIR/runs}}/{quote(job.name)}-$SLURM_JOB_ID",
            f"python=${{FP8LAUNCH_PYTHON:-{quote(job.python)}}}",
            'if [ ! -f "$code/worker.py" ]; then',
            f'{INDENT}echo "fp8launch: no $code/worker.py: set FP8LAUNCH_HOME to a checkout of fp8launch" >&2',
            f"{INDENT}exit 2",
            "fi",
        ]
        if job.container is not None:
            lines += [
                "# The container image: a URI, or a .sqsh on a file system that every node sees.",
                f"image=${{FP8LAUNCH_IMAGE:-{quote(job.container.image)}}}",
            ]
    return [
        *lines,
        "# A requeued job keeps its id, so each attempt has a log of its own.",
        "job=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-local}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}",
        "attempt=$run_folder/logs/$job-${SLURM_RESTART_COUNT:-0}",
        'mkdir -p "$run_folder/logs"',
        'cd "$run_folder"',
    ]


def _setup(job: Job) -> list[str]:
    if not job.setup:
        return []
    # Module systems read unset variables and test commands that fail.
    return ["# Set-up lines of the cluster profile.", "set +eu", *job.setup, "set -eu"]


def _keeper(job: Job) -> str:
    # It runs beside the container, where Slurm's commands are, so the image's Python is out of reach.
    return '"$python" "$code/keeper.py"' if job.container is None else 'python3 "$code/keeper.py"'


def _begin(job: Job) -> list[str]:
    if job.survival is None:
        return []
    if job.phases:
        return [
            "# Is something left to do? Then until when (the training saves and leaves before Slurm ends the job), and",
            "# in which phase: that of the newest checkpoint.",
            f'begun=$({_keeper(job)} begin "$run_folder" "$attempt") || exit',
            'read -r FP8LAUNCH_STOP_AT phase <<< "$begun" || true',
            '[ -n "$FP8LAUNCH_STOP_AT" ] || exit 0',
            "export FP8LAUNCH_STOP_AT",
        ]
    return [
        "# Is something left to do? Then until when: the training saves and leaves before Slurm ends the job.",
        f'FP8LAUNCH_STOP_AT=$({_keeper(job)} begin "$run_folder" "$attempt") || exit',
        '[ -n "$FP8LAUNCH_STOP_AT" ] || exit 0',
        "export FP8LAUNCH_STOP_AT",
    ]


def _start(job: Job) -> list[str]:
    """Where the training starts from. What prepares a first start (a finetune, say) would undo a later one."""
    if job.survival is None:
        return []
    lines = [
        "# From the run's own checkpoint as soon as there is one.",
        f"if [ -s {quote(tracker(job.survival))} ]; then",
        f"{INDENT}megatron_args+=(--load {quote(job.survival.save)})",
    ]
    if job.survival.first:
        lines += ["else", f"{INDENT}megatron_args+=({' '.join(flag_lines(job.survival.first))})"]
    return [*lines, "fi"]


def _from_the_script(job: Job) -> list[str]:
    """Variables that the script itself sets for the processes."""
    return ["MASTER_ADDR", "MASTER_PORT", *(["FP8LAUNCH_STOP_AT"] if job.survival else [])]


def _environment(job: Job) -> list[str]:
    lines = [f"export {name}={quote(value)}" for name, value in job.environment]
    for name in job.secrets:
        lines.append(f': "${{{name}:?fp8launch: the secret {name} did not reach the job}}"')
    lines += phase_cases(job, lambda one: [f"export {name}={quote(value)}" for name, value in one.environment])
    return ["# Environment of the recipe and the cluster.", *lines] if lines else []


def _container_environment(job: Job, *rendezvous: str) -> list[str]:
    """What makes Apptainer pass the job's variables on; the other runtimes take them as they are, or by an option."""
    if job.container is None or job.container.runtime != "apptainer":
        return []
    names = [*_common_names(job), *rendezvous]
    return [
        "# An image's own environment wins over the host's, unless a variable has this prefix.",
        *(f'export APPTAINERENV_{name}="${name}"' for name in names),
        *phase_cases(job, lambda one: [f'export APPTAINERENV_{name}="${name}"' for name, _ in one.environment]),
    ]


def _rendezvous() -> list[str]:
    return [
        "# All processes meet at the first node of this job's own list, on a port of this job's own.",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
    ]


def _health(job: Job, *options: str) -> list[str]:
    if job.health_gpus is None:
        return []
    look = " ".join(["bash", '"$code/health.sh"', *options, f"--gpus={job.health_gpus}"])
    return [
        "# One sick node stops or slows all others, so each is looked at first.",
        f'if ! {look} 2>&1 | tee -a "$attempt.log"; then',
        f'{INDENT}echo {UNHEALTHY} > "$attempt.exit" || true',
        *([f"{INDENT}status={UNHEALTHY}", *(INDENT + line for line in _end(job))] if job.survival else []),
        f"{INDENT}exit {UNHEALTHY}" if job.survival is None else f"{INDENT}exit",
        "fi",
    ]


def _arguments(job: Job) -> list[str]:
    lines = ["megatron_args=(", *(INDENT + line for line in flag_lines(job.megatron_args)), ")"]
    if job.phases:
        lines += ["# And what is the phase's own.", *phase_cases(job, own_arguments)]
    if job.folder is None:
        lines += [
            "# What follows the script's name on sbatch's command line goes to Megatron too, and wins.",
            'megatron_args+=("$@")',
        ]
    return lines


def _step(job: Job) -> list[str]:
    srun: list[list[Word]] = [
        ["srun"],
        # A rank that fails ends all at once; those that finish wait for the one that still saves.
        ["--label", "--kill-on-bad-exit=1", "--wait=300"],
        [Expansion('--output="$attempt.log"'), "--open-mode=append"],
    ]
    if job.mpi:
        srun.append([f"--mpi={job.mpi}"])
    if job.cpus_per_task:
        # srun of Slurm 22.05 and 23.02 does not take this from the job.
        srun.append([f"--cpus-per-task={job.cpus_per_task}"])
    end_watch = ["{ kill $! && wait $!; } 2> /dev/null || true"] if job.survival else []
    lines = _with_status([*srun, *_container(job), *process_command(job)], after=end_watch)
    if job.survival is None:
        return lines
    return [
        "# A log that stops growing ends the training.",
        f'{_keeper(job)} watch "$run_folder" "$attempt" &',
        *lines[:-1],
        "# Done, or another attempt, or the end of it.",
        *_end(job),
    ]


def _end(job: Job) -> list[str]:
    return [f'{_keeper(job)} end "$run_folder" "$attempt" "$status" || exit']


def _with_status(command: Sequence[Sequence[Word]], redirect: str = "", after: Sequence[str] = ()) -> list[str]:
    """The command in lines, and its exit status kept in a file for when Slurm has forgotten the job.

    `after` may change the status.
    """
    lines = f" \\\n{INDENT}".join(" ".join(map(quote, words)) for words in command if words)
    return [
        "status=0",
        f"{lines} {redirect}".rstrip() + " || status=$?",
        *after,
        'echo "$status" > "$attempt.exit" || true',
        'exit "$status"',
    ]


def process_command(job: Job) -> list[list[Word]]:
    """What each srun task runs: a rank, or torchrun for the ranks of its node. In lines for reading."""
    start: list[Word] = [Expansion('"$python"')]
    if job.mode == "torchrun":
        start += [Expansion('"$code/node.py"'), f"--nproc-per-node={job.processes_per_node}"]
    else:
        start += [Expansion('"$code/worker.py"')]
    if job.training_script is not None:
        start += ["--script", job.training_script]
    return [[*start, "--", Expansion('"${megatron_args[@]}"')]]


def _container(job: Job) -> list[list[Word]]:
    box = job.container
    if box is None:
        return []
    here = '"$run_folder"'
    image: Word = Expansion('"$image"') if job.folder is None else box.image
    own = "$run_folder:$run_folder" + (",$home:$home" if job.folder is None else "")
    if box.runtime == "pyxis":
        mounts = ",".join([f'"{own}"', *(quote(str(m)) for m in box.mounts)])
        return [
            [Expansion(f"--container-image={quote(image)}")],
            [Expansion(f"--container-mounts={mounts}")],
            [Expansion(f"--container-workdir={here}"), "--no-container-mount-home"],
            ["--container-env=" + ",".join([*_names(job), *_from_the_script(job)])],
        ]
    binds = [Expansion(f'--bind="{pair}"') for pair in own.split(",")]
    # ch-run knows no read-only mounts and would take ":ro" for a part of the name.
    plain = box.runtime == "charliecloud"
    binds += [Expansion(f"--bind={quote(f'{m.source}:{m.target}' if plain else str(m))}") for m in box.mounts]
    if box.runtime == "apptainer":
        gpus: list[Word] = ["--nv"] if box.gpus else []
        return [["apptainer", "exec", *gpus, Expansion(f"--pwd={here}")], list(binds), [image]]
    return [["ch-run", Expansion(f"--cd={here}")], list(binds), [image, "--"]]


def _names(job: Job) -> Iterable[str]:
    """The variables of the recipe and the cluster, which must win over what an image sets."""
    of_phases = dict.fromkeys(name for one in job.phases for name, _ in one.environment)
    return (*_common_names(job), *of_phases)


def _common_names(job: Job) -> Iterable[str]:
    return (*(name for name, _ in job.environment), *job.secrets)
