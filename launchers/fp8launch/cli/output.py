"""Data on stdout, messages on stderr; colour only where a terminal reads it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fp8launch.problems import Problem, printable

if TYPE_CHECKING:
    from rich.console import Console

# Below this many items work is over before a bar could be read.
BAR_FROM = 12

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe value; repeatable."
)
recipe_options = (
    set_option,
    click.option("--nodes", type=click.IntRange(min=1), help="Run on this many nodes; weak scaling grows the batch."),
)


def with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator, shown in the order given."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def say(message: str) -> None:
    """A message for people. It may quote logs and names, which a terminal must not obey."""
    click.echo(printable(message), err=True)


# Colours, line ends and tabs pass; whatever else tells a terminal to do something does not, nor C1 codes in UTF-8.
_COMMANDS = re.compile(rb"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]")


def for_terminal(raw: bytes) -> bytes:
    """What a program printed, as a terminal may show it: with its colours, and nothing else that it would obey."""
    return _COMMANDS.sub(lambda match: b"".join(b"\\x%02x" % byte for byte in match[0]), raw)


def console(err: bool = False, width: int = 240, soft_wrap: bool = False) -> Console:
    """Where tables go: `width` columns in a pipe, which has none of its own; with `soft_wrap` longer lines stay whole.

    Texts are only shown, whatever they hold.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Shown(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text = segment.text
                if segment.control or text.isprintable():
                    yield segment
                else:
                    yield Segment(printable(text.replace("\t", "    ")), segment.style)

    terminal = Console(stderr=err).is_terminal
    return Shown(width=None if terminal else width, stderr=err, soft_wrap=soft_wrap and not terminal)


def show_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))


def complain(problems: Iterable[Problem]) -> None:
    """Problems on stderr, one after the other."""
    for problem in problems:
        place = f"{problem.where}: " if problem.where else ""
        colour = "red" if problem.severity == "error" else "yellow"
        label = click.style(problem.severity, fg=colour, bold=True)
        click.echo(f"{place}{label}: {problem.message} {click.style(f'[{problem.code}]', dim=True)}", err=True)
        if problem.fix:
            click.echo(f"    {click.style('fix:', fg='green')} {problem.fix}", err=True)


T = TypeVar("T")


def with_bar(items: Sequence[T], what: str) -> Iterable[T]:
    """The items one by one, with a progress bar on a terminal when there are many."""
    if len(items) < BAR_FROM or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, console=Console(stderr=True), transient=True)


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, err: bool = False
) -> None:
    """A table on stdout, or on stderr; numbers are right-aligned where a column's header ends in a unit."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=None, header_style="bold", pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column.endswith(")") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # A pipe has no width: do not fold what a script or grep reads.
    console(err).print(table)
