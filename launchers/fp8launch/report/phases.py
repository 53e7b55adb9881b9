"""A run in phases: numbers of each phase, and for the run those of its longest, for they are of one precision.

A phase's last iteration ends its process, so every process belongs to one phase. Our own runs say in the manifest which
phases they have; of other logs, processes of different precision are told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8launch.logs import ParsedLog, Process
from fp8launch.report.outcome import status_of
from fp8launch.report.run_report import PhaseReport, RunReport
from fp8launch.report.selection import select
from fp8launch.report.statistics import Statistic
from fp8launch.report.throughput import summarise
from fp8launch.report.verify import NOT_RUNNING

_PRECISION = ("fp8", "fp8_recipe", "fp8_param_gather", "fp4", "fp4_recipe", "bf16", "fp16")
# What is of one precision: the run's are those of one phase.
_OF_ONE = (
    "step_time_ms", "tflops_per_gpu", "tflops_source", "tflops_per_gpu_recomputed", "tokens_per_s_per_gpu",
    "tokens_source", "mfu", "mfu_denominator", "energy_j_per_gpu", "warmup_dropped", "dropped", "fp8", "seq_length",
    "flops_per_token", "arguments", "notes",
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Iterations `begin` + 1 to `end` of a training; `end` is None where it is not known."""

    name: str
    begin: int
    end: int | None


def spans_of(manifest: Mapping[str, Any]) -> tuple[Span, ...]:
    """The phases that a run was submitted with."""
    return tuple(Span(str(p["name"]), int(p["begin"]), int(p["end"])) for p in manifest.get("phases") or ())


def by_phase(logs: Sequence[ParsedLog], spans: Sequence[Span] = ()) -> list[tuple[Span, list[ParsedLog]]]:
    """The logs of each phase that has begun, cut down to its processes; nothing for a run without phases."""
    if spans:
        places = [(log, p, _span_of(log, p, spans)) for log in logs for p in log.processes]
        return [(span, mine) for span in spans if (mine := _cut(logs, [p for _, p, of in places if of is span]))]
    found = _of_one_precision(logs)
    return [(_seen(name, cut), cut) for name, processes in found for cut in [_cut(logs, processes)]]


def summarise_run(
    logs: Sequence[ParsedLog],
    spans: Sequence[Span] = (),
    *,
    gpu: str | None = None,
    world_size: int | None = None,
    arguments: Mapping[str, object] | None = None,
) -> tuple[RunReport, Sequence[ParsedLog]]:
    """What the logs of one run say, and the part of them that its speed is of: all, or its longest phase's."""
    whole = summarise(logs, gpu=gpu, world_size=world_size, arguments=arguments)
    parts = by_phase(logs, spans)
    if not parts:
        return whole, logs
    reports = [
        PhaseReport(
            span.name, span.begin, span.end, summarise(mine, gpu=gpu, world_size=world_size, arguments=arguments)
        )
        for span, mine in parts
    ]
    longest = max(reports, key=lambda one: (one.report.step_time_ms is not None, one.report.iterations))
    counted = parts[reports.index(longest)][1]
    numbers = {name: getattr(longest.report, name) for name in _OF_ONE}
    status, failure = status_of([(log, p) for log in logs for p in log.processes], select(_attempts(logs)))
    if status in ("ok", "incomplete"):
        refuted = [r.report for r in reports if r.report.failure and r.report.failure.code == NOT_RUNNING]
        if refuted:
            status, failure = "failed", refuted[0].failure
    if status == "ok" and spans and reports[-1].name != spans[-1].name:
        status = "incomplete"  # it left at the end of a phase, as planned, and others are to come
    if len(reports) > 1:
        note = f"speed is that of phase {longest.name}, iterations {longest.span}; each phase has its own"
        numbers["notes"] = (note, *longest.report.notes)
    return replace(whole, status=status, failure=failure, phases=tuple(reports), **numbers), counted


# Headers of the cells below, and whether a column is of numbers.
PHASE_COLUMNS = {
    "phase": False, "iterations": False, "status": False, "FP8": False, "step time (ms)": True, "tokens/s/GPU": True,
    "TFLOP/s/GPU": True, "last loss": True, "lines": True,
}  # fmt: skip


def phase_cells(report: RunReport) -> list[tuple[str, ...]]:
    """A row of text for each phase of a run."""
    return [
        (
            phase.name,
            phase.span,
            phase.report.status.replace("_", " "),
            phase.precision,
            _median(phase.report.step_time_ms),
            _median(phase.report.tokens_per_s_per_gpu),
            _median(phase.report.tflops_per_gpu),
            "–" if phase.report.loss_last is None else f"{phase.report.loss_last:.4f}",
            str(phase.report.step_time_ms.n) if phase.report.step_time_ms else "0",
        )
        for phase in report.phases
    ]


def _median(value: Statistic | None) -> str:
    return "–" if value is None else f"{value.median:,.{4 if value.median < 1 else 1}f}"


def _attempts(logs: Sequence[ParsedLog]) -> list[tuple[ParsedLog, Process]]:
    return [(log, process) for log in logs for process in log.processes]


def _cut(logs: Sequence[ParsedLog], processes: Sequence[Process]) -> list[ParsedLog]:
    """The logs with these processes alone."""
    wanted = {id(p) for p in processes}
    cut = [replace(log, processes=tuple(p for p in log.processes if id(p) in wanted)) for log in logs]
    return [log for log in cut if log.processes]


def _numbers(log: ParsedLog, process: Process) -> list[int]:
    """The first and the last iteration that a process logged."""
    column = log.iterations.column("number")
    return [int(column[row]) for row in (*process.rows[:1], *process.rows[-1:])]


def _span_of(log: ParsedLog, process: Process, spans: Sequence[Span]) -> Span:
    """The phase of a process, by its first iteration; one without any by the end that it was told."""
    if numbers := _numbers(log, process):
        return next((s for s in spans if s.end is None or numbers[0] <= s.end), spans[-1])
    told = process.head.arguments.get("exit_interval")
    return next((s for s in spans if s.end == told), spans[-1] if process.head.arguments else spans[0])


def _of_one_precision(logs: Sequence[ParsedLog]) -> list[tuple[str, list[Process]]]:
    """Processes of one precision after the other; nothing where all have the same, or do not say."""
    groups: list[tuple[tuple[object, ...], list[Process]]] = []
    for _, process in _attempts(logs):
        arguments = process.head.arguments
        key = tuple(arguments.get(name) for name in _PRECISION)
        if not arguments or not process.rows:
            continue
        if groups and groups[-1][0] == key:
            groups[-1][1].append(process)
        else:
            groups.append((key, [process]))
    if len(groups) < 2:
        return []
    words = [str(key[1] if key[0] else key[4] if key[3] else "bf16" if key[5] else "fp16") for key, _ in groups]
    return [
        (f"{word} {words[: i + 1].count(word)}" if words.count(word) > 1 else word, processes)
        for i, (word, (_, processes)) in enumerate(zip(words, groups, strict=True))
    ]


def _seen(name: str, logs: Sequence[ParsedLog]) -> Span:
    numbers = [n for log, process in _attempts(logs) for n in _numbers(log, process)]
    return Span(name, min(numbers) - 1, max(numbers))
