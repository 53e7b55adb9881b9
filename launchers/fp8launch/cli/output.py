"""Print data on stdout and messages on stderr, in colour on terminals only. Also defines shared options."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from fp8launch.cli import complete
from fp8launch.diagnostics import ANSWER_IS_NO, Problem, error, printable

if TYPE_CHECKING:
    from rich.console import Console

# Below this many items, the work is over before anyone could read a progress bar.
BAR_FROM = 12


class FiniteRange(click.FloatRange):
    """Numbers in a range. Click's own type accepts `nan`, and `inf` if the range has no upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete.keys,
    help="Override a recipe value; repeatable.",
)
cluster_option = click.option("--cluster", shell_complete=complete.clusters, help="Cluster profile: a name or a file.")
logs_argument = click.argument(
    "names", nargs=-1, required=True, metavar="RUN|STUDY|RECIPE|LOG...", shell_complete=complete.runs
)
recipe_options = (
    set_option,
    click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes; weak scaling grows the batch with it."),
)


def with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combine click options into one decorator. Help lists them in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def with_gpu(overrides: Sequence[str], gpu: str | None) -> tuple[str, ...]:
    """Append an override for the GPU model if one was given."""
    if gpu is None:
        return tuple(overrides)
    from fp8launch.recipe.load import Override

    return (*overrides, Override(f"resources.gpu={gpu}", f"--gpu {gpu}"))


def overrides_text(overrides: Iterable[str]) -> str:
    """Format overrides as command-line options."""
    import shlex

    return " ".join(f"--set {shlex.quote(word)}" for word in overrides)


def number_text(value: float | None, form: str) -> str:
    """Format a number with the format spec `form`; None becomes an empty string."""
    if value is None:
        return ""
    return format(value, form)


def styled(text: str, **style: Any) -> str:
    """Apply click styles such as `fg`, unless NO_COLOR is set or the terminal has no colours."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return text
    return click.style(text, **style)


def eprint(message: str) -> None:
    """Print a message on stderr. Control characters are escaped because messages quote logs and file names."""
    click.echo(printable(message), err=True)


def echo(text: object = "", nl: bool = True, **style: Any) -> None:
    """Print data on stdout. On a terminal, control characters are escaped.

    `style` takes click's style names, such as `fg` and `bold`.
    """
    line = str(text)
    if sys.stdout.isatty():
        line = printable(line)
    if style:
        line = styled(line, **style)
    click.echo(line, nl=nl)


def confirm(question: str, what: str, declined: str = "nothing was submitted") -> None:
    """Ask for confirmation. Raise UserError if the answer is no or standard input is not a terminal."""
    if not sys.stdin.isatty():
        message = f"standard input is not a terminal, so the {what} cannot be confirmed"
        raise error("not-asked", message, fix="pass --yes")
    if not click.confirm(question, err=True):
        raise error("declined", declined, exit_code=ANSWER_IS_NO)


def console(err: bool = False, width: int = 240, soft_wrap: bool = False) -> Console:
    """Return a rich console for tables, progress bars and full-screen views, `width` columns wide if piped.

    With `soft_wrap`, longer lines are not broken when piped. Text is printed literally: control characters are
    escaped, and rich's markup is off.
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

    options: dict[str, Any] = {"stderr": err, "markup": False, "emoji": False, "highlight": False}
    if not Console(stderr=err).is_terminal:
        options |= {"width": width, "soft_wrap": soft_wrap}
    return Shown(**options)


def show_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))


_SEVERITY_COLOUR = {"error": "red", "warning": "yellow"}


def print_problems(problems: Iterable[Problem], err: bool = True) -> None:
    """Print problems on stderr, or on stdout if `err` is false."""
    for problem in problems:
        if problem.kind == "advisory":
            click.echo(_advisory_text(problem), err=err)
            continue
        label = styled(problem.severity, fg=_SEVERITY_COLOUR[problem.severity], bold=True)
        line = f"{label}: {problem.message} {styled(f'[{problem.code}]', dim=True)}"
        if problem.where:
            line = f"{problem.where}: {line}"
        click.echo(line, err=err)
        if problem.fix:
            click.echo(f"    {styled('fix:', fg='green')} {problem.fix}", err=err)


def _advisory_text(problem: Problem) -> str:
    """Format a known bug in lines of at most 80 columns. Its URL is never broken, so that it can be copied."""
    where = f"{problem.where}: " if problem.where else ""
    first, *lines = folded(f"{where}{problem.severity}: {problem.message} [{problem.code}]", "    ")
    label = styled(problem.severity, fg=_SEVERITY_COLOUR[problem.severity], bold=True)
    lines.insert(0, first.replace(f"{problem.severity}:", f"{label}:", 1))
    if problem.fix:
        first, *rest = folded(f"    fix: {problem.fix}", "         ")
        lines += [first.replace("fix:", styled("fix:", fg="green"), 1), *rest]
    if problem.source:
        lines.append(f"    {styled('source:', fg='green')} {problem.source}")
    return "\n".join(lines)


def folded(text: str, indent: str) -> list[str]:
    """Break a text into lines of at most 80 columns. All lines but the first begin with `indent`."""
    return textwrap.wrap(text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


T = TypeVar("T")


def with_bar(items: Sequence[T], what: str) -> Iterable[T]:
    """Yield the items, with a progress bar if there are many and stderr is a terminal."""
    if len(items) < BAR_FROM or not sys.stderr.isatty():
        return items
    from rich.markup import escape
    from rich.progress import track

    return track(items, escape(what), console=console(err=True), transient=True)


@contextmanager
def counting_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal. Call the yielded function once after each of the `total` steps."""
    if not total or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(escape(what)), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(err=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


# Minimum width at which a column of sentences is readable.
NARROWEST = 24
# Spaces between two columns.
GAP = 2


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    err: bool = False,
    unbroken: Collection[str] = (),
    drop: Sequence[str] = (),
    right: Sequence[str] = (),
) -> None:
    """Print a table on stdout or stderr. Columns in `right`, or with a unit in their header, are right-aligned.

    Cells of `unbroken` columns are never folded, so that ids can be copied. If the terminal is too narrow, columns in
    `drop` are left out, starting with the first.
    """
    from rich.table import Table
    from rich.text import Text

    cells = list(map(list, rows))
    screen = console(err)
    kept, needed = _columns_that_fit(columns, cells, screen.width, unbroken, drop)
    if unbroken:
        screen.width = max(screen.width, needed)
    table = Table(title=title, box=None, header_style="bold", pad_edge=False, title_justify="left")
    for position in kept:
        column = columns[position]
        justify: Literal["left", "right"] = "left"
        if column.endswith(")") or column in right:
            justify = "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in unbroken)
    for row in cells:
        table.add_row(*(Text(row[position]) for position in kept))
    # Lines are not folded in a pipe, where grep or a script may read them.
    screen.print(table)


def _columns_that_fit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, unbroken: Collection[str], drop: Sequence[str]
) -> tuple[list[int], int]:
    """Return the indices of the columns to show and their minimum widths."""
    least = []
    for position, column in enumerate(columns):
        longest = max((len(row[position]) for row in rows), default=0)
        if column not in unbroken:
            longest = min(longest, NARROWEST)
        # Headers may break between words.
        heading = len(column)
        if column not in unbroken:
            heading = max(map(len, column.split()), default=0)
        least.append(max(heading, longest))
    kept = list(range(len(columns)))

    def needed() -> int:
        return sum(least[position] + GAP for position in kept) - GAP

    for column in drop:
        if needed() <= width:
            break
        if column in columns:
            kept.remove(columns.index(column))
    return kept, needed()
