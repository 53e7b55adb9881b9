"""Select the iteration lines that statistics use: one per iteration, none slowed by warm-up, evaluation or saving.

`RULE` states the rule, for JSON reports as well. The second line after a start is a mean that includes the first,
because Megatron does not reset its timer there. Slow lines come from FP8 autotuning, allocator growth and CUDA graph
capture, other batch sizes from a ramp-up, and other GPU counts and sequence lengths from a resume.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from fp8launch.logs import IterationTable, LoggedProcesses, ParsedLog, Process
from fp8launch.logs.field_names import LOSS_PREFIX
from fp8launch.wording import counted

START_LINES = 2
SLOW = 1.1
FEWEST = 3
# Lines that an attempt needs to be compared with the others.
_COMPARED = 10

RULE = (
    f"After each start, the first {START_LINES} lines are dropped (the second is a mean that includes the first), then "
    f"lines slower than {SLOW} x the median of the second half, but at most half of the lines. The line after an "
    "evaluation or checkpoint, profiled iterations and lines with another batch size, world size or sequence length "
    "than the last line are excluded. If attempts repeat an iteration, the last one counts."
)
RULE_NOTE = "which iterations count: docs/compare.md#steady-state"

NOTHING: Mapping[str, int] = {}


# Columns that `SteadyState.lines` adds to the log's columns.
_ATTEMPT, _MIXED = "attempt", "mixed"


@dataclass(frozen=True)
class SteadyState:
    """The iteration lines of a run that its statistics use.

    `lines` has one row per iteration, in order. `kept` has the rows that statistics use. Both add two columns to the
    log's columns: `attempt`, the number of the attempt that printed the line, and `mixed`, 1 if the loss may be a mean
    that includes the previous iteration. `dropped` maps each reason to the iterations dropped for it.
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
        """The number of iterations that the lines cover. With a log interval of 10, one line covers ten."""
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
    """Return the iteration numbers."""
    return list(map(int, lines.column("number")))


def attempts_table() -> IterationTable:
    """Return an empty table for the lines of several attempts."""
    return IterationTable((_ATTEMPT, _MIXED))


def add_attempt(
    lines: IterationTable, attempt: int, printed: IterationTable, rows: Sequence[int], mixed: Collection[int]
) -> None:
    """Append rows printed by an attempt. `mixed` names the rows whose loss may include the previous iteration."""
    more = {
        _ATTEMPT: array("d", [attempt]) * len(rows),
        _MIXED: array("d", [row in mixed for row in rows]),
    }
    lines.extend({**printed.columns(rows), **more}, len(rows))


def loss_of(lines: IterationTable) -> array[float]:
    """Return the language-model loss, or the first other loss if there is none; NaN for lines without a loss."""
    usual = f"{LOSS_PREFIX}lm loss"
    names = lines.names_with(LOSS_PREFIX)
    return lines.column(usual if usual in names or not names else names[0])


def select_steady_state(attempts: LoggedProcesses, given_up: Mapping[str, int] = NOTHING) -> SteadyState:
    """Apply the rule to the processes of a run, oldest first.

    `given_up` maps the stem of a log to the last iteration in it that counts. The run was rewound to that iteration.
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
    kept, left_out = _separate(lines, [reasons[row] for row in order], [_sizes(process) for _, process in attempts])
    notes = []
    if len(kept) < FEWEST:
        disturbed = [reason for reason in left_out if reason.startswith("after ")]
        for reason in disturbed:
            kept += left_out.pop(reason)
        if disturbed:
            kept.sort()
            notes.append("lines after an evaluation or checkpoint are counted too, because too few others remain")
    if order and len(kept) < FEWEST:
        notes.append(f"only {counted(len(kept), 'line')} left after warm-up: train longer for a reliable number")
    dropped: dict[str, tuple[int, ...]] = {}
    for reason, places in left_out.items():
        dropped[reason] = tuple(numbers[order[place]] for place in places)
    if discarded:
        dropped["given up by a rewind"] = tuple(sorted(discarded))
    if superseded:
        dropped["repeated by a later attempt"] = tuple(superseded)
    counted_lines = lines.take(kept)
    return SteadyState(lines, counted_lines, dropped, (*notes, *_unequal_attempts(counted_lines)))


def _unequal_attempts(kept: IterationTable) -> Iterator[str]:
    """Name the fastest and the slowest attempt if they differ by more than their noise, as on another node."""
    times: dict[float, list[float]] = {}
    for attempt, ms in zip(kept.column(_ATTEMPT), kept.column("step_time_ms"), strict=True):
        times.setdefault(attempt, []).append(ms)
    speeds = [(*statistics.quantiles(ms, n=4), int(i) + 1) for i, ms in times.items() if len(ms) >= _COMPARED]
    if len(speeds) < 2:
        return
    # The middle halves of the times must not overlap.
    (_, best, high, fast), (low, worst, _, slow) = min(speeds, key=itemgetter(1)), max(speeds, key=itemgetter(1))
    if low > high and worst > SLOW * best:
        both = f"a step took {best:,.0f} ms in attempt {fast} and {worst:,.0f} ms in attempt {slow}"
        yield f"{both}: the statistics mix both speeds"


def _sizes(process: Process) -> dict[str, object]:
    """Return what a resumed run may change, by the reason to drop lines with another value; None if unknown."""
    arguments = process.head.arguments
    return {
        "other number of GPUs": process.head.world_size or arguments.get("world_size"),
        "other sequence length": arguments.get("seq_length"),
    }


def _separate(
    lines: IterationTable, reasons: Sequence[str], sizes: Sequence[Mapping[str, object]]
) -> tuple[list[int], dict[str, list[int]]]:
    """Return the rows that count, and the remaining rows grouped by reason. `sizes` has the sizes of each attempt."""
    kept: list[int] = []
    left_out: dict[str, list[int]] = {}
    batch, attempt = lines.column("global_batch_size"), list(map(int, lines.column(_ATTEMPT)))
    for row, reason in enumerate(reasons):
        if not reason and batch[row] != batch[-1] and not math.isnan(batch[-1]):
            reason = "incomplete line" if math.isnan(batch[row]) else "other batch size"
        last = sizes[attempt[-1]]
        for name, size in sizes[attempt[row]].items():
            if not reason and None not in (size, last[name]) and size != last[name]:
                reason = name
        if reason:
            left_out.setdefault(reason, []).append(row)
        else:
            kept.append(row)
    return kept, left_out


def _reasons(log: ParsedLog, process: Process, rows: Sequence[int]) -> list[str]:
    """Return for each line of one process why it is dropped, or an empty string if it counts."""
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
    """Return a predicate for iterations slowed by a profiler or by FP8 tensor statistics."""
    arguments = process.head.arguments
    profiled: list[tuple[int, int]] = []
    start, stop = arguments.get("profile_step_start"), arguments.get("profile_step_end")
    if arguments.get("profile") and isinstance(start, int) and isinstance(stop, int):
        # Megatron's profiler writes its file during the iteration after the last profiled one.
        profiled.append((start, stop + 1))
    for evidence in log.evidence_of(process):
        number = evidence.data.get("iteration")
        if not isinstance(number, int):
            continue
        if evidence.kind in ("kernels", "profile"):
            last = evidence.data.get("last_iteration")
            # A history of memory slows all iterations before its end, too.
            first = 0 if evidence.data.get("tool") == "memory" else number
            # The rank sums up during the iteration after the last profiled one.
            profiled.append((first, (last if isinstance(last, int) else number) + 1))
        # If every iteration collects tensor statistics, there are no undisturbed ones to use instead.
        if evidence.kind == "tensors" and evidence.data.get("every") != 1:
            profiled.append((number, number))
    return lambda number: any(first <= number <= last for first, last in profiled)


Number = TypeVar("Number", int, str)


def consecutive(numbers: Iterable[Number]) -> list[list[Number]]:
    """Group consecutive numbers as [first, last], and isolated numbers as [number]."""
    found: list[list[Number]] = []
    for number in numbers:
        if found and int(number) == int(found[-1][-1]) + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `1-2, 7, 10-12`."""
    return ", ".join("-".join(map(str, part)) for part in consecutive(numbers))
