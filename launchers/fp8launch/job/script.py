"""The parts of a run's shell script that all schedulers share. Every value in the returned lines is quoted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fp8launch import __version__
from fp8launch.injob.supervisor.checkpoints import TRACKER
from fp8launch.injob.supervisor.failures import ALL_WRITTEN
from fp8launch.job.job import Job, JobPhase
from fp8launch.job.shell_quoting import INDENT, RawShell, Word, array_lines, flag_lines, indented, quote

# EX_TEMPFAIL of sysexits.h, because the same job may succeed on other nodes.
UNHEALTHY = 75
# The program that injob/rank/node.py starts by default.
NODE_STARTS = "worker.py"
AUTHOR = f"Written by fp8launch {__version__}."
WITH_ENVIRONMENT = RawShell('env "${environment[@]}"')
# $! is the log watcher, which is the last background process that the script started.
END_WATCH = ["{ kill $! && wait $!; } 2> /dev/null || true"]


def join_blocks(blocks: Iterable[Sequence[str]]) -> str:
    """Join blocks to a script, with an empty line between them. Empty blocks are left out."""
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def run_places(job: Job, folder: str) -> list[str]:
    """Set the run folder, the in-job programs and Python, for a job whose run folder exists."""
    return [
        "set -euo pipefail",
        f"run_folder={quote(folder)}",
        "code=$run_folder/code/fp8launch/injob",
        f"python={quote(job.python)}",
    ]


def attempt_places(
    job_id: str, restart: str, make_folder: Sequence[str] = ('mkdir -p "$run_folder/logs"',)
) -> list[str]:
    """Set the names of the job and of this attempt, and enter the run folder.

    `job_id` is a shell expression for the job's id. `restart` is the variable that counts restarts of this job.
    """
    return [
        "# A requeued job keeps its id, so each attempt has its own log.",
        f"job={job_id}",
        f"attempt=$run_folder/logs/$job-${{{restart}:-0}}",
        *make_folder,
        'cd "$run_folder"',
    ]


def setup_lines(job: Job) -> list[str]:
    if not job.setup:
        return []
    # Module systems use unset variables and failing commands, which `set -eu` would turn into errors.
    return ["# Set-up lines of the cluster profile.", "set +eu", *job.setup, "set -eu"]


def end_lines(commands: Sequence[str]) -> list[str]:
    """Run commands of plugins when the script exits or is terminated, whatever its status, which they read in $ended.

    They come before the cluster profile's lines, which may end the script. Commands contain no single quotes.
    """
    if not commands:
        return []
    # A local run that is cancelled ends all its processes with SIGTERM.
    acts = "; ".join(f"{command} || true" for command in commands)
    return [
        "# Commands at the end of the run. They do not change the exit status.",
        f"trap 'ended=$?; trap \"\" TERM; {acts}' EXIT",
    ]


def host_python(job: Job) -> str:
    """Return the Python for programs that run on the host, outside the container.

    These programs call the scheduler's commands, which container images lack.
    """
    return '"$python"' if job.container is None else "python3"


def supervisor(job: Job) -> str:
    return f'{host_python(job)} "$code/supervisor/supervisor.py"'


def begin_attempt(job: Job) -> list[str]:
    """Ask the supervisor whether there is work left, when to stop, and which phase is next."""
    if job.survival is None:
        return []
    lines = []
    if job.survival.pickled_state:
        lines += [
            "# A resume unpickles the state of delayed scaling, but only of checkpoints that nobody else can write to.",
            "umask go-w",
        ]
    ask = f'$({supervisor(job)} begin "$run_folder" "$attempt") || exit'
    if job.phases:
        lines += [
            "# When must the training save and exit, and which phase is next? Empty if nothing is left to do.",
            f"begun={ask}",
            'read -r FP8LAUNCH_STOP_AT phase <<< "$begun" || true',
        ]
    else:
        lines += [
            "# When must the training save and exit? Empty if nothing is left to do.",
            f"FP8LAUNCH_STOP_AT={ask}",
        ]
    return [*lines, '[ -n "$FP8LAUNCH_STOP_AT" ] || exit 0', "export FP8LAUNCH_STOP_AT"]


def watch_attempt(job: Job) -> str:
    """Start the supervisor in the background, alongside the training."""
    return f'{supervisor(job)} watch "$run_folder" "$attempt" &'


def end_attempt(job: Job) -> str:
    """Let the supervisor decide what happens after this attempt. The script exits with the supervisor's status."""
    return f'{supervisor(job)} end "$run_folder" "$attempt" "$status" || exit'


def start_arguments(job: Job) -> list[str]:
    """Add the arguments for a first start or for a resume. On a resume, `--finetune` would discard the progress."""
    if job.survival is None:
        return []
    tracker = f"{job.survival.checkpoint}/{TRACKER}"
    lines = [
        "# Load the run's own checkpoint as soon as there is one.",
        f"if [ -s {quote(tracker)} ]; then",
        f"{INDENT}megatron_args+=({' '.join(flag_lines(job.survival.resume))})",
    ]
    if job.survival.pickled_state:
        lines += [
            f"{INDENT}# Transformer Engine loads the state of delayed scaling only from a trusted checkpoint. What the",
            f"{INDENT}# recipe sets comes later, and wins.",
            f'{INDENT}trusted=$({supervisor(job)} unpickle "$run_folder" "$attempt")',
            f'{INDENT}environment=(${{trusted:+"$trusted"}} "${{environment[@]}}")',
        ]
    if job.survival.skip_flag:
        lines += [
            f"{INDENT}# Without the batches before which the run went back to a checkpoint (health.actions).",
            f'{INDENT}megatron_args+=($({supervisor(job)} skip "$run_folder" "$attempt"))',
        ]
    if job.survival.first_start:
        lines += ["else", f"{INDENT}megatron_args+=({' '.join(flag_lines(job.survival.first_start))})"]
    return [*lines, "fi"]


def environment_lines(job: Job) -> list[str]:
    """Collect the variables of the recipe and the cluster as words that `env` passes to the processes.

    They are never set in bash itself, because bash executes the contents of some variables as soon as they are set.
    """
    lines = [
        "# Environment of the recipe and the cluster profile. Only the training processes get it, through `env`.",
        *array_lines("environment=", _pairs(job.environment)),
    ]
    lines += [f': "${{{name}:?fp8launch: the secret {name} did not reach the job}}"' for name in job.secrets]
    return [*lines, *_phase_cases(job, "environment+=", lambda phase: _pairs(phase.environment))]


def _pairs(variables: Iterable[tuple[str, str]]) -> list[str]:
    return [quote(f"{name}={value}") for name, value in variables]


def argument_lines(job: Job, *more: str) -> list[str]:
    """Collect the arguments of the training, followed by the lines `more`."""
    lines = array_lines("megatron_args=", flag_lines(job.arguments))
    if job.phases:
        cases = _phase_cases(job, "megatron_args+=", lambda phase: flag_lines(phase.arguments))
        lines += ["# Add the phase's own arguments.", *cases]
    return [*lines, *more]


def _phase_cases(job: Job, assignment: str, words_of: Callable[[JobPhase], Sequence[str]]) -> list[str]:
    """Return a `case` statement that adds the words of each phase to an array, or nothing if no phase has any."""
    cases: list[str] = []
    for phase in job.phases:
        if words := words_of(phase):
            cases += [f"{quote(phase.name)})", *indented([*array_lines(assignment, words), ";;"])]
    if not cases:
        return []
    return ['case "$phase" in', *cases, "esac"]


def health_lines(job: Job, *options: str) -> list[str]:
    """Test every node before the training. `options` are passed to health.sh. A supervisor is told about bad nodes."""
    if job.health_gpus is None:
        return []
    look = " ".join(["bash", '"$code/health.sh"', *options, f"--gpus={job.health_gpus}"])
    unhealthy = [f'echo {UNHEALTHY} > "$attempt.exit" || true']
    if job.survival:
        unhealthy += [f"status={UNHEALTHY}", end_attempt(job), "exit"]
    else:
        unhealthy.append(f"exit {UNHEALTHY}")
    return [
        "# One unhealthy node stops or slows all others, so every node is checked first.",
        f'if ! {look} 2>&1 | tee -a "$attempt.log"; then',
        *indented(unhealthy),
        "fi",
    ]


def training_step(command: Sequence[Sequence[Word]], redirect: str = "", after: Sequence[str] = ()) -> list[str]:
    """Run a command and exit with its status. A file keeps the status in case the scheduler forgets the job.

    The lines `after` run after the command and may change `status`.
    """
    lines = f" \\\n{INDENT}".join(" ".join(map(quote, words)) for words in command if words)
    return [
        "status=0",
        f"{lines} {redirect}".rstrip() + " || status=$?",
        *after,
        "# A process may still abort while it exits, after everything is written.",
        f'[ "$status" = 0 ] || ! grep -qsF {quote(ALL_WRITTEN)} "$attempt.log" || status=0',
        'echo "$status" > "$attempt.exit" || true',
        'exit "$status"',
    ]


def process_command(job: Job) -> list[list[Word]]:
    """Return the command of each task in readable lines: one rank, or a torchrun that starts all ranks of a node."""
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


# Apptainer and Charliecloud are commands. Pyxis is a Slurm plugin and lives in `schedulers/slurm/pyxis.py`.


def start_in_container(job: Job) -> list[list[Word]]:
    """Return the Apptainer or Charliecloud command to put before a process's command; empty for other runtimes."""
    container = job.container
    if container is None or container.runtime == "pyxis":
        return []
    # The run folder comes last, because a later mount hides earlier ones below its target.
    binds: list[Word] = [RawShell(f"--bind={quote(str(mount))}") for mount in container.mounts]
    binds += [RawShell(f'--bind="{own}"') for own in own_mounts(job)]
    image = image_word(job)
    if container.runtime == "apptainer":
        start: list[Word] = ["apptainer", "exec"]
        if container.gpus:
            start.append("--nv")
        return [[*start, RawShell('--pwd="$run_folder"')], binds, [image]]
    return [["ch-run", RawShell('--cd="$run_folder"')], binds, [image, "--"]]


def image_word(job: Job) -> Word:
    """Return the job's image, or the variable that holds it in a portable script."""
    assert job.container is not None
    return RawShell('"$image"') if job.folder is None else job.container.image


def own_mounts(job: Job) -> list[str]:
    """Return the mounts that every job needs, as script variables. A portable script also needs the checkout."""
    mounts = ["$run_folder:$run_folder"]
    if job.folder is None:
        mounts.append("$home:$home")
    return mounts


def variable_names(job: Job) -> Iterable[str]:
    """Return the names of the recipe's and the cluster's variables, which must override the image's."""
    of_phases = {name: value for phase in job.phases for name, value in phase.environment}
    return (*dict(job.environment), *job.secrets, *of_phases)


def script_variables(job: Job) -> list[str]:
    """Return the names of the variables that the script sets for the processes."""
    names = ["MASTER_ADDR", "MASTER_PORT"]
    if job.survival:
        names.append("FP8LAUNCH_STOP_AT")
    return names


def container_environment(job: Job, *from_the_script: str) -> list[str]:
    """Export the job's variables for Apptainer. Other runtimes inherit them or take them as options."""
    if job.container is None or job.container.runtime != "apptainer":
        return []
    prefixed = 'environment+=("${environment[@]/#/APPTAINERENV_}")'
    exports = [f'export APPTAINERENV_{name}="${name}"' for name in (*job.secrets, *from_the_script)]
    return [
        "# An image's own environment wins over the host's, unless a variable has this prefix.",
        prefixed,
        *exports,
    ]
