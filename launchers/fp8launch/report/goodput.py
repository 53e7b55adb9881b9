"""Goodput: the share of the allocated GPU time that a run spent on iterations that counted, and the uses of the rest.

The supervisor records when attempts begin and end (attempts.json). Everything between comes from the logs: the time
stamps of iteration lines, and Megatron's timers of checkpoints and evaluations. docs/survival.md has the definition of
each part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

from fp8launch.logs import ParsedLog
from fp8launch.logs.evidence import of_kind
from fp8launch.logs.file_slices import lines
from fp8launch.rundir.attempts import read_attempt_log
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.untyped import as_seconds, as_time
from fp8launch.wording import counted

_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?)\] iteration\s{0,20}:?\s{1,20}(\d{1,15})\b")
# Other ranks print into the same line, before an iteration or after it.
_LONGEST_LINE = 1 << 16
_DAY = 86400


@dataclass(frozen=True)
class Parts:
    """A breakdown of the time of one or several attempts, in seconds."""

    iterations: float = 0.0
    lost: float = 0.0
    start_up: float = 0.0
    checkpoints: float = 0.0
    evaluation: float = 0.0
    after_iterations: float = 0.0

    @property
    def total(self) -> float:
        return math.fsum(vars(self).values())

    def plus(self, other: Parts) -> Parts:
        sums = {part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)}
        return Parts(**sums)


@dataclass(frozen=True)
class Goodput:
    """The parts of a run's allocated time, added up over its attempts.

    `lost_iterations` were trained, and later trained again or given up. `queue` is the time that the run waited for its
    jobs to begin: nothing was allocated then.
    """

    parts: Parts
    attempts: int
    gpus: int | None
    lost_iterations: int
    queue: float | None

    @property
    def share(self) -> float:
        """The share of the allocated time that was spent on iterations that counted."""
        return self.parts.iterations / self.parts.total

    @property
    def gpu_hours(self) -> float | None:
        return None if self.gpus is None else self.parts.total * self.gpus / 3600

    def as_json(self) -> dict[str, object]:
        seconds = {name: round(value, 3) for name, value in vars(self.parts).items()}
        return {
            "share": round(self.share, 4),
            "attempts": self.attempts,
            "gpus": self.gpus,
            "gpu_hours": self.gpu_hours,
            "allocated_s": round(self.parts.total, 3),
            "seconds": seconds,
            "lost_iterations": self.lost_iterations,
            "queue_s": None if self.queue is None else round(self.queue, 3),
        }


@dataclass(frozen=True)
class TimedAttempt:
    """An attempt as attempts.json has it. Times in seconds since 1970; it loaded the checkpoint `before`."""

    name: str
    began: float
    ended: float | None
    before: int


def goodput_of_run(run: RunFolder, logs: Sequence[ParsedLog], gpus: int | None) -> Goodput | None:
    """Return the goodput of a run; None if its attempts are not recorded or its logs have no time stamps."""
    records = read_attempt_log(run).get("attempts", [])
    attempts = [attempt for attempt in map(_attempt, records) if attempt is not None]
    if not attempts or len(attempts) != len(records):
        return None
    queue = _queue(attempts, run.manifest().get("jobs", []))
    return goodput_of(attempts, {log.path.stem: log for log in logs}, gpus, queue)


def _attempt(record: Mapping[str, Any]) -> TimedAttempt | None:
    """Return a recorded attempt; None for a record that no supervisor writes."""
    name, before, began = record.get("name"), record.get("before"), as_seconds(record.get("began"))
    if not isinstance(name, str) or not isinstance(before, int) or began is None:
        return None
    return TimedAttempt(name, began, as_seconds(record.get("ended")), before)


def goodput_of(
    attempts: Sequence[TimedAttempt], logs: Mapping[str, ParsedLog], gpus: int | None, queue: float | None
) -> Goodput | None:
    """Add up the attempts; None if a log has iterations without time stamps, or no time has passed."""
    parts, lost = Parts(), 0
    for position, attempt in enumerate(attempts):
        log = logs.get(attempt.name)
        # Iterations beyond a later attempt's start were trained in vain.
        kept_up_to = min([later.before for later in attempts[position + 1 :]], default=math.inf)
        if log is None or not _rows(log):
            if attempt.ended is not None:
                parts = parts.plus(Parts(start_up=max(0.0, attempt.ended - attempt.began)))
            continue
        found = _parts_of(attempt, log, kept_up_to)
        if found is None:
            return None
        parts = parts.plus(found[0])
        lost += found[1]
    if parts.total <= 0:
        return None
    return Goodput(parts, len(attempts), gpus, lost, queue)


def _rows(log: ParsedLog) -> list[int]:
    return [row for process in log.processes for row in process.rows]


def _parts_of(attempt: TimedAttempt, log: ParsedLog, kept_up_to: float) -> tuple[Parts, int] | None:
    """Return the parts of an attempt that logged iterations, and the number of iterations lost."""
    rows = _rows(log)
    number, offset = log.iterations.column("number"), log.iterations.column("offset")
    before = attempt.before
    if not 0 <= before < number[rows[0]]:
        before = int(number[rows[0]]) - 1
    # The last line that counts entirely, and the next one: a checkpoint may lie between them.
    whole = sum(number[row] <= kept_up_to for row in rows)
    timed = {rows[0], rows[-1], *rows[max(whole - 1, 0) : whole + 1]}
    stamps = {row: _time(log, int(offset[row]), int(number[row])) for row in timed}
    times = {row: stamp for row, stamp in stamps.items() if stamp is not None}
    if len(times) < len(stamps):
        return None
    first_step = log.iterations.value("step_time_ms", rows[0]) * (number[rows[0]] - before) / 1e3
    begin = times[rows[0]]
    if math.isfinite(first_step):
        begin = max(attempt.began, begin - first_step)

    def trained(since: float, since_offset: float, row: int) -> float:
        """Seconds of iterations up to a line, without pauses."""
        pauses = sum(pause.seconds for pause in log.pauses if since_offset <= pause.offset < offset[row])
        return max(0.0, times[row] - since - pauses)

    total = trained(begin, 0, rows[-1])
    iterations = total
    lost = 0
    if whole < len(rows):
        lost = int(number[rows[-1]] - max(kept_up_to, before))
        iterations, reached, since, since_offset = 0.0, float(before), begin, 0.0
        if whole:
            last_kept = rows[whole - 1]
            iterations = trained(begin, 0, last_kept)
            reached, since, since_offset = number[last_kept], times[last_kept], offset[last_kept]
        after = rows[whole]
        share = max(0.0, kept_up_to - reached) / (number[after] - reached)
        iterations += share * trained(since, since_offset, after)
    last = times[rows[-1]]
    in_the_end = sum(pause.seconds for pause in log.pauses if pause.offset > offset[rows[-1]])
    parts = Parts(
        iterations=iterations,
        lost=max(0.0, total - iterations),
        start_up=max(0.0, begin - attempt.began),
        checkpoints=sum(pause.seconds for pause in log.pauses if pause.kind == "checkpoint"),
        evaluation=sum(pause.seconds for pause in log.pauses if pause.kind == "evaluation"),
        after_iterations=max(0.0, (attempt.ended or last) - last - in_the_end),
    )
    return parts, lost


def _time(log: ParsedLog, offset: int, number: int) -> float | None:
    """Return when iteration `number` was logged in the line at `offset`, in seconds since 1970.

    None if the log does not determine it.
    """
    offsets = [one.data.get("utc_offset") for one in of_kind("node", log.evidence)]
    shift = offsets[0] if offsets else None
    if not isinstance(shift, int) or abs(shift) > _DAY:
        return None
    _, line = next(lines(log.path, offset, offset + _LONGEST_LINE), (offset, ""))
    stamps = [found[1] for found in _STAMP.finditer(line) if int(found[2]) == number]
    try:
        return datetime.fromisoformat(stamps[-1]).replace(tzinfo=timezone.utc).timestamp() - shift
    except (IndexError, ValueError):
        return None


def _queue(attempts: Sequence[TimedAttempt], jobs: Sequence[Mapping[str, Any]]) -> float | None:
    """Add up the times from the submission of a job, or the end of the previous attempt, to the start of the next.

    The time from the end of a run to its resumption by a user is not queue time.
    """
    submitted = list(filter(None, (as_time(job.get("submitted")) for job in jobs)))
    if not submitted:
        return None
    total, ended = 0.0, 0.0
    for attempt in attempts:
        since = max([time for time in submitted if time <= attempt.began], default=0.0)
        since = max(since, ended)
        if since:
            total += max(0.0, attempt.began - since)
        ended = attempt.ended or attempt.began
    return total


def goodput_of_runs(goodputs: Sequence[Goodput | None]) -> float | None:
    """Return the share of several runs together; None if none of them had several attempts."""
    known = [goodput for goodput in goodputs if goodput is not None]
    if not any(goodput.attempts > 1 for goodput in known):
        return None
    return sum(one.parts.iterations for one in known) / sum(one.parts.total for one in known)


def goodput_rows(goodput: Goodput) -> list[tuple[str, float]]:
    """Return the parts that took time by name, in seconds."""
    parts = goodput.parts
    rows = [
        ("iterations that count", parts.iterations),
        (f"lost: {counted(goodput.lost_iterations, 'iteration')}", parts.lost),
        ("start-up", parts.start_up),
        ("checkpoints", parts.checkpoints),
        ("evaluation", parts.evaluation),
        ("after the last iteration", parts.after_iterations),
    ]
    return [row for row in rows if row[1] > 0]


def goodput_line(goodput: Goodput) -> str:
    """Return the goodput and the queue time in one line."""
    cost = f"{goodput.parts.total:,.0f} s"
    if goodput.gpu_hours is not None:
        cost = f"{goodput.gpu_hours:,.2f} GPU-hours"
    line = f"goodput {goodput.share:.1%} of {cost} in {counted(goodput.attempts, 'attempt')}"
    if goodput.queue is not None:
        line += f"; in the queue for {goodput.queue:,.0f} s"
    return line
