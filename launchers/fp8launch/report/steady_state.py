"""The iteration lines that count: one per iteration, no warm-up, none disturbed by an evaluation or a checkpoint.

The rule, also part of every JSON report:
Megatron logs the first iteration of every process without resetting its timer, so the second line is a mean that
includes the first: both are dropped, per process. Further lines at the start are dropped while they take over 1.1
times the median of the process's second half (FP8 autotuning, allocator growth, CUDA graph capture), but never more
than half of them. The first line after an evaluation or a checkpoint, profiled iterations, and lines with another
global batch size than the last one (ramp-up) are set apart. Where attempts overlap, the last one counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from fp8launch.logs import Iteration, LoggedProcesses, ParsedLog, Process
from fp8launch.report.pieces import consecutive
from fp8launch.wording import counted

START_LINES = 2
SLOW = 1.1
FEWEST = 3

RULE = (
    f"per process start the first {START_LINES} lines are dropped (the second still holds the first), then lines over "
    f"{SLOW} x the median of the second half, at most half of them; apart: the line after an evaluation or checkpoint, "
    "profiled iterations, other batch sizes; of repeated iterations the last attempt counts"
)
# The note under tables; JSON and the documentation have the whole rule.
RULE_NOTE = "left out: warm-up, profiling, steps after evaluation or checkpoint (docs/compare.md#steady-state)"

NOTHING: Mapping[str, int] = {}


class Line(NamedTuple):
    """One iteration line and where it stands: the attempt that printed it, its number and time.

    A tuple, because a million of them are made.
    """

    attempt: int
    log: ParsedLog
    row: int
    number: int
    step_time_ms: float
    global_batch_size: float

    def record(self) -> Iteration:
        return self.log.iterations[self.row]

    def value(self, name: str) -> float:
        return self.log.iterations.value(name, self.row)


@dataclass(frozen=True)
class SteadyState:
    """The iteration lines of a run that its statistics use.

    `lines` has one per iteration, in order; `kept` those that statistics use; `dropped` maps a reason to iterations.
    """

    lines: tuple[Line, ...]
    kept: tuple[Line, ...]
    dropped: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    @property
    def warmup_dropped(self) -> int:
        return len(self.dropped.get("process start", ())) + len(self.dropped.get("warm-up", ()))

    @property
    def iterations_covered(self) -> int:
        """The number of iterations that the lines cover: with a log interval of 10, a line covers ten."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for line in self.lines:
            first.setdefault(line.attempt, line.number)
            last[line.attempt] = line.number
        covered, end = 0, -1
        for begin, finish in sorted(zip(first.values(), last.values(), strict=True)):
            covered += max(0, finish - max(begin, end + 1) + 1)
            end = max(end, finish)
        return covered


_LOG, NUMBER = attrgetter("log"), attrgetter("number")


def select_steady_state(attempts: LoggedProcesses, given_up: Mapping[str, int] = NOTHING) -> SteadyState:
    """Apply the rule to the processes of a run, oldest first.

    `given_up` names logs, by their stem, of which only the iterations up to a number count: the run went back to it.
    """
    by_attempt = []
    reasons: dict[tuple[int, int], str] = {}
    discarded: list[int] = []
    for i, (log, process) in enumerate(attempts):
        lines = _lines(i, log, process)
        if log.path.stem in given_up:
            discarded += [line.number for line in lines if line.number > given_up[log.path.stem]]
            lines = [line for line in lines if line.number <= given_up[log.path.stem]]
        reasons |= _reasons(lines, log, process)
        by_attempt.append(lines)
    chosen, superseded = _newest(by_attempt)
    kept, left_out = _separate(chosen, reasons)
    notes = []
    if len(kept) < FEWEST:
        disturbed = [reason for reason in left_out if reason.startswith("after ")]
        for reason in disturbed:
            kept += left_out.pop(reason)
        if disturbed:
            kept.sort(key=NUMBER)
            notes.append("too few lines without an evaluation or checkpoint before them, so these are counted too")
    if chosen and len(kept) < FEWEST:
        notes.append(f"{counted(len(kept), 'line')} left after warm-up: train longer for a reliable number")
    dropped: dict[str, tuple[int, ...]] = {}
    for reason, left in left_out.items():
        dropped[reason] = tuple(map(NUMBER, left))
    if discarded:
        dropped["given up by a rewind"] = tuple(sorted(discarded))
    if superseded:
        dropped["repeated by a later attempt"] = tuple(sorted(superseded))
    return SteadyState(chosen, tuple(kept), dropped, tuple(notes))


def _separate(
    chosen: Sequence[Line], reasons: Mapping[tuple[int, int], str]
) -> tuple[list[Line], dict[str, list[Line]]]:
    """Split into the lines that count and, by reason, those that do not."""
    kept: list[Line] = []
    left_out: dict[str, list[Line]] = {}
    if not chosen:
        return kept, left_out
    final_batch = chosen[-1].global_batch_size
    for line in chosen:
        reason = reasons.get((line.attempt, line.row))
        if reason is None and line.global_batch_size != final_batch and not math.isnan(final_batch):
            reason = "other batch size"
        if reason is None:
            kept.append(line)
        else:
            left_out.setdefault(reason, []).append(line)
    return kept, left_out


def _newest(by_attempt: Sequence[Sequence[Line]]) -> tuple[tuple[Line, ...], list[int]]:
    """The last line of each iteration, in order, and the iterations of those that a later one repeats."""
    if len(by_attempt) == 1:
        # Numbers rise within a process: where they fall, a new process begins.
        return tuple(by_attempt[0]), []
    last: dict[int, Line] = {}
    superseded = []
    for line in chain.from_iterable(by_attempt):
        if line.number in last:
            superseded.append(line.number)
        last[line.number] = line
    return tuple(sorted(last.values(), key=NUMBER)), superseded


def field_names(lines: Sequence[Line], prefix: str) -> list[str]:
    """Return the fields whose names begin with `prefix` in the logs of these lines, sorted."""
    names: set[str] = set()
    for log in _logs_of(lines).values():
        names.update(log.iterations.names)
    return sorted(name for name in names if name.startswith(prefix))


def _logs_of(lines: Sequence[Line]) -> dict[int, ParsedLog]:
    """The logs of these lines, each once, by its id."""
    return {id(log): log for log in map(_LOG, lines)}


def values(lines: Sequence[Line], name: str) -> list[float]:
    """A field of many lines, NaN where a line does not have it."""
    columns = {key: log.iterations.column(name) for key, log in _logs_of(lines).items()}
    if len(columns) == 1:
        (column,) = columns.values()
        return [column[x.row] for x in lines]
    return [columns[id(x.log)][x.row] for x in lines]


def _lines(attempt: int, log: ParsedLog, process: Process) -> list[Line]:
    table = log.iterations
    number, time, batch = map(table.column, ("number", "step_time_ms", "global_batch_size"))
    return [Line(attempt, log, r, int(number[r]), time[r], batch[r]) for r in process.rows]


def _reasons(lines: Sequence[Line], log: ParsedLog, process: Process) -> dict[tuple[int, int], str]:
    """Why lines of one process do not count, by (attempt, row); the first reason holds."""
    found: dict[tuple[int, int], str] = {}
    for line in lines[:START_LINES]:
        found[line.attempt, line.row] = "process start"
    rest = lines[START_LINES:]
    second_half = [line.step_time_ms for line in filter(_usable, rest[len(rest) // 2 :])]
    if second_half:
        limit = SLOW * statistics.median(second_half)
        for line in rest[: len(rest) // 2]:
            if line.step_time_ms <= limit:
                break
            found[line.attempt, line.row] = "warm-up"
    profiled, disturbed = _profiled(log, process), log.disturbed_rows
    for line in rest:
        reason = disturbed.get(line.row)
        if not _usable(line):
            reason = "no usable time"
        elif profiled.holds(line.number):
            reason = "profiled"
        if reason:
            found.setdefault((line.attempt, line.row), reason)
    return found


def _usable(line: Line) -> bool:
    return math.isfinite(line.step_time_ms) and line.step_time_ms > 0


def _profiled(log: ParsedLog, process: Process) -> _Profiled:
    """Iterations that a profiler or a measurement of FP8 tensors slowed down."""
    arguments = process.head.arguments
    first, last = 0, -1
    start, stop = arguments.get("profile_step_start"), arguments.get("profile_step_end")
    if arguments.get("profile") and isinstance(start, int) and isinstance(stop, int):
        # In the iteration after the last one Megatron's profiler writes its file.
        first, last = start, stop + 1
    single: set[int] = set()
    for evidence in log.evidence_of(process):
        number = evidence.data.get("iteration")
        if evidence.kind == "kernels" and isinstance(number, int):
            single.update((number, number + 1))
        # If every iteration measures its tensors, only such iterations can give the speed.
        if evidence.kind == "tensors" and isinstance(number, int) and evidence.data.get("every") != 1:
            single.add(number)
    return _Profiled(first, last, frozenset(single))


class _Profiled(NamedTuple):
    """Iterations from `first` to `last`, and single ones."""

    first: int
    last: int
    single: frozenset[int]

    def holds(self, number: int) -> bool:
        return self.first <= number <= self.last or number in self.single


def ranges(numbers: Iterable[int]) -> str:
    """`1-2, 7, 10-12`."""
    return ", ".join("-".join(map(str, part)) for part in consecutive(numbers))
