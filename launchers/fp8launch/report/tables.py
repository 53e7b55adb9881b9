"""Tables of text, rendered for a terminal or as Markdown. The HTML page renders its own (`plugins/plots`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from fp8launch.diagnostics import printable


@dataclass(frozen=True)
class Table:
    """A table of text; `numbers` says which columns are right-aligned."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[bool, ...]


# --- Terminal -------------------------------------------------------------------------------------------------------


def rich_table(table: Table) -> RichTable:
    """Render a table at its natural width."""
    made = RichTable(box=None, pad_edge=False, header_style="bold")
    for header, number in zip(table.headers, table.numbers, strict=True):
        add_column(made, header, number)
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made


def add_column(table: RichTable, header: str, number: bool, **options: Any) -> None:
    """Add a column to a table, right-aligned if it holds numbers."""
    if number:
        table.add_column(header, justify="right", **options)
    else:
        table.add_column(header, **options)


# Columns that a narrow terminal does not show, by the beginning of their header; the first is dropped first. The
# others are dropped earlier if all rows have the same value.
_DROPPED = ("energy", "cost", "tokens/s in all", "TFLOP/s", "nodes", "step time", "peak memory", "MFU")
_DROPPED_LAST = ("status", "lines", "last loss", "runs", "GPUs", "processes", "loss at the end")
# Numbers up to this length, such as `4.9394 ± 0.0179 (139.69)`, stay on one line, and so do shorter texts.
_WHOLE, _WHOLE_WORDS = 28, 16
# Longer names of rows take several lines of at least this length.
_NAME = 22
_GAP = 2


def fitted_table(table: Table, width: int) -> RichTable:
    made = RichTable(box=None, pad_edge=False, header_style="bold")
    widths = fitted_widths(table, width)
    for position, wide in widths.items():
        add_column(made, table.headers[position], table.numbers[position], overflow="fold", width=wide)
    for row in table.rows:
        cells = [row[position] for position in widths]
        # An interval in brackets gets its own line if the cell is too long for one line.
        lines = zip(cells, widths.values(), strict=True)
        made.add_row(*[Text(cell if len(cell) <= wide else cell.replace(" [", "\n[")) for cell, wide in lines])
    return made


def fitted_widths(table: Table, width: int) -> dict[int, int]:
    """Return the columns that are shown, and how wide each is: words, numbers and short cells stay whole."""
    columns: dict[int, tuple[int, int]] = {}
    for position, texts in enumerate(zip(table.headers, *table.rows, strict=True)):
        whole = _WHOLE if table.numbers[position] else _WHOLE_WORDS
        least, most = _least(whole, *texts), max(map(len, texts))
        if position == 0:
            least = max(least, min(most, _NAME))
        columns[position] = least, most

    def needed() -> int:
        return sum(least + _GAP for least, _ in columns.values())

    room = width + _GAP
    has_tokens = any(header.startswith("tokens/s/") for header in table.headers)
    constant = [
        header
        for header, *cells in zip(table.headers, *table.rows, strict=True)
        if header in _DROPPED_LAST and len(set(cells)) == 1
    ]
    for start in (*_DROPPED, *constant, *_DROPPED_LAST):
        if needed() <= room:
            break
        for position in list(columns):
            if table.headers[position].startswith(start) and not (start == "step time" and not has_tokens):
                del columns[position]
    # The narrowest columns get their full width first.
    spare = room - needed()
    widths = dict.fromkeys(columns, 0)
    for at, (least, most) in sorted(columns.items(), key=lambda column: column[1][1] - column[1][0]):
        more = max(min(most - least, spare), 0)
        widths[at] = least + more
        spare -= more
    return widths


def _least(whole: int, header: str, *cells: str) -> int:
    """Return the width of the longest text of a column that stays on one line, for cells of up to `whole` letters."""
    parts = header.split()
    for cell in cells:
        for line in cell.replace(" [", "\n[").split("\n"):
            parts += [line] if len(line) <= whole else line.split()
    return min(max(map(len, parts), default=0), _WHOLE)


# --- Markdown -------------------------------------------------------------------------------------------------------


def markdown_table(table: Table) -> str:
    rule = []
    for number in table.numbers:
        rule.append("---:" if number else "---")
    lines = [_markdown_row(map(escaped, table.headers)), _markdown_row(rule)]
    for row in table.rows:
        lines.append(_markdown_row(map(escaped, row)))
    return "\n".join(lines)


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# Characters with a meaning in GitHub's Markdown: cells, emphasis, code, links, images, HTML.
_MARKUP = re.compile(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)|!(?=\[)")
_ZERO_WIDTH_SPACE = "\u200b"


def escaped(text: str) -> str:
    """Return a text that Markdown shows literally, on one line: no markup, HTML, images or mentions of people."""
    text = _MARKUP.sub(r"\\\g<0>", printable(text).replace("\n", " "))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # GitHub resolves mentions and issue numbers even behind a backslash.
    return re.sub(r"[@#](?=\w)", rf"\g<0>{_ZERO_WIDTH_SPACE}", text)
