"""Follow a run until it ends, with a progress bar driven by the iterations in its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp8launch.cli.output import console as output_console
from fp8launch.cli.output import eprint
from fp8launch.cli.terminal_text import last_lines
from fp8launch.diagnostics import UserError
from fp8launch.injob.supervisor.failure_patterns import EXCEPTION
from fp8launch.injob.supervisor.health_rules import HealthProblem
from fp8launch.logs import Iteration, LogTail
from fp8launch.report.named_runs import report_of
from fp8launch.report.progress import progress_of
from fp8launch.report.read_run import stated_arguments
from fp8launch.report.run_listeners import RunListener
from fp8launch.report.run_report import RunReport
from fp8launch.rundir.last_failure import traceback_in
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState, Scheduler
from fp8launch.untyped import as_int

LOST_SECONDS = 120.0
# Enough for the last frames and the exception. The frames above them belong to launchers.
TRACEBACK_LINES = 12
END_LINES = 15


def wait_for(run: RunFolder, scheduler: Scheduler, listeners: Sequence[RunListener], brief: bool = False) -> bool:
    """Show the run's progress until it ends, then its report. Return whether it completed and stayed healthy.

    Ctrl-C ends the command, not the run. With `brief`, used for studies, a completed run gets one line.
    """

    def alarm(problem: HealthProblem) -> None:
        eprint(f"{run.run_id}: {problem.sentence}")
        for listener in listeners:
            listener.unhealthy(run, problem)

    state = watch_to_end(run, scheduler, "run", alarm)
    completed = state.status == "completed"
    report = _report(run)
    # A job can complete although its loss is NaN or FP8 never ran. Report that as `parse` does.
    good = completed and (report is None or report.status not in ("failed", "unhealthy"))
    if report is not None and not (brief and good):
        from fp8launch.report.text import render_text

        shown = output_console(err=True, width=120, soft_wrap=True)
        shown.print(render_text(report, shown.width))
    if not completed:
        show_failure(run, report)
    for listener in listeners:
        listener.ended(run, state, report, good)
    return good


def _report(run: RunFolder) -> RunReport | None:
    """Return the report that `parse` prints, or None if the run left no readable log."""
    try:
        return report_of(run)
    except (UserError, OSError):
        return None


def watch_to_end(
    run: RunFolder, scheduler: Scheduler, what: str, alarm: Callable[[HealthProblem], None] = lambda problem: None
) -> JobState:
    """Show a run's progress until it ends, print its state and return it. Ctrl-C does not end the run.

    `what` is what messages call the run. `alarm` is called once per code and severity of a health problem, as soon as
    the log shows it.
    """
    try:
        state = _watch(run, scheduler, alarm)
    except KeyboardInterrupt:
        eprint(f"\nthe {what} continues: `fp8launch logs {run.run_id} -f`, `fp8launch cancel {run.run_id}`")
        raise
    eprint(f"{run.run_id}: {state}")
    return state


def _watch(run: RunFolder, scheduler: Scheduler, alarm: Callable[[HealthProblem], None]) -> JobState:
    """Show a run's progress until it ends, and return its final state."""
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
                    # A warning that turns into an error is reported again.
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
            # Once the run has ended, poll once more for lines written while the scheduler was being asked.
            if not state.final:
                time.sleep(0.3)


class _NewIterations:
    """Reads new iterations from the log of a run's newest attempt."""

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
    """Describe the state: the reason while queued, or the start-up stage before the first iteration."""
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
    """Show the end of the traceback that explains a failure, or the last lines of the log if there is none."""
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
        show_end(run)  # the recognized line only says that something failed, not what


def show_end(run: RunFolder) -> None:
    """Show the last lines of a run's log and of its batch script's output."""
    for path in run.logs()[-1:] + run.batch_output()[-1:]:
        text = last_lines(path, END_LINES)
        if text:
            eprint(f"--- end of {path}\n{text}")
