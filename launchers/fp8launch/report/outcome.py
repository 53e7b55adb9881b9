"""How a run came out: its status, and the failure that its logs show."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fp8launch.logs import Failure, ParsedLog, Process
from fp8launch.logs.regions import line_number
from fp8launch.report.run_report import Attempt, Status
from fp8launch.report.selection import Line, Selection
from fp8launch.report.verify import NOT_RUNNING, Verification


def status_of(attempts: Sequence[tuple[ParsedLog, Process]], selection: Selection) -> tuple[Status, Failure | None]:
    """ok: the end was as planned; failed: the log shows why it died; incomplete: neither; no_data: nothing at all.

    The last process decides. A file without any sign of training, such as the log of a rank that prints nothing,
    does not.
    """
    telling = [(log, p) for log, p in attempts if p.rows or p.head.arguments or p.ending.failure or p.ending.finished]
    if not telling:
        return "no_data", None
    ending = telling[-1][1].ending
    if ending.failure:
        return "failed", ending.failure
    if not selection.lines:
        return "no_data", None
    diverged = _diverged(selection.lines)
    if diverged:
        return "failed", diverged
    last = selection.lines[-1].record()
    planned_exit = ending.exit_line is not None and not re.search("SIGTERM|signal", ending.exit_line)
    done = ending.finished and ending.exit_line is None
    return ("ok" if done or planned_exit or last.number >= last.planned else "incomplete"), None


def _diverged(lines: Sequence[Line]) -> Failure | None:
    """A run whose last line is NaN trained nothing since the first NaN that it did not recover from."""

    def is_nan(line: Line) -> bool:
        values = line.record().values
        # Megatron leaves a NaN loss out of its line; forks print it.
        return values.get("nan_iterations", 0) > 0 or any(math.isnan(v) for v in values.values())

    bad = None
    for line in reversed(lines):
        if not is_nan(line):
            break
        bad = line
    if bad is None:
        return None
    text = f"loss or gradient is NaN from iteration {bad.number} to the end"
    advice = "lower the learning rate, lengthen the warm-up, or use a finer FP8 recipe"
    offset = int(bad.value("offset"))
    return Failure("nan", text, advice, depth=0, offset=offset, line=line_number(bad.log.path, offset))


def not_running(logs: Sequence[ParsedLog], found: Verification) -> Failure:
    finding = found.strongest
    place = next(
        ((log, e.offset) for log in logs for e in log.evidence if finding and e.offset == finding.offset), None
    )
    text = f"{found.recipe} was asked for and did not run: {finding.text if finding else ''}"
    advice = "the speed is that of bf16: see `fp8launch verify`; Transformer Engine's layers alone look at the format"
    line = line_number(place[0].path, place[1]) if place else None
    return Failure(NOT_RUNNING, text, advice, depth=0, offset=place[1] if place else 0, line=line)


def attempt_of(log: ParsedLog, process: Process) -> Attempt:
    numbers = log.iterations.column("number")
    first_last = sorted({int(numbers[r]) for r in (process.rows[:1] + process.rows[-1:])})
    span = "-".join(map(str, first_last))
    return Attempt(log.path.name, span, process.ending.finished, process.ending.exit_line, process.ending.failure)
