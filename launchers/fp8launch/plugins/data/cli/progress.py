"""The progress of a build: a bar on a terminal, an occasional line in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fp8launch.cli.output import console, eprint
from fp8launch.plugins.data.build import Totals

# Seconds between two lines if stderr is not a terminal.
LINE_SECONDS = 30.0


@contextmanager
def shown_progress() -> Iterator[Callable[[Totals], None]]:
    """Yield a function that shows the progress of a build."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    screen = console(err=True)
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rates]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    begun = last_line = time.monotonic()
    first: list[Totals] = []
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None, rates="")

        def show(now: Totals) -> None:
            nonlocal last_line
            if not first:
                first.append(now)
            rates = speed(now, first[0], time.monotonic() - begun)
            bar.update(task, completed=now.bytes, total=max(now.of_bytes, 1), rates=rates)
            if not screen.is_terminal and time.monotonic() - last_line >= LINE_SECONDS:
                last_line = time.monotonic()
                eprint(f"{100 * now.bytes / max(now.of_bytes, 1):.0f} % {rates}")

        yield show


def speed(now: Totals, first: Totals, seconds: float) -> str:
    """Return documents/s and tokens/s since `first`."""
    documents = (now.documents - first.documents) / max(seconds, 1e-9)
    tokens = (now.tokens - first.tokens) / max(seconds, 1e-9)
    return f"{documents:,.0f} documents/s, {tokens / 1e6:,.2f} M tokens/s"
