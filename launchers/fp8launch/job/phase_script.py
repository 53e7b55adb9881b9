"""The parts of a run's scripts that only runs with phases have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8launch.injob.supervisor.checkpoints import TRACKER
from fp8launch.job.job import Job, JobPhase, Survival
from fp8launch.job.shell_quoting import array_lines, flag_lines, indented, quote


def phase_cases(job: Job, lines_of: Callable[[JobPhase], Sequence[str]]) -> list[str]:
    """A `case` over the phases, with the lines of each; empty if no phase has lines of its own."""
    cases: list[str] = []
    for one in job.phases:
        if own := lines_of(one):
            cases += [f"{quote(one.name)})", *indented([*own, ";;"])]
    if not cases:
        return []
    return ['case "$phase" in', *cases, "esac"]


def own_arguments(one: JobPhase) -> list[str]:
    lines = flag_lines(one.arguments)
    if not lines:
        return []
    return array_lines("megatron_args+=", lines)


def tracker(survival: Survival) -> str:
    return f"{survival.checkpoint}/{TRACKER}"
