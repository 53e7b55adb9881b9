"""Following a run to its end: a progress bar from the iterations in its log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp8launch.cli.notify import load_config, notify
from fp8launch.cli.output import console as output_console
from fp8launch.cli.output import eprint
from fp8launch.cli.terminal_text import TerminalText
from fp8launch.diagnostics import UserError
from fp8launch.injob.regular_files import open_regular
from fp8launch.injob.supervisor.failure_pattern import EXCEPTION
from fp8launch.injob.supervisor.failures import traceback_of
from fp8launch.injob.supervisor.health_rules import HealthProblem, errors_of
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE
from fp8launch.logs import Failure, Iteration, LogTail
from fp8launch.logs.file_slices import lines, tail
from fp8launch.report.progress import progress_of
from fp8launch.report.run_facts import stated_arguments
from fp8launch.report.run_report import RunReport
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState, Scheduler
from fp8launch.untyped import as_int

LOST_SECONDS = 120.0
# The last frames and the exception: the frames of launchers above them say nothing.
TRACEBACK_LINES = 12
# Tracebacks of many ranks are interleaved.
_TRACEBACK_BYTES = 1 << 20


def wait_for(run: RunFolder, scheduler: Scheduler, brief: bool = False) -> bool:
    """Show the run's progress until it ends, then its report; return whether it completed, did not fail and is healthy.

    Ctrl-C does not end the run. With `brief`, for the runs of a study, a run that completed gets one line.
    """
    config = load_config().notify

    def alarm(problem: HealthProblem) -> None:
        """Report a problem in the training's health while the run is going; errors are also notified."""
        eprint(f"{run.run_id}: {problem.sentence}")
        if problem.severity == "error" and (config.command or config.webhook):
            state = JobState("running")
            text = f"{run.run_id}: unhealthy: {problem.code}: {problem.message}"
            notify(config, text, True, {**_message(run, state, None), "health": [problem.as_json()]})

    state = watch_to_end(run, scheduler, "run", alarm)
    completed = state.status == "completed"
    report = _report(run)
    # A job may end well although its training is NaN, or did not run in FP8: that is what `parse` reports.
    good = completed and (report is None or report.status not in ("failed", "unhealthy"))
    if report is not None and not (brief and good):
        _show_report(report)
    if not completed:
        show_failure(run, report)
    if config.command or config.webhook:
        notify(config, _sentence(run, state, report), not good, _message(run, state, report))
    return good


def _report(run: RunFolder) -> RunReport | None:
    """What `parse` says of a run; None where it left no log."""
    from fp8launch.cli.parse import report_of

    try:
        return report_of(run)
    except (UserError, OSError):
        return None


def _show_report(report: RunReport) -> None:
    from fp8launch.report.text import render_text

    output_console(err=True, width=120, soft_wrap=True).print(render_text(report))


def _sentence(run: RunFolder, state: JobState, report: RunReport | None) -> str:
    text = f"{run.run_id}: {state.status}"
    if report is not None and report.failure is not None:
        return f"{text}: {report.failure.code}: {report.failure.message}"
    if report is not None and report.status == "unhealthy":
        return f"{text}, unhealthy: {errors_of(report.health)[0].message}"
    if report is not None and report.tokens_per_s_per_gpu is not None:
        return f"{text}, {report.tokens_per_s_per_gpu.median:,.0f} tokens/s/GPU"
    return text


def _message(run: RunFolder, state: JobState, report: RunReport | None) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "state": state.status,
        "detail": state.detail,
        "failure": report and report.failure and report.failure.as_json(),
        "health": [problem.as_json() for problem in report.health] if report else [],
        "loss": report and report.loss_last,
        "iteration": report and report.iteration_last,
    }


def watch_to_end(
    run: RunFolder, scheduler: Scheduler, what: str, alarm: Callable[[HealthProblem], None] = lambda problem: None
) -> JobState:
    """Show a run's progress until it ends, then its state; return that. Ctrl-C does not end what the run does.

    `alarm` is called once for each code and severity in the training's health, as soon as the log shows it.
    """
    try:
        state = _watch(run, scheduler, alarm)
    except KeyboardInterrupt:
        eprint(f"\nthe {what} continues: `fp8launch logs {run.run_id} -f`, `fp8launch cancel {run.run_id}`")
        raise
    eprint(f"{run.run_id}: {state}")
    return state


def _watch(run: RunFolder, scheduler: Scheduler, alarm: Callable[[HealthProblem], None]) -> JobState:
    """Show a run's progress until it ends; return its last state."""
    manifest = run.manifest()
    total = as_int(stated_arguments(manifest).get("train_iters"))
    every = scheduler.capabilities.poll_seconds
    screen = output_console(err=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    news = _NewIterations(run)
    reported: set[tuple[str, str]] = set()
    asked, lost = 0.0, 0.0
    state = JobState("pending")
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as progress:
        task = progress.add_task("submitted", total=total, news="")
        while True:
            for iteration in news.poll():
                progress.update(task, completed=iteration.number, total=iteration.planned, news=_news(iteration))
                if not screen.is_terminal and _worth_a_line(iteration):
                    eprint(f"iteration {iteration.number}/{iteration.planned} {_news(iteration)}")
            if state.final:
                return state
            now = time.monotonic()
            if now - asked >= every:
                asked, state = now, scheduler.state(run)
                for problem in progress_of(run, manifest, state).health:
                    # A warning may become an error, which is reported too.
                    kind = (problem.code, problem.severity)
                    if kind not in reported:
                        reported.add(kind)
                        alarm(problem)
                progress.update(task, description=_stage(run, manifest, state))
                if state.status != "unknown":
                    lost = 0.0
                elif not lost:
                    lost = now
                if lost and now - lost > LOST_SECONDS:
                    return state
            # One more round after the end: the last lines may have come while the state was asked for.
            if not state.final:
                time.sleep(0.3)


class _NewIterations:
    """The iterations that the log of a run's newest attempt gains."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._tail: LogTail | None = None

    def poll(self) -> list[Iteration]:
        attempts = self._run.attempts()
        if not attempts:
            return []
        log = attempts[-1].log
        if self._tail is None or self._tail.path != log:
            self._tail = LogTail(log)
        return self._tail.poll()


def _stage(run: RunFolder, manifest: dict[str, Any], state: JobState) -> str:
    """The state in a word; before the first iteration the stage of the start-up, in the queue Slurm's reason."""
    if state.status == "pending":
        return str(state).replace("pending", "queued", 1)
    return progress_of(run, manifest, state).stage or state.status


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


def show_failure(run: RunFolder, report: RunReport | None) -> None:
    """Show the end of the traceback behind a failure. Without a recognized failure, show the last lines of the log."""
    failure = report.failure if report is not None else None
    if failure is None:
        show_end(run)
        return
    for path in reversed(run.logs()):
        shown = traceback_in(path, failure)
        if shown:
            eprint(f"--- end of the traceback in {path}\n" + "\n".join(shown[-TRACEBACK_LINES:]))
            return
    if failure.depth >= EXCEPTION:
        show_end(run)  # this line says that something failed, not what


def traceback_in(path: Path, failure: Failure) -> list[str]:
    """The traceback in a log that ends at a failure's line; empty where there is none."""
    begin, end = max(0, failure.offset - _TRACEBACK_BYTES), failure.offset + 4 * LONGEST_LINE
    try:
        near = [text for _, text in lines(path, begin, end)]
    except OSError:
        return []
    return traceback_of(near, failure.source)


def show_end(run: RunFolder, count: int = 15) -> None:
    """The last words of a run that did not complete."""
    for path in run.logs()[-1:] + run.batch_output()[-1:]:
        text = last_lines(path, count)
        if text:
            eprint(f"--- end of {path}\n{text}")


def last_lines(path: Path, count: int) -> str:
    """The last lines of a text file of any size."""
    return "\n".join(tail(path, 1000 * count).splitlines()[-count:])


class GrowingFile:
    """A file that is copied to stdout as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        # A control character may be split over two blocks, or over two calls.
        self._text = TerminalText()

    def copy(self, final: bool = False) -> None:
        """Write what the file has gained; with `final` nothing is held back for a next time."""
        write = sys.stdout.buffer.write
        terminal = sys.stdout.isatty()
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                while block := file.read(1 << 20):
                    self._offset += len(block)
                    if terminal:
                        block = self._text.feed(block).encode()
                    write(block)
        except FileNotFoundError:
            return
        if final and terminal:
            write(self._text.feed(b"", final=True).encode())
        sys.stdout.buffer.flush()
