"""Parts of a log by byte offset, without reading the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8launch.injob.supervisor.log_lines import LONGEST_LINE
from fp8launch.logs.open_log import open_log

BLOCK = 1 << 20


def _blocks(path: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines with their offset; a line longer than a block is cut."""
    with open_log(path) as stream:
        stream.seek(begin)
        pending = b""
        at = begin
        while at + len(pending) < end:
            block = stream.read(min(BLOCK, end - at - len(pending)))
            if not block:
                break
            data = pending + block
            cut = data.rfind(b"\n") + 1
            if not cut and len(data) > BLOCK:
                cut = len(data)
            if cut:
                yield at, data[:cut]
            at += cut
            pending = data[cut:]
        if pending:
            yield at, pending


def lines(path: Path, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Yield (offset, text) of every line that starts in [begin, end)."""
    for base, data in _blocks(path, begin, end):
        at = base
        for line in data.split(b"\n"):
            if line:
                yield at, line.decode("utf-8", "replace")
            at += len(line) + 1


def lines_with(path: Path, begin: int, end: int, needles: Sequence[bytes]) -> Iterator[tuple[int, str]]:
    """Yield (offset, text) of the lines that contain one of the texts, in order, each once.

    Only the first LONGEST_LINE bytes of a longer line are returned.
    """
    for base, data in _blocks(path, begin, end):
        hits: dict[int, int] = {}
        for needle in needles:
            at = data.find(needle)
            while at >= 0:
                stop = data.find(b"\n", at)
                if stop < 0:
                    stop = len(data)
                hits[data.rfind(b"\n", 0, at) + 1] = stop
                at = data.find(needle, stop)
        for start in sorted(hits):
            yield base + start, data[start : min(hits[start], start + LONGEST_LINE)].decode("utf-8", "replace")


def offsets_of(path: Path, begin: int, end: int, text: bytes) -> list[int]:
    """Return the offsets of a text, in order."""
    found = []
    for base, data in _blocks(path, begin, end):
        at = data.find(text)
        while at >= 0:
            found.append(base + at)
            at = data.find(text, at + len(text))
    return found


class LineCounter:
    """Line numbers for increasing offsets in a file, which is read once for all of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._number = 1

    def number(self, offset: int) -> int:
        """Return the number, from 1, of the line that holds the byte at `offset`."""
        if offset < self._offset:
            self._offset, self._number = 0, 1
        for _, data in _blocks(self._path, self._offset, offset):
            self._number += data.count(b"\n")
        self._offset = offset
        return self._number
