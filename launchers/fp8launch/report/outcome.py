"""The outcome of a run: its status, the failure that its logs show, and the health of its training.

Health is judged by the rules of `injob/supervisor/health_rules.py`, for finished runs and for runs in progress.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8launch.injob.supervisor.failure_patterns import EXCEPTION, STEP_CANCELLED
from fp8launch.injob.supervisor.health_rules import LIMITS, HealthLimits, HealthProblem, Series, errors_of, problems_of
from fp8launch.injob.supervisor.slow_node import NodeTimes
from fp8launch.logs import Ending, Evidence, Failure, IterationTable, LoggedProcesses, ParsedLog, Process, Validation
from fp8launch.logs.evidence import of_kind
from fp8launch.logs.field_names import NOT_FINITE
from fp8launch.logs.file_slices import LineCounter
from fp8launch.report.phases import first_and_last
from fp8launch.report.run_report import AttemptReport, RunReport, Status
from fp8launch.report.steady_state import SteadyState, add_attempt, attempts_table, loss_of, numbers_of
from fp8launch.report.verify import NOT_PARTITIONED, NOT_RUNNING, Verification
from fp8launch.rundir.attempts import attempts_of
from fp8launch.rundir.last_failure import last_failure
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.untyped import as_mapping
from fp8launch.wording import counted


def status_of(
    attempts: LoggedProcesses,
    steady: SteadyState,
    contradicted: Failure | None,
    health: Sequence[HealthProblem],
    phases_to_come: bool = False,
) -> tuple[Status, Failure | None]:
    """Return the status of a run, and its failure.

    ok: it ended as planned; failed: the log shows why it died, or (`contradicted`) that it did not run as requested;
    unhealthy: it trains, but `health` has an error; incomplete: none of these; no_data: there is nothing to report.
    """
    status, failure = _training_status(attempts, steady)
    if status not in ("ok", "incomplete"):
        return status, failure
    if contradicted:
        return "failed", contradicted
    if errors_of(health):
        return "unhealthy", failure
    # A run leaves as planned at the end of each phase.
    return ("incomplete" if phases_to_come else status), failure


def _training_status(attempts: LoggedProcesses, steady: SteadyState) -> tuple[Status, Failure | None]:
    """Judge by the last process with any sign of training: the logs of some ranks have none."""
    ending = None
    for _, process in attempts:
        if process.rows or process.head.arguments or process.ending.failure or process.ending.finished:
            ending = process.ending
    if ending is None:
        return "no_data", None
    if ending.failure:
        return "failed", ending.failure
    if not steady.lines:
        return "no_data", None
    diverged = _diverged(attempts, steady.lines)
    if diverged:
        return "failed", diverged
    last = steady.lines[-1]
    if last.number >= last.planned or _ended_as_planned(ending):
        return "ok", None
    return "incomplete", None


def _ended_as_planned(ending: Ending) -> bool:
    if ending.exit_line is None:
        return ending.finished
    return not re.search("SIGTERM|signal", ending.exit_line)


def _diverged(attempts: LoggedProcesses, lines: IterationTable) -> Failure | None:
    """Report a run whose last line is NaN: it has not trained since the first NaN without recovery."""
    series = series_of(lines)
    first = len(lines)
    while first and series.is_nan(first - 1):
        first -= 1
    if first == len(lines):
        return None
    text = f"loss or gradient is NaN from iteration {series.number[first]} to the end"
    advice = "lower the learning rate, lengthen the warm-up, or use a finer FP8 recipe"
    offset = int(lines.value("offset", first))
    log, _ = attempts[series.attempt[first]]
    return Failure("nan", text, advice, depth=0, offset=offset, line=LineCounter(log.path).number(offset))


def contradiction(logs: Sequence[ParsedLog], found: Verification) -> Failure | None:
    """Return a failure if the evidence shows that a run did not run in FP8, or divided among its ranks, as requested.

    It points to the line of the evidence.
    """
    finding = found.not_partitioned
    if found.refuted:
        finding = found.strongest
        text = f"{found.recipe} was requested but did not run: {finding.text if finding else ''}"
        advice = "the run has the speed of bf16; see `fp8launch verify`. Only Transformer Engine's layers run in FP8"
        failure = Failure(NOT_RUNNING, text, advice, depth=0, offset=0)
    elif finding:
        advice = "memory and speed are the same as with replicated states; docs/peers.md explains the causes"
        failure = Failure(NOT_PARTITIONED, finding.text, advice, depth=0, offset=0)
    else:
        return None
    for log in logs:
        for evidence in log.evidence:
            if finding and evidence.offset == finding.offset:
                return replace(failure, offset=evidence.offset, line=LineCounter(log.path).number(evidence.offset))
    return failure


def attempt_of(log: ParsedLog, process: Process) -> AttemptReport:
    """Report on one process: its first and last iteration, and its end."""
    span = "-".join(map(str, sorted(set(first_and_last(log, process)))))
    return AttemptReport(log.path.name, span, process.ending.finished, process.ending.exit_line, process.ending.failure)


def without_earlier_failure(report: RunReport, run: RunFolder) -> RunReport:
    """Drop an earlier attempt's failure if the newest attempt completed the training.

    Its log may have another format, and so no sign of training.
    """
    attempts, record = run.attempts(), attempts_of(run)
    if report.status != "failed" or not attempts or attempts[-1].exit_status != 0:
        return report
    newest = attempts[-1].log.name
    failed = [attempt.log for attempt in report.attempts if attempt.failure]
    if newest in failed or not failed or not (record.finished or not record.jobs):
        return report
    return replace(report, status="ok" if report.training.lines else "no_data", failure=None)


def with_batch_output(report: RunReport, run: RunFolder) -> RunReport:
    """Add the cause that the scheduler reports: its own lines are in the script's output, not in the log."""
    if report.status in ("ok", "no_data"):
        return report
    known = report.failure
    if known is not None and known.depth < EXCEPTION and known.code != STEP_CANCELLED:
        return report
    failure = last_failure(run)
    if failure is None or (known is not None and failure.code == known.code):
        return report
    return replace(report, status="failed", failure=failure)


def limits_of(manifest: Mapping[str, Any]) -> HealthLimits:
    """Return the limits of a run's recipe."""
    return HealthLimits.of_recipe(as_mapping(as_mapping(manifest.get("recipe")).get("health")))


def series_of(lines: IterationTable) -> Series:
    """Return the columns of a run's lines that the rules read."""
    grad_norm = lines.column("grad_norm")
    return Series(
        number=numbers_of(lines),
        attempt=list(map(int, lines.column("attempt"))),
        step_time_ms=lines.column("step_time_ms"),
        loss=loss_of(lines),
        mixed=list(map(bool, lines.column("mixed"))),
        grad_norm=grad_norm,
        has_grad_norm=any(map(math.isfinite, grad_norm)),
        not_finite=lines.column(NOT_FINITE),
        skipped=lines.column("skipped_iterations"),
        nan=lines.column("nan_iterations"),
    )


def health_of(
    steady: SteadyState,
    attempts: LoggedProcesses,
    validations: Sequence[Validation],
    arguments: Mapping[str, object],
    limits: HealthLimits = LIMITS,
) -> tuple[HealthProblem, ...]:
    """Return the health problems of a run. `arguments` are Megatron's, empty if unknown."""
    times = {i: node_times_of(log.evidence_of(process)) for i, (log, process) in enumerate(attempts)}
    return _problems(series_of(steady.lines), series_of(steady.kept), validations, arguments, limits, times)


def node_times_of(evidence: Iterable[Evidence]) -> list[NodeTimes]:
    """Return how long the forward pass took on each node, oldest first."""
    found = [NodeTimes.of_json(one.data) for one in of_kind("nodes", evidence)]
    return [one for one in found if one is not None]


def health_of_going(
    tables: Sequence[IterationTable],
    validations: Sequence[Validation],
    arguments: Mapping[str, object],
    limits: HealthLimits,
    node_times: Sequence[NodeTimes],
) -> tuple[HealthProblem, ...]:
    """Return the health problems of a run in progress, by the newest lines of its attempts, oldest first.

    `node_times` are the newest attempt's.
    """
    lines = attempts_table()
    for attempt, table in enumerate(tables):
        number = table.column("number")
        if number:
            # Iterations that a later attempt repeats are left out.
            lines = lines.take([row for row, before in enumerate(lines.column("number")) if before < number[0]])
        add_attempt(lines, attempt, table, range(len(table)), mixed=(1,))
    series = series_of(lines)
    return _problems(series, series, validations, arguments, limits, {len(tables) - 1: node_times})


def _problems(
    series: Series,
    timed: Series,
    validations: Sequence[Validation],
    arguments: Mapping[str, object],
    limits: HealthLimits,
    node_times: Mapping[int, Sequence[NodeTimes]],
) -> tuple[HealthProblem, ...]:
    problems = problems_of(series, timed, arguments, limits, node_times)
    if series.number and "nan" not in limits.ignore:
        problems = (*problems, *_validation(series, validations))
    return problems


def _validation(series: Series, validations: Sequence[Validation]) -> Iterator[HealthProblem]:
    """Report validation losses that are NaN or infinite, although the training loss may not be."""
    bad = [i for i, one in enumerate(validations) if not all(map(math.isfinite, one.losses.values()))]
    if not bad:
        return
    # The line of the last evaluation has no iteration in it.
    last_line = series.number[-1]
    first, last = (
        last_line if validations[i].iteration is None else validations[i].iteration for i in (bad[0], bad[-1])
    )
    severity = "error" if bad[-1] == len(validations) - 1 else "warning"
    message = f"the validation loss is NaN or infinite in {counted(len(bad), 'evaluation')}"
    yield HealthProblem("nan", severity, message, first or last_line, last or last_line)
