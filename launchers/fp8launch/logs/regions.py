"""Parts of a file by byte offset, without reading the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

BLOCK = 1 << 20


def _blocks(path: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines with their offset; a line longer than a block is cut."""
    with path.open("rb", buffering=0) as stream:
        stream.seek(begin)
        pending = b""
        at = begin
        while at + len(pending) < end:
            block = stream.read(min(BLOCK, end - at - len(pending)))
            if not block:
                break
            data = pending + block
            cut = data.rfind(b"\n") + 1 or (len(data) if len(data) > BLOCK else 0)
            if cut:
                yield at, data[:cut]
            at += cut
            pending = data[cut:]
        if pending:
            yield at, pending


def lines(path: Path, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """(offset, text) of every line that starts in [begin, end)."""
    for base, data in _blocks(path, begin, end):
        at = base
        for line in data.split(b"\n"):
            if line:
                yield at, line.decode("utf-8", "replace")
            at += len(line) + 1


def lines_with(path: Path, begin: int, end: int, needles: Sequence[bytes]) -> Iterator[tuple[int, str]]:
    """(offset, text) of the lines that contain one of the texts, in order, each once."""
    for base, data in _blocks(path, begin, end):
        hits: dict[int, int] = {}
        for needle in needles:
            at = data.find(needle)
            while at >= 0:
                stop = data.find(b"\n", at)
                stop = len(data) if stop < 0 else stop
                hits[data.rfind(b"\n", 0, at) + 1] = stop
                at = data.find(needle, stop)
        for start in sorted(hits):
            yield base + start, data[start : hits[start]].decode("utf-8", "replace")


def line_number(path: Path, offset: int) -> int:
    """The number, from 1, of the line that holds the byte at `offset`."""
    return 1 + sum(data.count(b"\n") for _, data in _blocks(path, 0, offset))
