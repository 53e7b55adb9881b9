"""How a run came out: its status, and the failure that its logs show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fp8launch.injob.supervisor.failure_pattern import EXCEPTION, STEP_CANCELLED
from fp8launch.injob.supervisor.health_rules import HealthProblem, errors_of
from fp8launch.logs import Ending, Failure, LoggedProcesses, ParsedLog, Process
from fp8launch.logs.file_slices import line_number
from fp8launch.report.fp8_evidence import Fp8Finding
from fp8launch.report.health import series_of
from fp8launch.report.phases import first_and_last
from fp8launch.report.run_report import AttemptReport, PhaseReport, RunReport, Status
from fp8launch.report.sharding import NOT_PARTITIONED
from fp8launch.report.steady_state import Line, SteadyState
from fp8launch.report.verify import NOT_RUNNING, Verification
from fp8launch.rundir.last_failure import last_failure
from fp8launch.rundir.run_dir import RunFolder


def status_of(
    attempts: LoggedProcesses, steady: SteadyState, verification: Verification, health: Sequence[HealthProblem]
) -> tuple[Status, Failure | None]:
    """Return the status of a run, and its failure.

    ok: it ended as planned; failed: the log shows why it died, or that it did not run as asked, in FP8 or divided among
    its ranks; unhealthy: it trains, but `health` has an error; incomplete: none of these; no_data: nothing at all.
    """
    status, failure = _training_status(attempts, steady)
    if status in ("ok", "incomplete"):
        logs = [log for log, _ in attempts]
        if verification.refuted:
            return "failed", _not_running(logs, verification)
        if verification.not_partitioned is not None:
            return "failed", _not_partitioned(logs, verification.not_partitioned)
    return _with_health(status, health), failure


def _with_health(status: Status, health: Sequence[HealthProblem]) -> Status:
    if status in ("ok", "incomplete") and errors_of(health):
        return "unhealthy"
    return status


def status_of_phases(
    attempts: LoggedProcesses,
    steady: SteadyState,
    phases: Sequence[PhaseReport],
    last_planned: str | None,
    health: Sequence[HealthProblem],
) -> tuple[Status, Failure | None]:
    """Return the status of a run in phases; `last_planned` is the name of its last phase, None where unknown."""
    status, failure = _training_status(attempts, steady)
    if status in ("ok", "incomplete"):
        for phase in phases:
            refuted = phase.report.failure
            if refuted and refuted.code in (NOT_RUNNING, NOT_PARTITIONED):
                return "failed", refuted
    if status == "ok" and last_planned is not None and phases[-1].name != last_planned:
        status = "incomplete"  # it left at the end of a phase, as planned, and others are to come
    return _with_health(status, health), failure


def _training_status(attempts: LoggedProcesses, steady: SteadyState) -> tuple[Status, Failure | None]:
    """The last process decides, among those with any sign of training: some ranks' logs have none."""
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
    diverged = _diverged(steady.lines)
    if diverged:
        return "failed", diverged
    last = steady.lines[-1].record()
    if last.number >= last.planned or _ended_as_planned(ending):
        return "ok", None
    return "incomplete", None


def _ended_as_planned(ending: Ending) -> bool:
    if ending.exit_line is None:
        return ending.finished
    return not re.search("SIGTERM|signal", ending.exit_line)


def _diverged(lines: Sequence[Line]) -> Failure | None:
    """A run whose last line is NaN trained nothing since the first NaN that it did not recover from."""

    series = series_of(lines)
    bad = None
    for i in reversed(range(len(lines))):
        if not series.is_nan(i):
            break
        bad = lines[i]
    if bad is None:
        return None
    text = f"loss or gradient is NaN from iteration {bad.number} to the end"
    advice = "lower the learning rate, lengthen the warm-up, or use a finer FP8 recipe"
    offset = int(bad.value("offset"))
    return Failure("nan", text, advice, depth=0, offset=offset, line=line_number(bad.log.path, offset))


def _not_running(logs: Sequence[ParsedLog], found: Verification) -> Failure:
    finding = found.strongest
    text = f"{found.recipe} was requested but did not run: "
    if finding:
        text += finding.text
    advice = "the speed is that of bf16; see `fp8launch verify`. Only Transformer Engine's layers run in FP8"
    return _at_evidence(Failure(NOT_RUNNING, text, advice, depth=0, offset=0), logs, finding)


def _not_partitioned(logs: Sequence[ParsedLog], finding: Fp8Finding) -> Failure:
    advice = "memory and speed are those of replicated states; docs/peers.md says what causes it"
    return _at_evidence(Failure(NOT_PARTITIONED, finding.text, advice, depth=0, offset=0), logs, finding)


def _at_evidence(failure: Failure, logs: Sequence[ParsedLog], finding: Fp8Finding | None) -> Failure:
    """The failure at the line that shows it."""
    for log in logs:
        for evidence in log.evidence:
            if finding and evidence.offset == finding.offset:
                return replace(failure, offset=evidence.offset, line=line_number(log.path, evidence.offset))
    return failure


def attempt_of(log: ParsedLog, process: Process) -> AttemptReport:
    """Report on one process: its first and last iteration, and its end."""
    span = "-".join(map(str, sorted(set(first_and_last(log, process)))))
    return AttemptReport(log.path.name, span, process.ending.finished, process.ending.exit_line, process.ending.failure)


def with_batch_output(report: RunReport, run: RunFolder) -> RunReport:
    """Add the cause that srun reports: its own lines are in the batch script's output, not in the log."""
    if report.status in ("ok", "no_data"):
        return report
    known = report.failure
    if known is not None and known.depth < EXCEPTION and known.code != STEP_CANCELLED:
        return report
    failure = last_failure(run)
    if failure is None or (known is not None and failure.code == known.code):
        return report
    return replace(report, status="failed", failure=failure)
