"""Find the processes in a log: where each starts and ends, its arguments, and how it ended.

A restart shows as a new argument dump, or as an iteration number that falls or repeats. Only the text around the
first and the last iteration of each process is read here, so a log of gigabytes costs a few milliseconds more.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from fp8launch.injob.supervisor.failures import LAST_ITERATIONS, NEEDLES, Ending, read_ending
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE, clean, split_prefix
from fp8launch.logs.evidence import Evidence
from fp8launch.logs.field_names import LOSS_PREFIX, TIMER_PREFIX
from fp8launch.logs.file_slices import LineCounter, lines, lines_with, offsets_of
from fp8launch.logs.lines import Validation, argument_value, parse_argument
from fp8launch.logs.reader import Scan, scan_file
from fp8launch.logs.table import IterationTable

# Iterations may follow Slurm's message about the end (KillWait), and ranks write to the file out of step.
SLACK = 1 << 20
# No set-up prints more than this, but a file without iterations may be huge.
HEAD_LIMIT = 1 << 26

_DUMP_END = b"- end of arguments -"
_HEAD_NEEDLES = (b"using world size", b" version .", b"number of parameters on", b"padded vocab")
_WORLD = re.compile(r"using world size:\s{0,20}(\d{1,9})\b")
_VERSION = re.compile(r"> (PyTorch|Megatron-Core|Megatron-Bridge|Transformer Engine) version \.{1,80} (\S{1,80})")
_PARAMETERS = re.compile(r"number of parameters on .{0,80}rank \(([\d, ]{1,80})\):\s{0,20}(\d{1,18})\b")
# An argument that Megatron-Core 0.16 introduced, along with the line of a process's first iteration.
_SINCE_FIRST_LINE = "dataloader_fast_cache_load"
_PADDED = re.compile(r"padded vocab \(size: \d{1,12}\).{0,80}\(new size: (\d{1,9})\)")


@dataclass(frozen=True)
class Head:
    """Values that a process prints before its first iteration. `parameters` is by model-parallel rank.

    `arguments_cut`: the end of the arguments is missing, so the process may have had more of them.
    """

    arguments: Mapping[str, object] = field(default_factory=dict)
    arguments_cut: bool = False
    world_size: int | None = None
    parameters: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    padded_vocab_size: int | None = None


@dataclass(frozen=True)
class Process:
    """One start of the training program. `rows` index the table of its log; a process that died early has none."""

    begin: int
    end: int
    rows: tuple[int, ...]
    head: Head
    ending: Ending


# Timers of interruptions between iterations. Megatron's step times do not include them.
_PAUSES = {"save-checkpoint": "checkpoint", "save-checkpoint-non-persistent": "checkpoint", "evaluate": "evaluation"}


@dataclass(frozen=True)
class Pause:
    """A `checkpoint` or `evaluation` between iterations, as Megatron's own timer reports it after its end."""

    offset: int
    kind: str
    seconds: float


_OFFSET = attrgetter("offset")


@dataclass(frozen=True)
class ParsedLog:
    """A whole log file.

    `memory` has the offsets and values (MiB) of the ranks' peak memory; `disturbed_rows` gives the reason for each row
    that follows an evaluation or a checkpoint, and `pauses` how long these took; `mixed_rows` are rows whose loss may
    be a mean that includes the previous iteration; `duplicates` counts iteration lines that another rank, or a tee, had
    printed before; `evidence` is what the job printed about FP8.
    """

    path: Path
    iterations: IterationTable
    processes: tuple[Process, ...]
    memory: Sequence[tuple[int, float]]
    validations: tuple[Validation, ...]
    disturbed_rows: Mapping[int, str]
    mixed_rows: frozenset[int] = frozenset()
    duplicates: int = 0
    evidence: tuple[Evidence, ...] = ()
    pauses: tuple[Pause, ...] = ()

    def evidence_of(self, process: Process) -> tuple[Evidence, ...]:
        """Return the evidence of one process."""
        first = bisect_left(self.evidence, process.begin, key=_OFFSET)
        last = bisect_left(self.evidence, process.end, key=_OFFSET)
        return self.evidence[first:last]


# Processes, oldest first, each with its log.
LoggedProcesses = Sequence[tuple[ParsedLog, Process]]


def attempts_of(logs: Iterable[ParsedLog]) -> list[tuple[ParsedLog, Process]]:
    """Return the processes of logs in order, each with its log."""
    attempts: list[tuple[ParsedLog, Process]] = []
    for log in logs:
        attempts += [(log, process) for process in log.processes]
    return attempts


def read_log(path: Path) -> ParsedLog:
    """Read a log with any content: invalid bytes are replaced, invalid lines are skipped. Raises OSError."""
    scan = scan_file(path)
    _attach_step_times(scan)
    _attach_timers(scan)
    scan.dumps[:] = _dumps_of_processes(path, scan.dumps)
    begins = sorted([*scan.dumps, *_loads_without_dump(scan)])
    rows, starts, duplicates = _starts(scan.table, begins)
    processes = _processes(path, scan, rows, starts)
    return ParsedLog(
        path=path,
        iterations=scan.table,
        processes=processes,
        mixed_rows=frozenset(_separate_second_losses(scan.table, processes)),
        memory=scan.memory,
        validations=tuple(v for _, v in scan.validations),
        disturbed_rows=_disturbed(scan, rows),
        duplicates=duplicates,
        evidence=tuple(scan.evidence),
        pauses=tuple(
            Pause(offset, _PAUSES[timer.name], timer.slowest_ms / 1e3)
            for offset, timer in scan.timers
            if timer.name in _PAUSES and math.isfinite(timer.slowest_ms)
        ),
    )


def _dumps_of_processes(path: Path, dumps: Sequence[int]) -> list[int]:
    """Leave out dumps that begin inside another one, as happens if several ranks print theirs at once."""
    close = [dump for before, dump in pairwise(dumps) if dump - before <= SLACK]
    if not close:
        return list(dumps)
    ends = offsets_of(path, dumps[0], close[-1], _DUMP_END)
    found: list[int] = []
    for dump in dumps:
        if found and dump - found[-1] <= SLACK:
            end = bisect_left(ends, found[-1])
            if end == len(ends) or ends[end] > dump:
                continue
        found.append(dump)
    return found


def _loads_without_dump(scan: Scan) -> Iterator[int]:
    """Yield loads of a checkpoint without arguments before them, as in abridged logs: each starts a process."""
    offsets = scan.table.column("offset")
    done = -1.0
    for load in scan.load_offsets:
        row = bisect_left(offsets, load)
        if row == 0 or offsets[row - 1] == done:
            continue
        done = offsets[row - 1]  # all ranks may print it
        dump = bisect_left(scan.dumps, load)
        if dump == 0 or scan.dumps[dump - 1] < done:
            yield load


def _starts(table: IterationTable, dumps: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Return the rows without duplicates, the offset where each process begins, and the number of duplicates."""
    number, rank, offset, time = map(table.column, ("number", "rank", "offset", "step_time_ms"))
    rows: list[int] = []
    # Text before the first dump belongs to the first process.
    starts = [0]
    pending = deque(dumps)
    if pending and (not len(table) or pending[0] < offset[0]):
        pending.popleft()
    speaker = math.nan
    lowest = 0.0
    duplicates = 0
    for row in range(len(table)):
        mine = rank[row]
        new = not rows
        while pending and pending[0] < offset[row]:
            starts.append(pending.popleft())
            new = True
        if not new:
            last = rows[-1]
            repeated = number[row] == number[last] and time[row] == time[last]
            if repeated or (not _same(mine, speaker) and lowest <= number[row] <= number[last] + 1):
                duplicates += 1  # a tee, or two ranks that print the same iterations side by side
                continue
            if number[row] <= number[last]:
                starts.append(int(offset[row]))
                new = True
        if new:
            speaker, lowest = mine, number[row]
        rows.append(row)
    return rows, [*starts, *pending], duplicates


def _same(a: float, b: float) -> bool:
    """Return whether two lines are from the same rank; NaN marks a line without a rank."""
    return a == b or (math.isnan(a) and math.isnan(b))


def _processes(path: Path, scan: Scan, rows: Sequence[int], starts: Sequence[int]) -> tuple[Process, ...]:
    offsets = scan.table.column("offset")
    counter = LineCounter(path)
    found = []
    at = 0
    quiet_since = 0
    for begin, end in zip(starts, [*starts[1:], scan.size], strict=True):
        mine = []
        while at < len(rows) and offsets[rows[at]] < end:
            mine.append(rows[at])
            at += 1
        places = [int(offsets[row]) for row in mine]
        first, last = end, begin
        if places:
            first, last = places[0], places[-1]
        # The lines just before a dump, after the previous process's last iteration, are this process's.
        head = _read_head(path, quiet_since, min(first, quiet_since + HEAD_LIMIT), _dump_in(scan.dumps, begin, first))
        ending = _read_ending(path, begin, end, places, counter)
        found.append(Process(begin, end, tuple(mine), head, ending))
        quiet_since = last
    return tuple(found)


def _dump_in(dumps: Sequence[int], begin: int, end: int) -> int | None:
    at = bisect_left(dumps, begin)
    if at < len(dumps) and dumps[at] < end:
        return dumps[at]
    return None


def _attach_step_times(scan: Scan) -> None:
    """Add Bridge's throughput to the iteration line just after or before it that has the same time."""
    table = scan.table
    offsets, times = table.column("offset"), table.column("step_time_ms")
    for offset, step in scan.step_times:
        at = bisect_left(offsets, offset)
        for row in (at, at - 1):
            if 0 <= row < len(table) and abs(times[row] / 1e3 - step.seconds) <= max(0.006, 0.002 * step.seconds):
                table.set("tflops_per_gpu", row, step.tflops_per_gpu)
                break


def _attach_timers(scan: Scan) -> None:
    """Add Megatron's timers to the iteration line above them. The first value of a timer counts."""
    offsets = scan.table.column("offset")
    for offset, timer in scan.timers:
        row, name = bisect_left(offsets, offset) - 1, TIMER_PREFIX + timer.name
        if row >= 0 and math.isnan(scan.table.value(name, row)):
            scan.table.set(name, row, timer.slowest_ms)


def _separate_second_losses(table: IterationTable, processes: Iterable[Process]) -> Iterator[int]:
    """Correct the loss in the second line of each process; yield the rows for which that is not possible.

    Megatron-LM prints a line for the first iteration of a process without resetting its sums (`is_first_iteration` in
    training_log of megatron/training/training.py), so with a log interval of 1 the second line has the mean of two.
    """
    number, skipped = table.column("number"), table.column("skipped_iterations")
    for process in processes:
        if len(process.rows) < 2:
            continue
        first, second = process.rows[:2]
        arguments = process.head.arguments
        if arguments and (arguments.get("log_interval") != 1 or _SINCE_FIRST_LINE not in arguments):
            continue  # each line is about its own interval
        if not arguments or number[second] != number[first] + 1 or skipped[first] > 0 or skipped[second] > 0:
            yield second
            continue
        for name in table.names:
            if name.startswith(LOSS_PREFIX):
                own = 2 * table.value(name, second) - table.value(name, first)
                if own > 0:
                    # With as many digits as Megatron prints.
                    table.set(name, second, float(f"{own:.6E}"))


def _disturbed(scan: Scan, rows: Sequence[int]) -> dict[int, str]:
    """Return the first row after each validation and checkpoint, with the reason."""
    offsets = scan.table.column("offset")
    kept = [offsets[r] for r in rows]
    events = [(o, "after evaluation") for o, _ in scan.validations]
    events += [(o, "after checkpoint") for o, _ in scan.saves]
    found: dict[int, str] = {}
    for offset, reason in events:
        at = bisect_left(kept, offset)
        if at < len(rows):
            found.setdefault(rows[at], reason)
    return found


def _read_head(path: Path, begin: int, end: int, dump: int | None) -> Head:
    """Read what a process prints before its first iteration. If a line repeats, the last one counts, because it is
    nearer."""
    head = Head()
    versions: dict[str, str] = {}
    parameters: dict[str, int] = {}
    for _, raw in lines_with(path, begin, end, _HEAD_NEEDLES):
        _, line = split_prefix(clean(raw))
        if found := _WORLD.search(line):
            head = replace(head, world_size=int(found[1]))
        elif found := _VERSION.search(line):
            versions[found[1]] = found[2]
        elif found := _PARAMETERS.search(line):
            parameters[found[1]] = int(found[2])
        elif found := _PADDED.search(line):
            head = replace(head, padded_vocab_size=int(found[1]))
    if dump is not None:
        arguments, cut = _read_arguments(path, dump, min(end, dump + HEAD_LIMIT))
        head = replace(head, arguments=arguments, arguments_cut=cut)
    return replace(head, versions=versions, parameters=parameters)


def _read_arguments(path: Path, begin: int, end: int) -> tuple[dict[str, object], bool]:
    """Return the arguments in the dump that starts at `begin`, and whether its end is missing."""
    arguments: dict[str, object] = {}
    for _, raw in lines(path, begin, end):
        _, line = split_prefix(clean(raw))
        if _DUMP_END.decode() in line[:LONGEST_LINE]:
            return arguments, False
        if pair := parse_argument(line):
            arguments[pair[0]] = argument_value(pair[1])
    return arguments, True


def _read_ending(path: Path, begin: int, end: int, iterations: Sequence[int], counter: LineCounter) -> Ending:
    """Return how a process ended. Failures before its last iterations did not stop it, unless Slurm announced them."""
    since = begin
    if iterations:
        since = iterations[-LAST_ITERATIONS:][0]
    ending = read_ending(lines_with(path, max(begin, since - SLACK), end, NEEDLES), since)
    if ending.failure is None:
        return ending
    return replace(ending, failure=replace(ending.failure, line=counter.number(ending.failure.offset)))
