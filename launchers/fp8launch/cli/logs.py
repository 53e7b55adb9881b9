"""`fp8launch logs`: print or follow the log of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from fp8launch import schedulers
from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint
from fp8launch.cli.terminal_text import GrowingFile, TerminalText, last_lines
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.logs.rank_lines import as_csv, lines_of_node, lines_of_rank
from fp8launch.rundir.names import run_named
from fp8launch.rundir.run_dir import RunFolder


@click.command()
@click.argument("name", metavar="RUN|RECIPE", shell_complete=complete.runs)
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the run ends.")
@click.option("-n", "--lines", type=click.IntRange(min=1), metavar="N", help="Print only the last N lines.")
@click.option(
    "--attempt", type=click.IntRange(min=1), metavar="N", help="Print the log of attempt N instead of the newest."
)
@click.option("--batch", is_flag=True, help="Print the output of the batch script instead of the training.")
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="N",
    help="Print only the lines of rank N (under torchrun: on its node).",
)
@click.option("--node", metavar="NAME", help="Print only the lines of the processes on this node.")
@click.option("--path", "show_path", is_flag=True, help="Print the path of the log instead.")
@click.option("--metrics", is_flag=True, help="Print the iterations as CSV: loss, step time, TFLOP/s and others.")
def logs(
    name: str,
    follow: bool,
    lines: int | None,
    attempt: int | None,
    batch: bool,
    rank: int | None,
    node: str | None,
    show_path: bool,
    metrics: bool,
) -> None:
    """Print the log of a run, or of the newest run of a recipe."""
    given = {"--rank": rank is not None, "--node": node, "--path": show_path, "--metrics": metrics}
    _refuse_combinations([flag for flag, value in given.items() if value], follow)
    run = run_named(name, eprint)
    files = run.batch_output() if batch else run.logs()
    if attempt is not None and attempt > len(files):
        raise error("no-attempt", f"{run.run_id} has {len(files)} attempts, not {attempt}", "--attempt")
    if follow:
        _follow(run)
        return
    if not files:
        raise error(
            "no-log", f"{run.run_id} has no log yet", str(run.path / "logs"), "`fp8launch runs` shows its state", 1
        )
    path = files[(attempt or len(files)) - 1]
    if show_path:
        echo(path)
    elif metrics:
        echo(as_csv(path), nl=False)
    elif rank is not None:
        _print_some(path, f"rank {rank}", list(lines_of_rank(path, rank)), lines)
    elif node is not None:
        _print_some(path, f"node {node}", list(lines_of_node(path, node)), lines)
    elif lines is None:
        GrowingFile(path).copy(final=True)
    else:
        _print_last(path, lines)


def _refuse_combinations(chosen: Sequence[str], follow: bool) -> None:
    """Refuse to combine options that select lines, with each other or with -f."""
    if chosen and follow:
        raise click.UsageError(f"{' and '.join(chosen)} cannot follow with -f; `fp8launch watch` follows and filters")
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} cannot be combined; `fp8launch watch` follows and filters")


def _print_last(path: Path, count: int) -> None:
    text = last_lines(path, count)
    if sys.stdout.isatty():
        text = TerminalText().feed(text.encode(errors="replace"), final=True)
    sys.stdout.write(f"{text}\n")


def _print_some(path: Path, whose: str, found: list[str], last: int | None) -> None:
    """Print the lines of a rank or node, or only the last few."""
    if not found:
        message = f"no line of the log belongs to {whose}"
        fix = "the log of a single process has no ranks; `fp8launch logs RUN` prints the whole log"
        raise error("no-lines", message, str(path), fix, ANSWER_IS_NO)
    if last:
        found = found[-last:]
    for line in found:
        echo(line)


def _follow(run: RunFolder) -> None:
    scheduler = schedulers.of_run(run)
    every = scheduler.capabilities.poll_seconds
    files: dict[Path, GrowingFile] = {}
    asked, final = 0.0, False
    while True:
        # A requeued run starts a new log, but the old one may still receive lines. Print both.
        for attempt in run.attempts():
            files.setdefault(attempt.log, GrowingFile(attempt.log)).copy(final)
        if final:
            return
        if time.monotonic() - asked >= every:
            asked, state = time.monotonic(), scheduler.state(run)
            final = state.final
            if final:
                eprint(f"{run.run_id}: {state}")
                continue
        time.sleep(0.3)
