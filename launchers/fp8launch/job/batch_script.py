"""The text of a batch script: one pure function."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fp8launch import __version__
from fp8launch.injob.supervisor.failures import ALL_WRITTEN
from fp8launch.job.container_script import (
    container_environment,
    remove_killed_containers,
    remove_left_containers,
    script_variables,
    start_in_container,
)
from fp8launch.job.job import Job, JobPhase
from fp8launch.job.phase_script import own_arguments, phase_cases, tracker
from fp8launch.job.portable_script import (
    explain_failure,
    host_python,
    make_run_folder,
    portable_places,
    record_run,
)
from fp8launch.job.shell_quoting import INDENT, RawShell, Word, array_lines, flag_lines, indented, quote
from fp8launch.wording import counted

# EX_TEMPFAIL of sysexits.h: the same job may well work elsewhere.
UNHEALTHY = 75
# The program that injob/rank/node.py starts by default.
NODE_STARTS = "worker.py"
AUTHOR = f"Written by fp8launch {__version__}."

# The script's own names, which a recipe cannot use for a variable.
OWN_VARIABLES = {
    "again", "attempt", "begun", "code", "environment", "home", "hosts", "image", "job", "megatron_args", "phase",
    "python", "run_folder", "runs", "status", "trusted", "FP8LAUNCH_START", "FP8LAUNCH_STOP_AT", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip
_WITH_ENVIRONMENT = RawShell('env "${environment[@]}"')

# The log watcher was started right before the step.
_END_WATCH = ["{ kill $! && wait $!; } 2> /dev/null || true"]


def batch_script(job: Job) -> str:
    """The script that sbatch runs for `job`, and that the submitit backend runs on the batch host."""
    blocks = [
        _header(job),
        _places(job),
        _setup(job),
        _begin(job),
        _environment(job),
        _arguments(job),
        record_run(job),
        _rendezvous(),
        container_environment(job, *script_variables(job)),
        _health(job, "--all-nodes"),
        remove_left_containers(job),
        _start(job),
        _step(job),
    ]
    return _script(blocks)


def array_script(options: Sequence[tuple[str, str | None]], tasks: str) -> str:
    """The batch script of a job array: task N runs the script of the Nth run folder in the file `tasks`."""
    return "\n".join(
        [
            "#!/bin/bash",
            f"# A job array: runs that ask Slurm for the same and differ in values. {AUTHOR}",
            *sbatch_lines(options),
            "",
            "set -euo pipefail",
            f"mapfile -t runs < {quote(tasks)}",
            'exec bash "${runs[SLURM_ARRAY_TASK_ID]}/job.sbatch"',
            "",
        ]
    )


def local_script(job: Job) -> str:
    """The script of a run on this machine: the same processes, started by torchrun instead of Slurm."""
    head = ["#!/bin/bash", f"# {job.name}: {counted(job.processes_per_node, 'process')}. {AUTHOR}"]
    start: list[Word] = [_WITH_ENVIRONMENT]
    if "=" in job.python:
        # `env` would take the program for another variable.
        start += ["nice", "-n", "0"]
    command = [start, *start_in_container(job), *process_command(replace(job, mode="torchrun"))]
    redirect = '>> "$attempt.log" 2>&1'
    supervised = job.survival is not None
    step = _with_status(command, redirect)
    variables = []
    if supervised:
        step = _supervised_here(job, _with_status(command, redirect, _END_WATCH))
        variables.append("FP8LAUNCH_STOP_AT")
    blocks = [
        head,
        _places(job, "FP8LAUNCH_START"),
        _setup(job),
        _begin(job),
        _environment(job),
        container_environment(job, *variables),
        _health(replace(job, survival=None)),
        _arguments(job),
        _start(job),
        step,
    ]
    return _script(blocks)


def _script(blocks: Iterable[Sequence[str]]) -> str:
    """The blocks of lines, those that are not empty, with an empty line between them."""
    return "\n\n".join(map("\n".join, filter(None, blocks))) + "\n"


def _header(job: Job) -> list[str]:
    size = f"{counted(job.nodes, 'node')} x {counted(job.processes_per_node, 'process')}"
    lines = ["#!/bin/bash", f"# {job.name}: {size}. {AUTHOR}"]
    if job.folder is None:
        lines += [
            "# Submit it from the top of a checkout of fp8launch: sbatch slurm/NAME.sbatch. Account, partition and",
            "# the like: on sbatch's command line, or as #SBATCH lines below these.",
        ]
    return [*lines, *sbatch_lines(job.slurm)]


def sbatch_lines(options: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return the lines of a batch script that set sbatch's options; None stands for an option without a value."""
    lines = []
    for name, value in options:
        line = f"#SBATCH --{name}"
        if value is not None:
            line += f"={shlex.quote(value)}"
        lines.append(line)
    return lines


def _supervised_here(job: Job, step: list[str]) -> list[str]:
    """A step on this machine with its supervisor; another attempt is this script once more, in the same process."""
    return [
        "# A log that stops growing ends the training, and old checkpoints go as new ones come.",
        f'{_supervisor(job)} watch "$run_folder" "$attempt" &',
        *step[:-1],
        "# Done, or another attempt, or the end of it.",
        f'again=$({_supervisor(job)} end "$run_folder" "$attempt" "$status") || exit',
        '[ -n "$again" ] || exit "$status"',
        "export FP8LAUNCH_START=$((${FP8LAUNCH_START:-0} + 1))",
        'exec bash "$0"',
    ]


def _places(job: Job, restart: str = "SLURM_RESTART_COUNT") -> list[str]:
    if job.folder is not None:
        lines = [
            "set -euo pipefail",
            f"run_folder={quote(job.folder)}",
            "code=$run_folder/code/fp8launch/injob",
            f"python={quote(job.python)}",
        ]
    else:
        lines = ["set -euo pipefail", *portable_places(job)]
    return [
        *lines,
        "# A requeued job keeps its id, so each attempt has a log of its own.",
        "job=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-local}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}",
        f"attempt=$run_folder/logs/$job-${{{restart}:-0}}",
        *(make_run_folder() if job.folder is None else ['mkdir -p "$run_folder/logs"']),
        'cd "$run_folder"',
    ]


def _setup(job: Job) -> list[str]:
    if not job.setup:
        return []
    # Module systems read unset variables and test commands that fail.
    return ["# Set-up lines of the cluster profile.", "set +eu", *job.setup, "set -eu"]


def _supervisor(job: Job) -> str:
    return f'{host_python(job)} "$code/supervisor/supervisor.py"'


def _begin(job: Job) -> list[str]:
    if job.survival is None:
        return []
    lines = []
    if job.survival.pickled_state:
        lines += [
            "# A resume unpickles the state of delayed scaling, but only of checkpoints that nobody else can write to.",
            "umask go-w",
        ]
    if job.phases:
        return [
            *lines,
            "# Is something left to do? Then until when (the training saves and leaves before Slurm ends the job), and",
            "# in which phase: that of the newest checkpoint.",
            f'begun=$({_supervisor(job)} begin "$run_folder" "$attempt") || exit',
            'read -r FP8LAUNCH_STOP_AT phase <<< "$begun" || true',
            '[ -n "$FP8LAUNCH_STOP_AT" ] || exit 0',
            "export FP8LAUNCH_STOP_AT",
        ]
    return [
        *lines,
        "# Is something left to do? Then until when: the training saves and leaves before Slurm ends the job.",
        f'FP8LAUNCH_STOP_AT=$({_supervisor(job)} begin "$run_folder" "$attempt") || exit',
        '[ -n "$FP8LAUNCH_STOP_AT" ] || exit 0',
        "export FP8LAUNCH_STOP_AT",
    ]


def _start(job: Job) -> list[str]:
    """The arguments of a first start or a resume. Those of a first start, such as a finetune's, would undo a resume."""
    if job.survival is None:
        return []
    lines = [
        "# From the run's own checkpoint as soon as there is one.",
        f"if [ -s {quote(tracker(job.survival))} ]; then",
        f"{INDENT}megatron_args+=({' '.join(flag_lines(job.survival.resume))})",
    ]
    if job.survival.pickled_state:
        lines += [
            f"{INDENT}# Transformer Engine loads the state of delayed scaling only from a trusted checkpoint. What the",
            f"{INDENT}# recipe sets comes later, and wins.",
            f'{INDENT}trusted=$({_supervisor(job)} unpickle "$run_folder" "$attempt")',
            f'{INDENT}environment=(${{trusted:+"$trusted"}} "${{environment[@]}}")',
        ]
    if job.survival.skip_flag:
        lines += [
            f"{INDENT}# Without the batches before which the run went back to a checkpoint (health.actions).",
            f'{INDENT}megatron_args+=($({_supervisor(job)} skip "$run_folder" "$attempt"))',
        ]
    if job.survival.first_start:
        lines += ["else", f"{INDENT}megatron_args+=({' '.join(flag_lines(job.survival.first_start))})"]
    return [*lines, "fi"]


def _environment(job: Job) -> list[str]:
    """The variables of the recipe and the cluster, as words that `env` gives to the processes.

    Bash itself never has them: some of its variables run what they hold as soon as they are set.
    """
    lines = [
        "# Environment of the recipe and the cluster, for the processes only: `env` hands it over.",
        *array_lines("environment=", _pairs(job.environment)),
    ]
    for name in job.secrets:
        lines.append(f': "${{{name}:?fp8launch: the secret {name} did not reach the job}}"')
    return [*lines, *phase_cases(job, _own_environment)]


def _own_environment(phase: JobPhase) -> list[str]:
    if not phase.environment:
        return []
    return array_lines("environment+=", _pairs(phase.environment))


def _pairs(variables: Iterable[tuple[str, str]]) -> list[str]:
    return [quote(f"{name}={value}") for name, value in variables]


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
    unhealthy = [f'echo {UNHEALTHY} > "$attempt.exit" || true']
    if job.survival:
        unhealthy += [f"status={UNHEALTHY}", *_end(job), "exit"]
    else:
        unhealthy.append(f"exit {UNHEALTHY}")
    return [
        "# One sick node stops or slows all others, so each is looked at first.",
        f'if ! {look} 2>&1 | tee -a "$attempt.log"; then',
        *indented(unhealthy),
        "fi",
    ]


def _arguments(job: Job) -> list[str]:
    lines = array_lines("megatron_args=", flag_lines(job.arguments))
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
        [_WITH_ENVIRONMENT, "srun"],
        # A rank that fails ends all at once; those that finish wait for the one that still saves.
        ["--label", "--kill-on-bad-exit=1", "--wait=300"],
        [RawShell('--output="$attempt.log"'), "--open-mode=append"],
    ]
    if job.mpi:
        srun.append([f"--mpi={job.mpi}"])
    if job.cpus_per_task:
        # srun of Slurm 22.05 and 23.02 does not take this from the job.
        srun.append([f"--cpus-per-task={job.cpus_per_task}"])
    end_watch = _END_WATCH if job.survival else []
    lines = _with_status([*srun, *start_in_container(job), *process_command(job)], after=end_watch)
    lines[-1:-1] = [*remove_killed_containers(job), *explain_failure(job)]
    if job.survival is None:
        return lines
    return [
        "# A log that stops growing ends the training.",
        f'{_supervisor(job)} watch "$run_folder" "$attempt" &',
        *lines[:-1],
        "# Done, or another attempt, or the end of it.",
        *_end(job),
    ]


def _end(job: Job) -> list[str]:
    return [f'{_supervisor(job)} end "$run_folder" "$attempt" "$status" || exit']


def _with_status(command: Sequence[Sequence[Word]], redirect: str = "", after: Sequence[str] = ()) -> list[str]:
    """The command in lines, and its exit status kept in a file for when Slurm has forgotten the job.

    `after` may change the status.
    """
    lines = f" \\\n{INDENT}".join(" ".join(map(quote, words)) for words in command if words)
    return [
        "status=0",
        f"{lines} {redirect}".rstrip() + " || status=$?",
        *after,
        "# A process may still abort on its way out, once everything is written.",
        f'[ "$status" = 0 ] || ! grep -qsF {quote(ALL_WRITTEN)} "$attempt.log" || status=0',
        'echo "$status" > "$attempt.exit" || true',
        'exit "$status"',
    ]


def process_command(job: Job) -> list[list[Word]]:
    """The command of each srun task, a rank or torchrun for the ranks of its node, broken into readable lines."""
    start: list[Word] = [RawShell('"$python"')]
    program = job.entry.program
    if job.mode == "torchrun":
        start += [RawShell('"$code/rank/node.py"'), f"--nproc-per-node={job.processes_per_node}"]
        if program != NODE_STARTS:
            start += [f"--worker={program}"]
    elif program.startswith("/"):
        start.append(program)
    elif job.entry.plugin is not None:
        start.append(RawShell(f'"$code/../plugins/{job.entry.plugin}/injob/{program}"'))
    else:
        start.append(RawShell(f'"$code/rank/{program}"'))
    return [[*start, *job.entry.options, "--", RawShell('"${megatron_args[@]}"')]]
