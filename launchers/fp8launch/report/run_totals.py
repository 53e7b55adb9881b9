"""Totals of a run beside its speed: memory, parameters, validations, counters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fp8launch.injob.supervisor.health_rules import IS_NAN
from fp8launch.logs import LoggedProcesses, ParsedLog
from fp8launch.logs.field_names import NOT_FINITE
from fp8launch.report.run_report import LARGEST
from fp8launch.report.steady_state import Line, values


def validations_of(logs: Sequence[ParsedLog]) -> tuple[Mapping[str, object], ...]:
    """Return every validation of a run, oldest first, as the JSON report has them."""
    found: list[Mapping[str, object]] = []
    for log in logs:
        for one in log.validations:
            found.append({"iteration": one.iteration, "name": one.name, "losses": dict(one.losses)})
    return tuple(found)


def count_of(attempts: LoggedProcesses, lines: Sequence[Line], name: str) -> int:
    """Sum a counter. The first line of a process does not reset it, so the second line holds its count as well."""
    second = {}
    for i, (_, process) in enumerate(attempts):
        if len(process.rows) > 1:
            second[i, process.rows[0]] = (i, process.rows[1])
    counts = {}
    for line, value in zip(lines, values(lines, name), strict=True):
        if 0 < value < LARGEST:
            counts[line.attempt, line.row] = value
    total = 0
    for key, value in counts.items():
        if key in second and counts.get(second[key], 0.0) >= value:
            continue
        total += int(value)
    return total


def nan_lines(lines: Sequence[Line]) -> int:
    """Count the lines that print NaN: not every program counts such iterations itself."""
    return sum(value == IS_NAN for value in values(lines, NOT_FINITE))


def peak_memory_mib(logs: Sequence[ParsedLog], kept: Sequence[Line]) -> float | None:
    """Megatron's `max allocated` in MiB over all ranks that print it, else the memory in a fork's own lines."""
    peak = max((log.peak_memory.get("max allocated", 0.0) for log in logs), default=0.0)
    if not peak:
        used = list(filter(math.isfinite, values(kept, "memory_used_gib")))
        peak = max(used, default=0.0) * 1024
    return peak or None


def parameters_of(attempts: LoggedProcesses) -> int | None:
    """Parameters as printed, summed over model-parallel ranks (experts of other ranks are not printed)."""
    for _, process in reversed(attempts):
        if process.head.parameters:
            return sum(process.head.parameters.values())
    return None
