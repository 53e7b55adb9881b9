"""The parts of a run's scripts that only runs with phases have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8launch.injob.supervisor.checkpoints import TRACKER
from fp8launch.job.job import Job, JobPhase, Survival
from fp8launch.job.shell_quoting import INDENT, flag_lines, quote

# EX_TEMPFAIL of sysexits.h: the same may well work another time.
LEFT_EARLY = 75


def phase_cases(job: Job, lines_of: Callable[[JobPhase], Sequence[str]]) -> list[str]:
    """A `case` over the phases, with the lines of each; empty if no phase has lines of its own."""
    cases: list[str] = []
    for one in job.phases:
        if own := lines_of(one):
            cases += [f"{quote(one.name)})", *(INDENT + line for line in own), f"{INDENT};;"]
    return ['case "$phase" in', *cases, "esac"] if cases else []


def own_arguments(one: JobPhase) -> list[str]:
    lines = flag_lines(one.arguments)
    return ["megatron_args+=(", *(INDENT + line for line in lines), ")"] if lines else []


def one_by_one(job: Job) -> list[str]:
    """Phases without Slurm: the script runs itself once for each, so that none inherits anything of the one before."""
    if not job.phases or job.survival is None:
        return []
    cases = phase_cases(job, lambda one: [f"phase_end={one.end} attempt=$run_folder/logs/$job-{job.phases.index(one)}"])
    return [
        "if [ $# -eq 0 ]; then",
        f"{INDENT}for phase in {' '.join(quote(one.name) for one in job.phases)}; do",
        f'{INDENT * 2}bash "$0" "$phase" || exit',
        f"{INDENT}done",
        f"{INDENT}exit 0",
        "fi",
        "phase=$1",
        *cases,
        "# The iteration of the newest checkpoint.",
        "reached() {",
        # A pipe in its place would never end.
        f"{INDENT}[ -f {quote(tracker(job.survival))} ] && head -c 20 {quote(tracker(job.survival))} || echo 0",
        "}",
        '[ "$(reached)" -lt "$phase_end" ] || exit 0',
    ]


def short_of_its_end(job: Job) -> list[str]:
    """The next phase must not begin where this one was asked to leave early."""
    if not job.phases:
        return []
    return [f'[ "$status" -ne 0 ] || [ "$(reached)" -ge "$phase_end" ] || status={LEFT_EARLY}']


def tracker(survival: Survival) -> str:
    return f"{survival.checkpoint}/{TRACKER}"
