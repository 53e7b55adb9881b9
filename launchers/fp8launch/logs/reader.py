"""Read a Megatron log of any size once, in blocks: iterations into columns, the few other events as records.

Every line of interest contains a bar, except two with long fixed texts, and Python searches for one byte or a long text
at the speed of memory. So a block is never split into lines: only lines around a hit are cut out. What a process prints
before its first and after its last iteration (versions, arguments, how it ended) is read afterwards, from these parts
only (see `processes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fp8launch.injob.regular_files import open_regular
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE, clean
from fp8launch.logs.dialects import Dialect, others
from fp8launch.logs.evidence import MARKER, Evidence, parse_evidence
from fp8launch.logs.lines import (
    Iteration,
    StepTime,
    Timer,
    Validation,
    parse_checkpoint_save,
    parse_peak_memory,
    parse_step_time,
    parse_timer,
    parse_validation,
)
from fp8launch.logs.open_log import open_log
from fp8launch.logs.table import Collector, IterationTable

Record = TypeVar("Record")

BLOCK = 1 << 19
# A file without newlines is read in pieces, so that memory stays constant.
LONGEST_PENDING = 1 << 22
# The probe's line is the longest one: it names every group of modules.
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
    """The result of one pass over a log. Offsets are bytes from the start of the log to the start of a line.

    `memory` is the peak that PyTorch allocated on a rank up to a line, in MiB; `saves` has the iterations of
    checkpoints.
    """

    table: IterationTable = field(default_factory=IterationTable)
    dumps: list[int] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(default_factory=list)
    validations: list[tuple[int, Validation]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    load_offsets: list[int] = field(default_factory=list)
    step_times: list[tuple[int, StepTime]] = field(default_factory=list)
    timers: list[tuple[int, Timer]] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    size: int = 0


class Scanner:
    """Feed it the bytes of a log in pieces of any size; `scan` grows. `finish` reads the last line, complete or not."""

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
        """Read whole lines, data[begin:end]: not as a slice, because a copy takes as long as a search."""
        scan = self.scan
        base = scan.size - begin
        self._bars(data, begin, end, base)
        if self._others and (self._dialect or not len(scan.table)):
            self._other_dialects(data, begin, end, base)

        def records(text: bytes, parse: Callable[[str], Record | None]) -> Iterator[tuple[int, Record]]:
            for offset, line in _lines_with(data, text, begin, end):
                record = parse(line)
                if record is not None:
                    yield base + offset, record

        for offset, line in records(_DUMP, clean):
            # A line that only quotes the title is not a dump.
            if line.rstrip().endswith(_TITLE):
                scan.dumps.append(offset)
        scan.saves += records(_SAVING, parse_checkpoint_save)
        scan.load_offsets += [offset for offset, _ in records(_LOADED, clean)]
        scan.timers += records(_TIMER, parse_timer)
        if not len(scan.table) or "tflops_per_gpu" not in scan.table.names:
            scan.step_times += records(_BRIDGE, parse_step_time)
        for offset, line in _lines_with(data, MARKER, _after_braces(data, begin, end), end, LONGEST_EVIDENCE):
            evidence = parse_evidence(line, base + offset)
            if evidence:
                scan.evidence.append(evidence)
        scan.size += end - begin

    def _other_dialects(self, data: bytes, begin: int, end: int, base: int) -> None:
        """Read iterations of a program with its own format; the first dialect that fits is the log's."""
        for dialect in (self._dialect,) if self._dialect else self._others:
            for offset, line in _lines_with(data, dialect.needle, begin, end):
                record = dialect.parse(clean(line))
                if record:
                    self.scan.table.append(record, base + offset)
                    self._dialect = dialect
            if self._dialect:
                return

    def _bars(self, data: bytes, begin: int, limit: int, base: int) -> None:
        """Read iterations, memory and validation: their lines have a bar, and `iteration` before the first one."""
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
                    # Nothing is kept of Megatron's own line start, ` [time stamp] iteration`.
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
        if peak := parse_peak_memory(line):
            self.scan.memory.append((offset, peak))
        elif validation := parse_validation(line):
            self.scan.validations.append((offset, validation))


def _after_braces(data: bytes, begin: int, limit: int) -> int:
    """Return the offset from which to search for lines of JSON that begin with MARKER, `limit` if there are none.

    One byte is found ten times as fast as a text, and few lines contain a brace; after a hundred it does not help.
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
    """Yield (start, line) for the lines with a text, or the part around the text if a line is too long."""
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
    """Yield the iteration records of a line that is too long: of a progress bar, or of many ranks in one line."""
    elapsed = data.find(_ELAPSED, start, end)
    while elapsed >= 0:
        first = max(data.rfind(_ITERATION, start, elapsed), elapsed - LONGEST_LINE // 4, start)
        following = data.find(_ELAPSED, elapsed + len(_ELAPSED), end)
        last = end
        if following >= 0:
            last = max(data.rfind(_ITERATION, elapsed + len(_ELAPSED), following), elapsed)
        yield data[first : min(last, first + LONGEST_LINE)]
        elapsed = following


def scan_file(path: Path) -> Scan:
    """Read a log. Raises OSError."""
    scanner = Scanner()
    with open_log(path) as stream:
        while block := stream.read(BLOCK):
            scanner.feed(block)
    return scanner.finish()


class LogTail:
    """Reads a growing log: each `poll` returns the iterations since the last call.

    A log that does not exist yet has none. A log that became shorter was started again, and is read from its beginning.
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
