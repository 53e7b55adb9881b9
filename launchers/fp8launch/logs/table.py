"""Store iteration lines in columns of doubles, so that a million lines fit in memory and statistics run on arrays."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from fp8launch.logs.field_names import NOT_FINITE, UNITS, field_of, is_health_sign
from fp8launch.logs.lines import Iteration, parse_iterations

NAN = math.nan
# The prefixes that `log_lines.split_prefix` knows, each with the rank as its only group.
_RANK_PREFIXES = (
    r"^ {0,20}(\d{1,6}): ",
    r"^ {0,20}\[(?:default|rank)(\d{1,6})\]:?",
    r"^(?! {0,20}\d{1,6}: | {0,20}\[(?:default|rank))[^|\n]{0,200}?\[rank-(\d{1,6})/\d{1,6}\]",
)
_NO_RANK = r"^(?! {0,20}\d{1,6}: | {0,20}\[(?:default|rank))(?![^|\n]{0,200}\[rank-\d)"
# Limits the memory for columns and the time to compile expressions if a log is garbled.
_MOST_COLUMNS = 100
_MOST_FORMATS = 64
_OWN = ("number", "planned", "rank", "offset")


class IterationTable:
    """Columns of equal length. `column(name)` is an array of doubles, NaN for lines without the field.

    In addition to the fields in `field_names`, there are `number`, `planned` (the total number of iterations), `rank`
    (NaN without a prefix) and `offset` (bytes from the start of the log to the line). `more` adds columns that always
    exist.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        self._columns: dict[str, array[float]] = {name: array("d") for name in (*_OWN, *more)}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Iteration:
        if not -self._length <= row < self._length:
            raise IndexError(row)
        values = {name: column[row] for name, column in self._columns.items() if not math.isnan(column[row])}
        rank = int(values.pop("rank")) if "rank" in values else None
        del values["offset"]
        return Iteration(int(values.pop("number")), int(values.pop("planned")), values, rank)

    def __iter__(self) -> Iterator[Iteration]:
        return (self[i] for i in range(self._length))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def column(self, name: str) -> array[float]:
        """Return the values of a field, one per row. They are all NaN if no line has the field."""
        found = self._columns.get(name)
        if found is None:
            return array("d", [NAN]) * self._length
        return found

    def value(self, name: str, row: int) -> float:
        """Return one value of a column, or NaN if the line does not have the field."""
        found = self._columns.get(name)
        return NAN if found is None else found[row]

    def names_with(self, prefix: str) -> list[str]:
        """Return the sorted names of columns that start with `prefix`."""
        return sorted(name for name in self._columns if name.startswith(prefix))

    def columns(self, rows: Sequence[int]) -> dict[str, array[float]]:
        """Return all columns, reduced to these rows."""
        if not rows:
            return {name: array("d") for name in self._columns}
        first, after = rows[0], rows[0] + len(rows)
        if list(rows) == list(range(first, after)):
            # Copying a block is ten times faster, and in most logs the rows are consecutive.
            return {name: column[first:after] for name, column in self._columns.items()}
        return {name: array("d", [column[row] for row in rows]) for name, column in self._columns.items()}

    def take(self, rows: Sequence[int]) -> IterationTable:
        """Return a table with these rows, in this order."""
        taken = IterationTable(self._columns)
        taken.extend(self.columns(rows), len(rows))
        return taken

    def append(self, record: Iteration, offset: int) -> None:
        values = {**record.values, "number": record.number, "planned": record.planned, "offset": offset}
        if record.rank is not None:
            values["rank"] = record.rank
        self.extend({name: array("d", [value]) for name, value in values.items()}, 1)

    def extend(self, columns: dict[str, array[float]], rows: int) -> None:
        """Add `rows` rows. Missing values are NaN, also in earlier rows of a new column."""
        gap = array("d", [NAN])
        for name in columns:
            if name not in self._columns and len(self._columns) < _MOST_COLUMNS:
                self._columns[name] = gap * self._length
        for name, mine in self._columns.items():
            mine.extend(columns.get(name) or gap * rows)
        self._length += rows

    def set(self, name: str, row: int, value: float) -> None:
        if name not in self._columns:
            if len(self._columns) >= _MOST_COLUMNS:
                return
            self._columns[name] = array("d", [NAN]) * self._length
        self._columns[name][row] = value


class LineFormat:
    """A regular expression built from the labels of one iteration line. It reads all lines like it in a single call.

    This is only a fast path. Lines that it does not match exactly go to `parse_iterations`, which decides.
    """

    def __init__(self, fields: Sequence[str], expression: re.Pattern[str], prefixed: bool) -> None:
        self._fields = ["number", "planned", *fields]
        if prefixed:
            self._fields.insert(0, "rank")
        self._expression = expression

    @classmethod
    def of(cls, line: str) -> LineFormat | None:
        """Return the format of a line that is one record of ` label: number |` fields, None for any other line."""
        start = re.search(r"\biteration\s{1,20}\d{1,15}/\s{0,20}\d{1,15} \|", line)
        records = parse_iterations(line)
        if not start or len(records) != 1:
            return None
        segments = line[start.end() :].split("|")
        if segments[-1].strip():
            return None
        fields, parts = [], [r"iteration {1,20}(\d{1,15})/ {0,20}(\d{1,15}) \|"]
        for segment in segments[:-1]:
            label, colon, _ = segment.rpartition(":")
            name = field_of(label)
            if not colon or name in fields:
                return None
            if name is None:
                parts.append(re.escape(label) + r":[^|\n]*\|")
            elif name in records[0].values or name in UNITS:
                fields.append(name)
                parts.append(re.escape(label) + r": {0,40}([^|/ \n]{1,80})(?:[/ ][^|\n]*)?\|")
            else:
                return None
        has_rank = records[0].rank is not None
        prefix = _NO_RANK
        if has_rank:
            prefix = next((pattern for pattern in _RANK_PREFIXES if re.match(pattern, line)), "")
        if not prefix:
            return None
        before = "^"
        if start.start():  # usually 0, because lines arrive here without their time stamp
            before = prefix + r"[^|\n]{0,400}\b"
        expression = re.compile(before + "".join(parts) + r"[ \r]*$", re.MULTILINE)
        return cls(fields, expression, has_rank)

    def read(self, text: str, lines: int) -> dict[str, array[float]] | None:
        """Return the columns of `lines` lines, or None unless all of them have this format."""
        if "\x1b" in text:
            return None
        rows = self._expression.findall(text)
        if len(rows) != lines:
            return None
        cells = zip(*rows, strict=True)
        try:
            columns = dict(zip(self._fields, map(_numbers, cells), strict=True))
        except ValueError:
            return None
        for name, column in columns.items():
            if is_health_sign(name) and not math.isfinite(sum(column)):
                return None  # `parse_iterations` distinguishes NaN from a missing value
        for name in UNITS.keys() & columns.keys():
            ours, factor = UNITS[name]
            columns[ours] = array("d", [factor * value for value in columns.pop(name)])
        return columns


def _numbers(cells: tuple[str, ...]) -> array[float]:
    distinct = set(cells)
    convert: Callable[[str], float] = float
    if 8 * len(distinct) < len(cells):
        # Counters and batch sizes rarely change, and a dict look-up is several times cheaper than a conversion.
        convert = {cell: float(cell) for cell in distinct}.__getitem__
    return array("d", list(map(convert, cells)))


class Collector:
    """Adds iteration lines to a table."""

    def __init__(self, table: IterationTable) -> None:
        self.table = table
        self._formats: list[LineFormat] = []
        self._tried = 0

    def add(self, lines: list[bytes], offsets: list[int]) -> None:
        """Read lines, given without their newline. Lines without an iteration are ignored."""
        if not lines:
            return
        text = b"\n".join(lines).decode("utf-8", "replace")
        # If formats keep changing, trying several costs more than it saves.
        formats = self._formats[:1] if self._tried >= _MOST_FORMATS else self._formats
        for known in formats:
            columns = known.read(text, len(lines))
            if columns:
                columns["offset"] = array("d", offsets)
                self.table.extend(columns, len(lines))
                return
        if len(lines) > 16:
            middle = len(lines) // 2
            self.add(lines[:middle], offsets[:middle])
            self.add(lines[middle:], offsets[middle:])
            return
        for line, offset in zip(lines, offsets, strict=True):
            self._add_one(line.decode("utf-8", "replace"), offset)

    def _add_one(self, line: str, offset: int) -> None:
        records = parse_iterations(line)
        for record in records:
            self.table.append(record, offset)
        if any(NOT_FINITE in record.values for record in records):
            return  # most lines have another format
        if len(records) != 1 or self._tried >= _MOST_FORMATS or any(known.read(line, 1) for known in self._formats):
            return
        self._tried += 1
        found = LineFormat.of(line)
        if found and found.read(line, 1):
            # Try the newest format first, because one format usually lasts for many lines.
            self._formats = [found, *self._formats[:7]]
