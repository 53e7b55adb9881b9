"""A comparison as Markdown for a pull request, as CSV for everything else, and for the terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from fp8launch.diagnostics import printable
from fp8launch.report.columns import Table, csv_names, csv_row, main_table
from fp8launch.report.comparison import Comparison
from fp8launch.report.conclusion import conclusion
from fp8launch.report.parity import FEWEST_ITERATIONS, FEWEST_LINES, Parity
from fp8launch.report.remarks import difference_lines, differences_table, phases_table, remarks
from fp8launch.report.steady_state import RULE_NOTE
from fp8launch.report.text import add_column


def to_markdown(comparison: Comparison) -> str:
    """Return GitHub's Markdown: the conclusion, the table, remarks, differences, parity, commands."""
    parts = [f"**{_escaped(conclusion(comparison))}**", _markdown_table(main_table(comparison.entries))]
    lines = []
    for problem in comparison.problems:
        lines.append(f"**unlike**: {_escaped(problem)}")
    lines += map(_escaped, [*remarks(comparison), RULE_NOTE])
    parts.append(_bullets(lines))
    phases = phases_table(comparison)
    if phases:
        parts.append("### Phases\n\n" + _markdown_table(phases))
    differences = differences_table(comparison)
    if differences.rows:
        parts.append("### Differences\n\n" + _markdown_table(differences))
    if comparison.parities:
        sentences = map(Parity.sentence, comparison.parities)
        parts.append("### Loss parity\n\n" + _bullets(map(_escaped, sentences)))
    commands = "\n".join(map(printable, comparison.commands()))
    if commands:
        parts.append("### Commands\n\n```\n" + commands.replace("```", "` ` `") + "\n```")
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _markdown_table(table: Table) -> str:
    rule = []
    for number in table.numbers:
        rule.append("---:" if number else "---")
    lines = [_markdown_row(map(_escaped, table.headers)), _markdown_row(rule)]
    for row in table.rows:
        lines.append(_markdown_row(map(_escaped, row)))
    return "\n".join(lines)


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# Characters with a meaning in GitHub's Markdown: cells, emphasis, code, links, images, HTML.
_MARKUP = re.compile(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)|!(?=\[)")
_ZERO_WIDTH_SPACE = "\u200b"


def _escaped(text: str) -> str:
    """Show a text as it is: without markup, HTML, images or mentions of people, on one line."""
    text = _MARKUP.sub(r"\\\g<0>", printable(text).replace("\n", " "))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # GitHub resolves mentions and issue numbers even behind a backslash.
    return re.sub(r"[@#](?=\w)", rf"\g<0>{_ZERO_WIDTH_SPACE}", text)


def to_csv(comparison: Comparison) -> str:
    """Return one line for each row, numbers unrounded, an empty cell where nothing is known."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(csv_names())
    for entry in comparison.entries:
        writer.writerow(map(csv_cell, csv_row(entry)))
    return out.getvalue()


# Places where a spreadsheet, split at commas, semicolons or tabs, would read a formula; some read the wide
# signs of East Asian fonts for the same.
_FORMULA = re.compile(r"(^|[;,\t\r\n])(\s*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])")


def csv_cell(value: object) -> object:
    """Put a quote before text that a spreadsheet would read as a formula: some formulas run programs."""
    if isinstance(value, str):
        return _FORMULA.sub(r"\1\2'", value)
    return value


def to_terminal(comparison: Comparison, width: int = 120) -> RenderableType:
    """Render the table and the remarks in `width` columns; of the differences only names.

    The other formats have all values. Columns that are not needed to compare are left out if there is no room.
    """
    table = main_table(comparison.entries)
    parts: list[RenderableType] = [_rich_table(table, width), Text("")]
    parts += [Text(conclusion(comparison), style="bold"), Text("")]
    phases = phases_table(comparison)
    if phases:
        parts += [_rich_table(phases, width), Text("")]
    for problem in comparison.problems:
        parts.append(Text(f"not valid: {problem}", style="bold red"))
    parts += map(Text, remarks(comparison))
    parts += map(Text, difference_lines(comparison))
    parts += map(Text, _parity_lines(comparison.parities))
    shown = _widths(table, width)
    hidden = [header for position, header in enumerate(table.headers) if position not in shown]
    if hidden:
        parts.append(Text(f"not shown in {width} columns, but in --md, --csv and --html: {', '.join(hidden)}"))
    parts.append(Text(style="dim"))
    return Group(*parts)


def _parity_lines(parities: Sequence[Parity]) -> list[str]:
    """Return a line for each verdict; runs that are too short for one share a line."""
    short = [parity for parity in parities if parity.verdict == "too short"]
    if len(short) < 2:
        return [f"parity: {parity.sentence()}" for parity in parities]
    lines = [f"parity: {parity.sentence()}" for parity in parities if parity.verdict != "too short"]
    variants = [parity.variant for parity in short]
    which = "; ".join(variants) if len(variants) <= _MOST_NAMES else f"{len(variants)} rows"
    needed = f"at least {FEWEST_ITERATIONS} iterations and {FEWEST_LINES} lines"
    return [*lines, f"parity: too short to judge {which} (needed: {needed})"]


# More variants than these are counted.
_MOST_NAMES = 4
# Columns that a narrow terminal does not show, by the beginning of their header; the first is dropped first. The last
# two are dropped earlier if all rows have the same value.
_DROPPED = ("energy", "cost", "tokens/s in all", "TFLOP/s", "nodes", "step time", "peak memory", "MFU")
_DROPPED_LAST = ("runs", "GPUs")
# Numbers up to this length, such as `4.9394 ± 0.0179 (139.69)`, stay on one line, and so do shorter texts.
_WHOLE, _WHOLE_WORDS = 28, 16
# Longer names of rows take several lines of at least this length.
_NAME = 22
_GAP = 2


def _rich_table(table: Table, width: int) -> RichTable:
    made = RichTable(box=None, pad_edge=False, header_style="bold")
    widths = _widths(table, width)
    for position, wide in widths.items():
        add_column(made, table.headers[position], table.numbers[position], overflow="fold", width=wide)
    for row in table.rows:
        made.add_row(*[Text(_in_lines(row[position], wide)) for position, wide in widths.items()])
    return made


def _in_lines(cell: str, width: int) -> str:
    """Put an interval in brackets on a line of its own if the cell is too long for one line."""
    return cell if len(cell) <= width else cell.replace(" [", "\n[")


def _widths(table: Table, width: int) -> dict[int, int]:
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
    has_tokens = "tokens/s/GPU" in table.headers
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
    # The columns that need least get their full width first.
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
