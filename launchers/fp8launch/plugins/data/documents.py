"""Read the documents of a shard in order, with the reason for each one that cannot be read.

Whatever the files hold, memory is bounded by a few of the longest allowed documents, and disk by the size of the files.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fp8launch.injob.regular_files import open_regular
from fp8launch.plugins.data.bad_input import BadInput
from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.sources import Shard, rows_by_group

_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 20
# A damaged .zst file also loses up to this many bytes before the damage.
_PACKED_BUFFER = 1 << 14
# A column may repeat one long value: a file of a few bytes then needs this many copies in memory.
_ROWS = 32
# Text compresses to a fifth of its size and logs to a fiftieth. A higher ratio was made to fill a disk.
MOST_UNPACKED, UNPACKED_FREE = 500, 64 << 20
# The size that a row without text counts as: nulls take no space in a file.
_ROW_BYTES = 8


class Document(NamedTuple):
    """A document. `content` is its text, or its token ids if the field holds ids.

    `size` is in unpacked bytes, `taken` in bytes of the file, for the progress bar.
    """

    content: Any
    file: str
    line: int
    begin: int
    unit: str
    size: int
    taken: int = 0

    def bad(self, reason: str, detail: str = "") -> BadInput:
        return BadInput(reason, self.file, self.line, self.begin, detail, self.unit)


@dataclass(frozen=True)
class Reading:
    """How to read records: `field` holds the text, or token ids if `ids` is set. `max_bytes` limits a document."""

    field: str = "text"
    ids: bool = False
    max_bytes: int = 16 << 20


class UnpacksTooFar(EOFError):
    """A compressed file unpacks to more than any compressed text would."""

    def __init__(self, packed: int) -> None:
        super().__init__(f"more than {_most_unpacked(packed) >> 20} MiB from {packed:,} bytes: unpack it first")


def _most_unpacked(packed: int) -> int:
    return UNPACKED_FREE + MOST_UNPACKED * packed


class _Unpacked(io.RawIOBase):
    """The unpacked content of a compressed file. Raises UnpacksTooFar if there is too much of it."""

    def __init__(self, read: Callable[[int], bytes], packed: int) -> None:
        self._read, self._packed = read, packed
        self._left = _most_unpacked(packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise UnpacksTooFar(self._packed)
        buffer[: len(data)] = data
        return len(data)


def documents(shard: Shard, reading: Reading) -> Iterator[Document | BadInput]:
    """Yield the documents of a shard in order, and a BadInput in place of each one that cannot be read."""
    if shard.format == "jsonl":
        yield from _json_lines(shard, reading)
    elif shard.format == "lines":
        yield from _text_lines(shard, reading)
    elif shard.format == "text":
        for file in shard.files:
            yield _whole_file(file, reading)
    else:
        yield from _rows(shard, reading)


# --- lines ------------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    raw: bytes | None  # None: longer than allowed
    number: int
    begin: int  # where in the file line 1 of these begins
    taken: int


def _opened(file: str) -> tuple[BinaryIO, Callable[[], int] | None]:
    """Open a file. Return its content and a function that returns how many of its bytes have been read."""
    raw = open_regular(Path(file), buffering=_BUFFER)
    if file.endswith(".gz"):
        read: Callable[[int], bytes] = gzip.GzipFile(fileobj=raw).read1
    elif file.endswith(".zst"):
        arrow: Any = load("pyarrow", "reading .zst files")
        read = arrow.CompressedInputStream(raw, "zstd").read
    else:
        return raw, None
    stream = _Unpacked(read, os.fstat(raw.fileno()).st_size)
    return io.BufferedReader(stream, _PACKED_BUFFER), raw.tell


def _lines(shard: Shard, reading: Reading) -> Iterator[Line | BadInput]:
    """Yield the lines that begin inside the shard. A missing or damaged end of the file is one BadInput."""
    (file,) = shard.files
    number, begin, before = 0, shard.begin, 0
    try:
        stream, position = _opened(file)
        with stream:
            at = begin = before = _to_first_line(stream, shard.begin)
            while shard.end is None or at < shard.end:
                raw = stream.readline(reading.max_bytes + 1)
                if not raw:
                    return
                number += 1
                at += len(raw)
                now = at
                if position is not None:
                    now = position()
                taken, before = now - before, now
                if len(raw) > reading.max_bytes and not raw.endswith(b"\n"):
                    at += _skip_line(stream)
                    yield Line(None, number, begin, taken)
                elif number == 1 and shard.begin == 0:
                    yield Line(raw.removeprefix(_BOM), number, begin, taken)
                else:
                    yield Line(raw, number, begin, taken)
    except (EOFError, zlib.error, OSError) as exc:
        if getattr(exc, "errno", None) is not None and not isinstance(exc, gzip.BadGzipFile):
            detail = str(getattr(exc, "strerror", exc))
        else:
            detail = " ".join(str(exc).split())
        yield BadInput(_damage(exc), file, number + 1, begin, detail)


def _damage(failure: Exception) -> str:
    if isinstance(failure, UnpacksTooFar):
        return "unpacks-too-far"
    return "cut-short"


def _to_first_line(stream: BinaryIO, begin: int) -> int:
    """Seek to the first line that begins at `begin` or later, and return its offset."""
    if begin == 0:
        return 0
    stream.seek(begin - 1)
    return begin - 1 + _skip_line(stream)


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of the line in blocks, and return the number of bytes read."""
    skipped = 0
    while True:
        raw = stream.readline(_BUFFER)
        skipped += len(raw)
        if not raw or raw.endswith(b"\n"):
            return skipped


def _usable_lines(shard: Shard, reading: Reading) -> Iterator[tuple[bytes, Document] | BadInput]:
    """Yield each line with its position, not yet parsed. A line above the limit is bad input."""
    (file,) = shard.files
    for line in _lines(shard, reading):
        if isinstance(line, BadInput):
            yield line
        elif line.raw is None:
            yield BadInput("too-long", file, line.number, line.begin)
        else:
            yield line.raw, Document("", file, line.number, line.begin, "line", len(line.raw), line.taken)


def _text_lines(shard: Shard, reading: Reading) -> Iterator[Document | BadInput]:
    for found in _usable_lines(shard, reading):
        if isinstance(found, BadInput):
            yield found
        else:
            raw, place = found
            text = raw.rstrip(b"\r\n")
            if text:  # blank lines between documents are usual
                yield _decoded(text, place)


def _json_lines(shard: Shard, reading: Reading) -> Iterator[Document | BadInput]:
    for found in json_records(shard, reading):
        if isinstance(found, BadInput):
            yield found
        else:
            yield _from_record(*found, reading)


def json_records(shard: Shard, reading: Reading) -> Iterator[tuple[Any, Document] | BadInput]:
    """Yield the value of each line with its position, and a BadInput in place of each line that is not JSON."""
    loads = load("orjson", "reading JSON lines").loads
    for found in _usable_lines(shard, reading):
        if isinstance(found, BadInput):
            yield found
            continue
        raw, place = found
        try:
            record = loads(raw)
        except ValueError:
            if not raw.strip():
                continue  # a blank line ends many files
            record = _slowly(raw, place)
            if isinstance(record, BadInput):
                yield record
                continue
        yield record, place


def _slowly(raw: bytes, place: Document) -> Any:
    """Parse a line that the fast parser refuses (NaN, huge numbers) with Python's own, or return why it is bad."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as exc:
        return place.bad("invalid-utf8", f"byte {raw[exc.start]:#04x} at column {exc.start + 1}")
    except json.JSONDecodeError as exc:
        return place.bad("broken-json", f"{exc.msg.removesuffix(' at')} at column {exc.colno}")
    except RecursionError:
        return place.bad("broken-json", "nested too deeply")
    except ValueError as exc:
        return place.bad("broken-json", str(exc))


def _from_record(record: Any, place: Document, reading: Reading) -> Document | BadInput:
    if not isinstance(record, dict):
        return place.bad("not-an-object", f"it is {kind_of(record)}")
    if reading.field not in record:
        there = ", ".join(list(map(str, record))[:4]) or "none"
        return place.bad("no-field", f"'{reading.field}'; fields: {there[:100]}")
    return _from_value(record[reading.field], place, reading)


def _from_value(value: Any, place: Document, reading: Reading) -> Document | BadInput:
    if reading.ids:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            return place.bad("not-text", f"'{reading.field}' is {kind_of(value)}, not a list of whole numbers")
    elif not isinstance(value, str):
        return place.bad("not-text", f"'{reading.field}' is {kind_of(value)}")
    elif not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return place.bad("invalid-utf8", "it contains half of a surrogate pair")
    if not value:
        return place.bad("empty")
    return place._replace(content=value)


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    if value is None:
        return "null"
    return names.get(type(value), f"of type {type(value).__name__}")


# --- whole files ------------------------------------------------------------------------------------------------------


def _whole_file(file: str, reading: Reading) -> Document | BadInput:
    place = Document("", file, 1, 0, "file", 0)
    try:
        stream, position = _opened(file)
        with stream:
            raw = stream.read(reading.max_bytes + 1)
            taken = len(raw)
            if position is not None:
                taken = position()
    except (EOFError, zlib.error, OSError) as exc:
        return place.bad(_damage(exc), getattr(exc, "strerror", None) or " ".join(str(exc).split()))
    if len(raw) > reading.max_bytes:
        return place.bad("too-long")
    return _decoded(raw.removeprefix(_BOM), place._replace(size=len(raw), taken=taken))


def _decoded(raw: bytes, place: Document) -> Document | BadInput:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        return place.bad("invalid-utf8", f"byte {raw[exc.start]:#04x} at offset {exc.start}")
    if not text:
        return place.bad("empty")
    return place._replace(content=text)


# --- tables -----------------------------------------------------------------------------------------------------------


def _rows(shard: Shard, reading: Reading) -> Iterator[Document | BadInput]:
    (file,) = shard.files
    row = 0
    left = _most_unpacked(shard.bytes)
    try:
        for batch, row, each in _batches(shard, reading):
            for position, scalar in enumerate(batch):
                value, size = scalar.as_py(), 0
                if isinstance(value, (str, bytes, list)):
                    size = len(value)
                left -= size + _ROW_BYTES
                if left < 0:
                    raise UnpacksTooFar(shard.bytes)
                place = Document("", file, row + position, 0, "row", size, each)
                if size > reading.max_bytes:
                    yield place.bad("too-long")
                elif isinstance(value, bytes):
                    yield _decoded(value, place)
                else:
                    yield _from_value(value, place, reading)
    except _NoField as exc:
        yield BadInput("no-field", file, 0, 0, str(exc), "file")
    except (OSError, ValueError, EOFError) as exc:
        yield BadInput(_damage(exc), file, row, 0, " ".join(str(exc).split())[:200], "row")


class _NoField(Exception):
    """The table has no column with the requested name."""


def _batches(shard: Shard, reading: Reading) -> Iterator[tuple[Any, int, int]]:
    """Yield columns of a few rows each, with the index of their first row in the file and the bytes per row."""
    arrow: Any = load("pyarrow", "reading tables")
    (file,) = shard.files
    if shard.format == "parquet":
        parquet: Any = load("pyarrow.parquet", "reading Parquet")
        with parquet.ParquetFile(file, memory_map=True) as opened:
            _require(reading.field, opened.schema_arrow.names)
            counts = rows_by_group(opened)
            _require_small_pages(opened, reading.field, shard)
            row = sum(counts[: shard.begin])
            end = shard.end
            if end is None:
                end = len(counts)
            each = shard.bytes // max(1, sum(counts[shard.begin : end]))
            for batch in opened.iter_batches(_ROWS, list(range(shard.begin, end)), [reading.field]):
                yield batch.column(0), row, each
                row += batch.num_rows
        return
    with arrow.memory_map(file) as source:
        row = 0
        for batch in _arrow_batches(arrow, source):
            _require(reading.field, batch.schema.names)
            column = batch.column(batch.schema.names.index(reading.field))
            each = batch.nbytes // max(1, batch.num_rows)
            for begin in range(0, len(column), _ROWS):
                yield column.slice(begin, _ROWS), row + begin, each
            row += batch.num_rows


def _arrow_batches(arrow: Any, source: Any) -> Iterator[Any]:
    """Return the batches of an Arrow file: a stream if `datasets` wrote it, else a file with an index."""
    has_index = source.read(6) == b"ARROW1"
    source.seek(0)
    if not has_index:
        yield from arrow.ipc.open_stream(source)
        return
    opened = arrow.ipc.open_file(source)
    for at in range(opened.num_record_batches):
        yield opened.get_batch(at)


def _require_small_pages(opened: Any, field: str, shard: Shard) -> None:
    """Raise UnpacksTooFar if a page would unpack to more memory than the text of such a file needs."""
    for at in range(shard.begin, opened.num_row_groups if shard.end is None else shard.end):
        group = opened.metadata.row_group(at)
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema.split(".")[0] == field and (
                column.total_uncompressed_size > _most_unpacked(shard.bytes)
            ):
                raise UnpacksTooFar(shard.bytes)


def _require(field: str, names: list[str]) -> None:
    if field not in names:
        raise _NoField(f"'{field}'; columns: {', '.join(names)[:100]}")
