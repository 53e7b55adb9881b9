"""Select the iteration lines that count: one per iteration, none slowed by warm-up, evaluation or saving.

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
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fp8launch.logs import IterationTable, LoggedProcesses, ParsedLog, Process
from fp8launch.logs.field_names import LOSS_PREFIX
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


# Columns that `SteadyState.lines` adds to the columns of the logs.
_ATTEMPT, _MIXED = "attempt", "mixed"


@dataclass(frozen=True)
class SteadyState:
    """The iteration lines of a run that its statistics use.

    `lines` has one row per iteration, in order, and `kept` the rows that statistics use. Both add two columns to the
    columns of the logs: the number of the `attempt` that printed the line, and `mixed`, 1 if the loss may be a mean
    that includes the iteration before. `dropped` maps a reason to iterations.
    """

    lines: IterationTable
    kept: IterationTable
    dropped: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    @property
    def warmup_dropped(self) -> int:
        return len(self.dropped.get("process start", ())) + len(self.dropped.get("warm-up", ()))

    @property
    def iterations_covered(self) -> int:
        """The number of iterations that the lines cover: with a log interval of 10, a line covers ten."""
        first: dict[float, int] = {}
        last: dict[float, int] = {}
        for attempt, number in zip(self.lines.column(_ATTEMPT), numbers_of(self.lines), strict=True):
            first.setdefault(attempt, number)
            last[attempt] = number
        covered, end = 0, -1
        for begin, finish in sorted(zip(first.values(), last.values(), strict=True)):
            covered += max(0, finish - max(begin, end + 1) + 1)
            end = max(end, finish)
        return covered


def numbers_of(lines: IterationTable) -> list[int]:
    """Return the numbers of the iterations."""
    return list(map(int, lines.column("number")))


def attempts_table() -> IterationTable:
    """Return an empty table for the lines of several attempts."""
    return IterationTable((_ATTEMPT, _MIXED))


def add_attempt(
    lines: IterationTable, attempt: int, printed: IterationTable, rows: Sequence[int], mixed: Collection[int]
) -> None:
    """Add rows that an attempt printed; `mixed` are the rows whose loss may include the iteration before."""
    more = {
        _ATTEMPT: array("d", [attempt]) * len(rows),
        _MIXED: array("d", [row in mixed for row in rows]),
    }
    lines.extend({**printed.columns(rows), **more}, len(rows))


def loss_of(lines: IterationTable) -> array[float]:
    """Return the language-model loss, else the first loss of another kind; NaN if a line has none."""
    usual = f"{LOSS_PREFIX}lm loss"
    names = lines.names_with(LOSS_PREFIX)
    return lines.column(usual if usual in names or not names else names[0])


def select_steady_state(attempts: LoggedProcesses, given_up: Mapping[str, int] = NOTHING) -> SteadyState:
    """Apply the rule to the processes of a run, oldest first.

    `given_up` names logs, by their stem, of which only the iterations up to a number count: the run went back to it.
    """
    printed = attempts_table()
    reasons: list[str] = []
    discarded: list[int] = []
    for i, (log, process) in enumerate(attempts):
        number = log.iterations.column("number")
        limit = given_up.get(log.path.stem, math.inf)
        discarded += [int(number[row]) for row in process.rows if number[row] > limit]
        rows = [row for row in process.rows if number[row] <= limit]
        reasons += _reasons(log, process, rows)
        add_attempt(printed, i, log.iterations, rows, log.mixed_rows)
    numbers = numbers_of(printed)
    newest = {number: row for row, number in enumerate(numbers)}
    superseded = sorted(number for row, number in enumerate(numbers) if newest[number] != row)
    order = [newest[number] for number in sorted(newest)]
    lines = printed.take(order)
    kept, left_out = _separate(lines, [reasons[row] for row in order])
    notes = []
    if len(kept) < FEWEST:
        disturbed = [reason for reason in left_out if reason.startswith("after ")]
        for reason in disturbed:
            kept += left_out.pop(reason)
        if disturbed:
            kept.sort()
            notes.append("too few lines without an evaluation or checkpoint before them, so these are counted too")
    if order and len(kept) < FEWEST:
        notes.append(f"{counted(len(kept), 'line')} left after warm-up: train longer for a reliable number")
    dropped: dict[str, tuple[int, ...]] = {}
    for reason, places in left_out.items():
        dropped[reason] = tuple(numbers[order[place]] for place in places)
    if discarded:
        dropped["given up by a rewind"] = tuple(sorted(discarded))
    if superseded:
        dropped["repeated by a later attempt"] = tuple(superseded)
    return SteadyState(lines, lines.take(kept), dropped, tuple(notes))


def _separate(lines: IterationTable, reasons: Sequence[str]) -> tuple[list[int], dict[str, list[int]]]:
    """Return the rows that count, and the rest by reason."""
    kept: list[int] = []
    left_out: dict[str, list[int]] = {}
    batch = lines.column("global_batch_size")
    for row, reason in enumerate(reasons):
        if not reason and batch[row] != batch[-1] and not math.isnan(batch[-1]):
            reason = "other batch size"
        if reason:
            left_out.setdefault(reason, []).append(row)
        else:
            kept.append(row)
    return kept, left_out


def _reasons(log: ParsedLog, process: Process, rows: Sequence[int]) -> list[str]:
    """Return why lines of one process do not count, empty for lines that do; the first reason counts."""
    number, time = log.iterations.column("number"), log.iterations.column("step_time_ms")
    usable = {row for row in rows if math.isfinite(time[row]) and time[row] > 0}
    rest = rows[START_LINES:]
    half = len(rest) // 2
    slow = 0
    second_half = [time[row] for row in rest[half:] if row in usable]
    if second_half:
        limit = SLOW * statistics.median(second_half)
        while slow < half and not time[rest[slow]] <= limit:
            slow += 1
    is_profiled = _profiled(log, process)
    reasons = ["process start"] * len(rows[:START_LINES]) + ["warm-up"] * slow
    for row in rest[slow:]:
        reason = log.disturbed_rows.get(row, "")
        if row not in usable:
            reason = "no usable time"
        elif is_profiled(number[row]):
            reason = "profiled"
        reasons.append(reason)
    return reasons


def _profiled(log: ParsedLog, process: Process) -> Callable[[float], bool]:
    """Return a test for iterations that a profiler or a measurement of FP8 tensors slowed down."""
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
    return lambda number: first <= number <= last or number in single


Number = TypeVar("Number", int, str)


def consecutive(numbers: Iterable[Number]) -> list[list[Number]]:
    """Return runs of consecutive numbers as [first, last], and a number on its own as [number]."""
    found: list[list[Number]] = []
    for number in numbers:
        if found and int(number) == int(found[-1][-1]) + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return found


def ranges(numbers: Iterable[int]) -> str:
    """`1-2, 7, 10-12`."""
    return ", ".join("-".join(map(str, part)) for part in consecutive(numbers))
