"""A Megatron log, of any size, read once in blocks: iterations into columns, the few other events as records.

Every line of interest has a bar in it, except two that have long fixed texts, and looking for one byte or one long
text is what Python does at the speed of memory. So a block is never split into lines: only lines around a hit are
cut out. What the log says before the first and after the last iteration of a process (versions, arguments, how it
ended) is read afterwards, from those parts only (see `processes`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fp8launch.injob.regular_files import open_regular
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE, clean
from fp8launch.logs.dialects import Dialect, others
from fp8launch.logs.evidence import MARKER, Evidence, parse_evidence
from fp8launch.logs.lines import (
    Iteration,
    Memory,
    StepTime,
    Timer,
    Validation,
    parse_checkpoint_save,
    parse_memory,
    parse_step_time,
    parse_timer,
    parse_validation,
)
from fp8launch.logs.open_log import open_log
from fp8launch.logs.table import Collector, IterationTable

BLOCK = 1 << 19
# Pieces of a file without newlines: memory stays constant, and no list of pieces is long.
LONGEST_PENDING = 1 << 22
# A probe's line is longer than any other: it names every group of modules.
LONGEST_EVIDENCE = 1 << 20

_BAR = b"|"
_ELAPSED = b"elapsed time per iteration"
_TIMING = b"train_step_timing in s"
_ITERATION = b"iteration"
_DUMP = b"------------------------ arguments ------------------------"
_TITLE = _DUMP.decode()
_SAVING = b"saving checkpoint at iteration"
_LOADED = b"successfully loaded checkpoint from"
_BRACE = b"{"
_BRACES = 100
_TIMER = b"..: ("
_BRIDGE = b"GPU utilization:"


@dataclass
class Scan:
    """The result of one pass over a log. Offsets are bytes from the start of the log to the start of a line."""

    table: IterationTable = field(default_factory=IterationTable)
    dumps: list[int] = field(default_factory=list)
    peak_memory: dict[str, float] = field(default_factory=dict)
    validations: list[tuple[int, Validation]] = field(default_factory=list)
    saves: array[int] = field(default_factory=lambda: array("q"))
    save_offsets: array[int] = field(default_factory=lambda: array("q"))
    load_offsets: array[int] = field(default_factory=lambda: array("q"))
    step_times: list[tuple[int, StepTime]] = field(default_factory=list)
    timers: list[tuple[int, Timer]] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    size: int = 0


class Scanner:
    """Feed it the bytes of a log in pieces of any size; `scan` grows. `finish` takes the last line, complete or not."""

    def __init__(self) -> None:
        self.scan = Scan()
        self._collector = Collector(self.scan.table)
        self._pending = b""
        self._others = others()
        self._dialect: Dialect | None = None

    def feed(self, data: bytes) -> None:
        first = data.find(b"\n") + 1
        if not first:
            self._pending += data
            if len(self._pending) > LONGEST_PENDING:
                self.finish()
            return
        begin = 0
        if self._pending:
            line = self._pending + data[:first]
            self._block(line, 0, len(line))
            begin = first
        end = data.rfind(b"\n") + 1
        self._block(data, begin, end)
        self._pending = data[end:]

    def finish(self) -> Scan:
        if self._pending:
            self._block(self._pending, 0, len(self._pending))
            self._pending = b""
        return self.scan

    def _block(self, data: bytes, begin: int, end: int) -> None:
        """Reads whole lines, data[begin:end]: bounds and not a slice, because a copy costs as much as a search."""
        base = self.scan.size - begin
        self._bars(data, begin, end, base)
        if self._others and (self._dialect or not len(self.scan.table)):
            self._other_dialects(data, begin, end, base)
        self._dumps(data, begin, end, base)
        for offset, line in _lines_with(data, _SAVING, begin, end):
            number = parse_checkpoint_save(line)
            if number is not None:
                self.scan.saves.append(number)
                self.scan.save_offsets.append(base + offset)
        for offset, _ in _lines_with(data, _LOADED, begin, end):
            self.scan.load_offsets.append(base + offset)
        for offset, line in _lines_with(data, MARKER, _after_braces(data, begin, end), end, LONGEST_EVIDENCE):
            evidence = parse_evidence(line, base + offset)
            if evidence:
                self.scan.evidence.append(evidence)
        for offset, line in _lines_with(data, _TIMER, begin, end):
            timer = parse_timer(clean(line))
            if timer:
                self.scan.timers.append((base + offset, timer))
        if self._throughput_is_elsewhere():
            self._step_times(data, begin, end, base)
        self.scan.size += end - begin

    def _other_dialects(self, data: bytes, begin: int, end: int, base: int) -> None:
        """Iterations of a program that does not print Megatron's lines; the first dialect that fits is the log's."""
        dialects = self._others
        if self._dialect:
            dialects = (self._dialect,)
        for dialect in dialects:
            for offset, line in _lines_with(data, dialect.needle, begin, end):
                record = dialect.parse(clean(line))
                if record:
                    self.scan.table.append(record, base + offset)
                    self._dialect = dialect
            if self._dialect:
                return

    def _dumps(self, data: bytes, begin: int, end: int, base: int) -> None:
        for offset, line in _lines_with(data, _DUMP, begin, end):
            # The dump's own title, not a line that quotes it.
            if clean(line).rstrip().endswith(_TITLE):
                self.scan.dumps.append(base + offset)

    def _step_times(self, data: bytes, begin: int, end: int, base: int) -> None:
        for offset, line in _lines_with(data, _BRIDGE, begin, end):
            step_time = parse_step_time(line)
            if step_time:
                self.scan.step_times.append((base + offset, step_time))

    def _throughput_is_elsewhere(self) -> bool:
        table = self.scan.table
        return not len(table) or "tflops_per_gpu" not in table.names

    def _bars(self, data: bytes, begin: int, limit: int, base: int) -> None:
        """Iterations, memory and validation: each has a bar, and `iteration` before the first one."""
        lines: list[bytes] = []
        offsets: list[int] = []
        find, rfind = data.find, data.rfind
        at = find(_BAR, begin, limit)
        while at >= 0:
            start = max(rfind(b"\n", begin, at) + 1, begin)
            end = find(b"\n", at, limit)
            if end < 0:
                end = limit
            if end - start > LONGEST_LINE:
                for piece in _pieces(data, start, end):
                    lines.append(piece)
                    offsets.append(base + start)
            elif find(_ELAPSED, at, end) >= 0:
                first = start
                if data.startswith(b" [", start):
                    # Megatron's own line start, ` [time stamp] iteration`, says nothing that is kept.
                    stamp = find(b"] iteration ", start, start + 44)
                    if stamp >= 0:
                        first = stamp + 2
                lines.append(data[first:end])
                offsets.append(base + start)
            elif find(_ITERATION, start, at) >= 0:
                if find(_TIMING, at, end) >= 0:
                    lines.append(data[start:end])
                    offsets.append(base + start)
                else:
                    self._other(base + start, data[start:end].decode("utf-8", "replace"))
            at = find(_BAR, end, limit)
        self._collector.add(lines, offsets)

    def _other(self, offset: int, line: str) -> None:
        memory = parse_memory(line)
        if memory:
            self._memory(memory)
            return
        validation = parse_validation(line)
        if validation:
            self.scan.validations.append((offset, validation))

    def _memory(self, memory: Memory) -> None:
        peak = self.scan.peak_memory
        for name, value in memory.values.items():
            peak[name] = max(value, peak.get(name, 0.0))


def _after_braces(data: bytes, begin: int, limit: int) -> int:
    """From where to look for lines of JSON that begin with MARKER: `limit` where there are none.

    One byte is found ten times as fast as a text, and few lines have this one; past a hundred it does not help.
    """
    for _ in range(_BRACES):
        at = data.find(_BRACE, begin, limit)
        if at < 0:
            return limit
        start = max(data.rfind(b"\n", begin, at) + 1, begin)
        if data.find(MARKER, start, at) >= 0:
            return start
        begin = data.find(b"\n", at, limit)
        if begin < 0:
            return limit
    return begin


def _lines_with(
    data: bytes, text: bytes, begin: int, limit: int, longest: int = LONGEST_LINE
) -> Iterator[tuple[int, str]]:
    """(start, line) of the lines with a text; of a line that is too long the part around the text."""
    at = data.find(text, begin, limit)
    while at >= 0:
        start = max(data.rfind(b"\n", begin, at) + 1, begin)
        end = data.find(b"\n", at, limit)
        if end < 0:
            end = limit
        first, last = start, end
        if end - start > longest:
            first, last = max(start, at - longest // 4), min(end, at + longest // 2)
        yield start, data[first:last].decode("utf-8", "replace")
        at = data.find(text, end, limit)


def _pieces(data: bytes, start: int, end: int) -> Iterator[bytes]:
    """The iteration records of a line that is too long: a progress bar's, or of many ranks that wrote into one."""
    elapsed = data.find(_ELAPSED, start, end)
    while elapsed >= 0:
        first = max(data.rfind(_ITERATION, start, elapsed), elapsed - LONGEST_LINE // 4, start)
        following = data.find(_ELAPSED, elapsed + len(_ELAPSED), end)
        last = end
        if following >= 0:
            last = max(data.rfind(_ITERATION, elapsed + len(_ELAPSED), following), elapsed)
        yield data[first : min(last, first + LONGEST_LINE)]
        elapsed = following


def scan_stream(stream: BinaryIO) -> Scan:
    scanner = Scanner()
    while block := stream.read(BLOCK):
        scanner.feed(block)
    return scanner.finish()


def scan_file(path: Path) -> Scan:
    """Raises OSError where the file cannot be read."""
    with open_log(path) as stream:
        return scan_stream(stream)


class LogTail:
    """Reads a growing log: each `poll` returns the iterations written since the last one.

    A log that does not exist yet has none. One that became shorter was started anew and is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restart()

    def _restart(self) -> None:
        self._offset = 0
        self._seen = 0
        self._scanner = Scanner()

    @property
    def scan(self) -> Scan:
        return self._scanner.scan

    def poll(self) -> list[Iteration]:
        try:
            with open_regular(self.path, buffering=0) as stream:
                if stream.seek(0, 2) < self._offset:
                    self._restart()
                stream.seek(self._offset)
                while block := stream.read(BLOCK):
                    self._offset += len(block)
                    self._scanner.feed(block)
        except FileNotFoundError:
            return []
        table = self.scan.table
        new = [table[i] for i in range(self._seen, len(table))]
        self._seen = len(table)
        return new
