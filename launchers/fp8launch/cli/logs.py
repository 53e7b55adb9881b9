"""`fp8launch logs`: what a run printed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from fp8launch import backends
from fp8launch.cli.follow import ASK_SECONDS, ASK_SLURM_SECONDS, copy_growing, last_lines
from fp8launch.cli.output import for_terminal, say
from fp8launch.problems import error
from fp8launch.runs.folder import RunFolder
from fp8launch.runs.store import find_run


@click.command()
@click.argument("name", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows, until the run ends.")
@click.option("-n", "--lines", type=click.IntRange(min=1), help="Only the last N lines.")
@click.option("--attempt", type=click.IntRange(min=1), help="The Nth attempt instead of the newest.")
@click.option("--batch", is_flag=True, help="What the batch script itself said, instead of the training.")
def logs(name: str, follow: bool, lines: int | None, attempt: int | None, batch: bool) -> None:
    """Print the log of a run."""
    run = find_run(name)
    files = run.batch_output() if batch else [a.log for a in run.attempts()]
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
    if lines is None:
        copy_growing(path, 0)
    else:
        text = last_lines(path, lines)
        click.echo(for_terminal(text.encode(errors="replace")).decode() if sys.stdout.isatty() else text)


def _follow(run: RunFolder) -> None:
    backend = backends.backend(str(run.manifest().get("backend")))
    every = ASK_SECONDS.get(backend.name, ASK_SLURM_SECONDS)
    offsets: dict[Path, int] = {}
    asked, final = 0.0, False
    while True:
        # A requeued run begins another log; what the one before still gains is shown too.
        for attempt in run.attempts():
            offsets[attempt.log] = copy_growing(attempt.log, offsets.get(attempt.log, 0))
        if final:
            return
        if time.monotonic() - asked >= every:
            asked, state = time.monotonic(), backend.states([run])[0]
            final = state.final
            if final:
                say(f"{run.run_id}: {state.status}" + (f" ({state.detail})" if state.detail else ""))
                continue
        time.sleep(0.3)
