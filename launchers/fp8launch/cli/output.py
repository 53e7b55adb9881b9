"""Data on stdout, messages on stderr; colour only where a terminal reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from fp8launch.problems import Problem

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
recipe_options = (
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe value; repeatable."),
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
    """A message for people."""
    click.echo(message, err=True)


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


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """A table on stdout; numbers are right-aligned where a column's header ends in a unit."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=None, header_style="bold", pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column.endswith(")") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # A pipe has no width: do not fold what a script or grep reads.
    terminal = Console().is_terminal
    Console(width=None if terminal else 240).print(table)
