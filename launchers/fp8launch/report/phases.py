"""The phases of a run: which processes belong to each, and a table of them.

A phase's last iteration ends its process, so every process belongs to one phase. The manifest of our own runs lists
their phases; in other logs, a change of precision begins a phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fp8launch.hardware.quantization import requested
from fp8launch.logs import ParsedLog, Process
from fp8launch.report.run_report import RunReport, Statistic
from fp8launch.wording import rounded

NONE = "–"
_PRECISION = ("fp8", "fp8_recipe", "fp8_param_gather", "fp8_quantizer_factory", "fp4", "fp4_recipe", "bf16", "fp16")


@dataclass(frozen=True)
class PhaseSpan:
    """Iterations `begin` + 1 to `end` of a training; `end` is None if it is unknown.

    `arguments` are the phase's arguments in the manifest, empty without one.
    """

    name: str
    begin: int
    end: int | None
    arguments: Mapping[str, object] = field(default_factory=dict, compare=False)


def by_phase(logs: Sequence[ParsedLog], spans: Sequence[PhaseSpan] = ()) -> list[tuple[PhaseSpan, list[ParsedLog]]]:
    """Cut the logs down to the processes of each phase that has begun; nothing for a run without phases."""
    if not spans:
        return _by_precision(logs)
    processes: dict[int, list[Process]] = {}
    for log in logs:
        for process in log.processes:
            processes.setdefault(spans.index(_span_of(log, process, spans)), []).append(process)
    return [(spans[i], _cut(logs, processes[i])) for i in sorted(processes)]


# Headers of the columns of `phase_cells`, and whether a column holds numbers.
PHASE_COLUMNS = {
    "phase": False, "iterations": False, "status": False, "FP8": False, "step time (ms)": True, "tokens/s/GPU": True,
    "TFLOP/s/GPU": True, "last loss": True, "lines": True,
}  # fmt: skip


def phase_cells(report: RunReport) -> list[tuple[str, ...]]:
    """Render a row of text for each phase of a run."""
    rows = []
    for phase in report.phases:
        one = phase.report
        loss = NONE if one.training.loss_last is None else f"{one.training.loss_last:.4f}"
        lines = one.speed.step_time_ms.n if one.speed.step_time_ms else 0
        speeds = map(_median, (one.speed.step_time_ms, one.speed.tokens_per_s_per_gpu, one.speed.tflops_per_gpu))
        rows.append((phase.name, phase.span, one.status.replace("_", " "), phase.precision, *speeds, loss, str(lines)))
    return rows


def _median(value: Statistic | None) -> str:
    return NONE if value is None else rounded(value.median, 1)


def _cut(logs: Sequence[ParsedLog], processes: Sequence[Process]) -> list[ParsedLog]:
    """Return the logs with only these processes."""
    wanted = set(map(id, processes))
    found = []
    for log in logs:
        mine = tuple(process for process in log.processes if id(process) in wanted)
        if mine:
            found.append(replace(log, processes=mine))
    return found


def first_and_last(log: ParsedLog, process: Process) -> list[int]:
    """Return the first and the last iteration that a process logged."""
    column = log.iterations.column("number")
    return [int(column[row]) for row in (*process.rows[:1], *process.rows[-1:])]


def _span_of(log: ParsedLog, process: Process, spans: Sequence[PhaseSpan]) -> PhaseSpan:
    """Return the phase of a process: by its first iteration, else by the end that it was started with."""
    numbers = first_and_last(log, process)
    if not numbers and not process.head.arguments:
        return spans[0]
    end = process.head.arguments.get("exit_interval")
    for span in spans:
        if numbers and (span.end is None or numbers[0] <= span.end):
            return span
        if not numbers and span.end == end:
            return span
    return spans[-1]


def _by_precision(logs: Sequence[ParsedLog]) -> list[tuple[PhaseSpan, list[ParsedLog]]]:
    """Return a phase for each change of precision; nothing if there is no change, or no precision is known."""
    keys: list[tuple[object, ...]] = []
    groups: list[list[Process]] = []
    for log in logs:
        for process in log.processes:
            arguments = process.head.arguments
            if not arguments or not process.rows:
                continue
            key = tuple(map(arguments.get, _PRECISION))
            if keys and keys[-1] == key:
                groups[-1].append(process)
            else:
                keys.append(key)
                groups.append([process])
    if len(groups) < 2:
        return []
    names = _numbered([requested(dict(zip(_PRECISION, key, strict=True))) for key in keys])
    found = []
    for name, processes in zip(names, groups, strict=True):
        cut = _cut(logs, processes)
        numbers: list[int] = []
        for log in cut:
            for process in log.processes:
                numbers += first_and_last(log, process)
        found.append((PhaseSpan(name, min(numbers) - 1, max(numbers)), cut))
    return found


def _numbered(names: Sequence[str]) -> list[str]:
    """Number repeated names: `bf16 1`, `tensorwise`, `bf16 2`."""
    found = []
    for i, name in enumerate(names):
        if names.count(name) > 1:
            name = f"{name} {names[: i + 1].count(name)}"
        found.append(name)
    return found
