"""`fp8launch watch`: a full-screen view of runs, built on rich.Live.

rich is a dependency anyway and is enough for a table, a log and eight keys. Textual would add a package to the login
node for widgets and mouse support that nothing here needs.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import click
from rich.live import Live

from fp8launch.cli import complete
from fp8launch.cli.output import console
from fp8launch.diagnostics import UserError, error
from fp8launch.injob.supervisor.log_lines import tail
from fp8launch.plugins.watch.view import Row, View, opened_row, render
from fp8launch.report.progress import Progress, progress_of
from fp8launch.report.run_status import by_scheduler, detail_of, run_states
from fp8launch.rundir.attempts import attempts_of
from fp8launch.rundir.names import runs_named
from fp8launch.rundir.registry import all_runs, without_removed
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers import by_name
from fp8launch.schedulers.base import JobTimes

# The scheduler is asked less often than logs are read.
ASK_SECONDS = 5.0
READ_SECONDS = 1.0
LOG_BYTES = 1 << 18
_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}
_ESCAPES = {"\x1b[5~": "page-up", "\x1b[6~": "page-down"}
for _letter, _direction in _ARROWS.items():
    # Terminals send one or the other, depending on the mode of the cursor keys.
    _ESCAPES[f"\x1b[{_letter}"] = _ESCAPES[f"\x1bO{_letter}"] = _direction
_KEYS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "escape", "\x04": "quit"}


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN|STUDY|RECIPE...]", shell_complete=complete.runs)
@click.option("-n", "--last", type=click.IntRange(min=1), default=20, show_default=True, help="Number of newest runs.")
def watch(names: tuple[str, ...], last: int) -> int:
    """Watch runs in full screen: state, iteration, time left, loss and speed. Enter opens a run and its log.

    \b
    arrows         select a run, or scroll its log  /  search the log
    enter, escape  open a run, go back              r  only the lines of one rank
    f              follow the end of the log        q  quit; the runs continue
    C, R           cancel or resume the run, after asking
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        message = "`watch` needs a terminal, and standard input or output is not one"
        raise error("not-a-terminal", message, None, "use `fp8launch runs`, or `fp8launch logs RUN -f`")
    _runs_or_newest(names, last)  # a wrong name is an error before the screen is taken
    view = View()
    rows: list[Row] = []
    asked = read = float("-inf")
    with _keyboard() as key, Live(console=console(), screen=True, auto_refresh=False) as live:
        while not view.done:
            now = time.monotonic()
            if now - asked >= ASK_SECONDS:
                rows, asked, read = _rows_left(names, last, rows), now, now
            elif now - read >= READ_SECONDS:
                rows, read = list(filter(None, map(_again, rows))), now
            size = live.console.size
            log = _log(rows, view)
            live.update(render(view, rows, log, size.width, size.height), refresh=True)
            pressed = key(0.25)
            if pressed:
                view = view.press(pressed, [row.run_id for row in rows], size.height)
            if view.order:
                working = replace(view, order="", message=f"{view.order} {view.selected} ...")
                live.update(render(working, rows, log, size.width, size.height), refresh=True)
                view, asked = replace(working, message=_carried_out(view, rows)), float("-inf")
    return 0


def _carried_out(view: View, rows: list[Row]) -> str:
    """Run the command that the user confirmed, and return its last message.

    A process of its own checks, locks and reports as if the user had typed the command.
    """
    path = next((row.run.path for row in rows if row.run_id == view.selected), None)
    if path is None:
        return f"{view.selected} no longer exists"
    words = [sys.executable, "-m", "fp8launch", view.order, str(path)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["done"]
    return lines[0] if done.returncode else lines[-1]


def _rows_left(names: tuple[str, ...], last: int, before: list[Row]) -> list[Row]:
    """Return the current rows without runs that somebody removes in the meantime, even if they were named."""
    try:
        found = _runs_or_newest(names, last)
    except UserError:
        found = [row.run for row in before if row.run.path.is_dir()]
    return without_removed(lambda left: _rows(list(left), before), found)


def _rows(found: list[RunFolder], before: list[Row]) -> list[Row]:
    """Return the current rows. A run that had already ended is not read again."""
    ended = {row.run: row for row in before if row.state.final}
    times = _times(found)
    rows = []
    for run, state in zip(found, run_states(found), strict=True):
        if run in ended and ended[run].state == state:
            rows.append(ended[run])
            continue
        manifest = run.manifest()
        progress = progress_of(run, manifest, state)
        detail = progress.unhealthy
        if state.status != "running":
            detail = detail_of(run, state, progress)
        rows.append(Row(run, manifest, state, progress, times.get(run, JobTimes()), attempts_of(run), detail))
    return rows


def _again(row: Row) -> Row | None:
    """Return the row with the newest lines of its log, without asking the scheduler; None if the run was removed."""
    if row.state.final:
        return row if row.run.path.is_dir() else None
    try:
        progress: Progress = progress_of(row.run, row.manifest, row.state)
    except UserError:
        return None
    detail = progress.unhealthy if row.state.status == "running" else row.detail
    return replace(row, progress=progress, detail=detail)


def _times(found: list[RunFolder]) -> dict[RunFolder, JobTimes]:
    times: dict[RunFolder, JobTimes] = {}
    for name, runs in by_scheduler(found).items():
        try:
            times |= by_name(name).job_times(runs)
        except UserError:
            continue
    return times


def _log(rows: list[Row], view: View) -> list[str]:
    """Return the last lines of the newest log of the run that is open."""
    opened = opened_row(view, rows)
    if opened is None:
        return []
    files = opened.run.logs() or opened.run.batch_output()
    if not files:
        return []
    return tail(files[-1], longest=LOG_BYTES).splitlines()


class _Key:
    """Reads one key from the terminal; returns '' if none is pressed in time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = ""

    def __call__(self, seconds: float) -> str:
        if not self._pending:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return ""
            self._pending = os.read(self._descriptor, 1024).decode("utf-8", "replace") or "\x04"
        for sequence, name in _ESCAPES.items():
            if self._pending.startswith(sequence):
                self._pending = self._pending[len(sequence) :]
                return name
        first, self._pending = self._pending[0], self._pending[1:]
        return _KEYS.get(first, first)


@contextmanager
def _keyboard() -> Iterator[_Key]:
    """Switch off line editing and echo; Ctrl-C still interrupts."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Key(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _runs_or_newest(names: Sequence[str], last: int) -> list[RunFolder]:
    """Return the runs that the names mean, or without names the `last` newest runs."""
    if not names:
        return all_runs()[-last:]
    return [run for name in names for run in runs_named(name)]
