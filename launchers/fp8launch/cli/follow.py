"""Following a run to its end: a progress bar from the iterations in its log."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp8launch.backends.base import Backend, JobState
from fp8launch.cli.output import for_terminal, say
from fp8launch.logs import Iteration, LogTail
from fp8launch.runs.folder import RunFolder

# Asking Slurm costs its controller; reading a file costs nobody.
ASK_SECONDS = {"local": 0.5}
ASK_SLURM_SECONDS = 3.0
LOST_SECONDS = 120.0


def wait_for(run: RunFolder, backend: Backend) -> bool:
    """Show the run's progress until it ends; whether it completed. Ctrl-C leaves the run alone."""
    try:
        state = _watch(run, backend)
    except KeyboardInterrupt:
        say(f"\nthe run goes on: `fp8launch logs {run.run_id} -f`, `fp8launch cancel {run.run_id}`")
        raise
    say(f"{run.run_id}: {state.status}" + (f" ({state.detail})" if state.detail else ""))
    if state.status != "completed":
        _show_end(run)
    return state.status == "completed"


def _watch(run: RunFolder, backend: Backend) -> JobState:
    manifest = run.manifest()
    total = _planned(manifest["megatron"]["argv"])
    every = ASK_SECONDS.get(backend.name, ASK_SLURM_SECONDS)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    tail: LogTail | None = None
    asked, lost = 0.0, 0.0
    state = JobState("pending")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("submitted", total=total, news="")
        while True:
            attempts = run.attempts()
            if attempts and (tail is None or tail.path != attempts[-1].log):
                tail = LogTail(attempts[-1].log)
            for iteration in tail.poll() if tail else []:
                progress.update(task, completed=iteration.number, total=iteration.planned, news=_news(iteration))
                if not console.is_terminal and _worth_a_line(iteration):
                    say(f"iteration {iteration.number}/{iteration.planned} {_news(iteration)}")
            if state.final:
                return state
            now = time.monotonic()
            if now - asked >= every:
                asked, state = now, backend.states([run])[0]
                progress.update(
                    task, description=state.status if state.status != "pending" else state.detail or "pending"
                )
                lost = 0.0 if state.status != "unknown" else lost or now
                if lost and now - lost > LOST_SECONDS:
                    return state
            # One more round after the end: the last lines may have come while the state was asked for.
            if not state.final:
                time.sleep(0.3)


def _planned(argv: list[str]) -> int | None:
    if "--train-iters" in argv:
        return int(argv[argv.index("--train-iters") + 1])
    return None


def _news(iteration: Iteration) -> str:
    parts = []
    if iteration.loss is not None:
        parts.append(f"loss {iteration.loss:.4f}")
    if iteration.step_time_ms is not None:
        parts.append(f"{iteration.step_time_ms:,.0f} ms/iteration")
    return ", ".join(parts)


def _worth_a_line(iteration: Iteration) -> bool:
    step = max(1, iteration.planned // 10)
    return iteration.number % step == 0 or iteration.number == iteration.planned


def _show_end(run: RunFolder, lines: int = 15) -> None:
    """The last words of a run that did not complete."""
    attempts = run.attempts()
    for path in [*(a.log for a in attempts[-1:]), *run.batch_output()[-1:]]:
        text = last_lines(path, lines)
        if text:
            say(f"--- end of {path}\n{text}")


def last_lines(path: Path, count: int) -> str:
    """The last lines of a text file of any size."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 1000 * count))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-count:])
    except OSError:
        return ""


def copy_growing(path: Path, offset: int) -> int:
    """Write what a file has gained since `offset` to stdout; return the new offset."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while block := file.read(1 << 20):
                sys.stdout.buffer.write(for_terminal(block) if sys.stdout.isatty() else block)
                offset += len(block)
    except FileNotFoundError:
        return offset
    sys.stdout.buffer.flush()
    return offset
