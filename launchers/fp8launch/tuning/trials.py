"""One trial as a run of the study: submitted, followed, ended early where it cannot win, and read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from fp8launch.check.checker import check_all
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError, error
from fp8launch.injob.supervisor.failures import ending_of_attempt
from fp8launch.injob.supervisor.health_rules import errors_of
from fp8launch.logs.file_slices import tail
from fp8launch.report.intervals import FEWEST
from fp8launch.report.run_data import run_from_folder
from fp8launch.report.run_report import Statistic
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import MANIFEST, RunFolder
from fp8launch.rundir.study import StudyFolder
from fp8launch.schedulers.base import JobState, Scheduler
from fp8launch.submit.submission import now, recover_cut_off
from fp8launch.submit.submit_study import GridPoint, submit_study
from fp8launch.tuning.candidates import Base, first_error, predict
from fp8launch.tuning.state import Outcome

OUT_OF_MEMORY = frozenset(("out-of-memory", "host-out-of-memory"))
# Iterations that a trial should have for its interval; FEWEST are the least.
WANTED = 5
# The end of a log that is searched for a failure while the run is alive, and how often.
TAIL_BYTES = 200_000
LOOK_SECONDS = 2.0
# What a failed process group is given to leave by itself.
GRACE_SECONDS = 5.0
# A run whose state nobody knows for so long is given up by this command, and found again by the next.
LOST_SECONDS = 120.0
# Entry of a run's manifest: by job id, when it was first seen running.
RUNNING_SINCE = "running_since"
INTERRUPTED = "interrupted by Ctrl-C"


@dataclass(frozen=True)
class Ended:
    """The end of a trial, by itself or by this command.

    `outcome` is None for a run that was ended after `seconds` before it had enough iterations; `why` says by what.
    `interrupted`: by Ctrl-C.
    """

    outcome: Outcome | None
    seconds: float = 0.0
    why: str = ""
    interrupted: bool = False


@dataclass(frozen=True)
class Bound:
    """A limit that ends a trial after `seconds`, without blame for it; `why` names the limit."""

    seconds: float
    why: str


@dataclass(frozen=True)
class Site:
    """Where trials run."""

    cluster: Cluster
    root: Path
    scheduler: Scheduler
    study: StudyFolder
    say: Callable[[str], None]


def run_trial(
    site: Site, base: Base, values: dict[str, object], repeat: int, at_most: float, again: bool, bound: Bound | None
) -> Ended:
    """Run a trial to its end, or find the end of one that was submitted before.

    It is ended after `at_most` seconds, which makes it a failure, and at the bound or by Ctrl-C, which leaves it open
    unless enough iterations were measured. With `again` a run that was ended so is submitted once more.
    """
    try:
        grid = GridPoint(*base.variant(values, repeat))
    except UserError as exc:
        return Ended(Outcome("refused", why=exc.problems[0].message))
    run = site.study.run(grid.run_name)
    ends = None
    if bound is not None:
        ends = Bound(time.monotonic() + bound.seconds, bound.why)
    interrupted = False
    try:
        checked = check_all([grid.prepared], site.cluster, scheduler=site.scheduler)[0]
        if not checked.ok:
            return Ended(Outcome("refused", why=first_error(checked.problems)))
        grid = replace(grid, checked=checked.as_json(), job=checked.job)
        submit_study([grid], site.cluster, site.root, site.scheduler, name=site.study.study_id, retry=again)
        state, why = _follow(site, run, at_most, ends)
    except KeyboardInterrupt:
        interrupted = True
        state, why = _ended_by_user(site, run), INTERRUPTED
    if not _was_submitted(run):
        return Ended(None, 0.0, why, interrupted)
    cut = interrupted or (ends is not None and why == ends.why)
    outcome = _outcome(run, state, why, cut, grid)
    if outcome is not None:
        return Ended(outcome, 0.0, why, interrupted)
    return Ended(None, seconds_of(run), why, interrupted)


def _was_submitted(run: RunFolder) -> bool:
    return (run.path / MANIFEST).is_file() and bool(job_ids(run))


def _ended_by_user(site: Site, run: RunFolder) -> JobState:
    """End the job of a trial that Ctrl-C interrupted. A second Ctrl-C does not wait for its end."""
    state = JobState("cancelled", INTERRUPTED)
    if not (run.path / MANIFEST).is_file():
        return state
    try:
        # This command, or one before it, may have ended between the job's start and its record.
        recover_cut_off([run], site.scheduler, settle=True)
        if not _was_submitted(run):
            return state
        site.say(f"\n{INTERRUPTED}: ending the trial {run.run_id}; the same command continues with it")
        site.scheduler.cancel([run])
        state = _settled(site, run)
    except KeyboardInterrupt:
        state = JobState("unknown", INTERRUPTED)
    if not state.final:
        site.say(f"it may run on for some time: `fp8launch runs {site.study.study_id}` shows it")
    return state


def _follow(site: Site, run: RunFolder, at_most: float, ends: Bound | None) -> tuple[JobState, str]:
    """Wait for the end of a run; return its last state, and why it was ended where this command did that."""
    every = max(site.scheduler.capabilities.poll_seconds, 0.2)
    lost = 0.0
    reason = _ReasonToEnd(run, at_most, ends)
    while True:
        state = site.scheduler.state(run)
        clock = time.monotonic()
        if state.final:
            return state, ""
        lost = _unknown_since(state, lost, clock)
        if lost and clock - lost > LOST_SECONDS:
            fix = "repeat the command when the scheduler answers: it continues with this run"
            raise error("trial-lost", f"the state of {run.run_id} is not known: {state.detail}", str(run.path), fix, 3)
        why = reason.at(clock, state)
        if why:
            site.scheduler.cancel([run])
            return _settled(site, run), why
        time.sleep(min(every, 1.0))


class _ReasonToEnd:
    """Why this command ends a run: its own bound, the run's longest time, or a log that ends out of memory."""

    def __init__(self, run: RunFolder, at_most: float, ends: Bound | None) -> None:
        self._run, self._at_most, self._ends = run, at_most, ends
        self._started: float | None = None
        self._looked = self._failed = 0.0

    def at(self, clock: float, state: JobState) -> str:
        """The reason at this time; empty where the run may go on."""
        if state.status == "running" and self._started is None:
            self._started = clock
            _note_start(self._run)
        if self._ends is not None and clock >= self._ends.seconds:
            return self._ends.why
        if self._started is not None and clock - self._started > self._at_most:
            return f"it took more than {self._at_most:,.0f} s"
        if clock - self._looked < LOOK_SECONDS:
            return ""
        self._looked = clock
        if _is_out_of_memory(self._run):
            self._failed = self._failed or clock
            if clock - self._failed >= GRACE_SECONDS:
                return "out of memory"
        return ""


def _unknown_since(state: JobState, since: float, clock: float) -> float:
    """When the state of a run became unknown; 0 while it is known."""
    if state.status != "unknown":
        return 0.0
    return since or clock


def _settled(site: Site, run: RunFolder) -> JobState:
    """The state of a run that was ended, once it is final or half a minute is over."""
    end = time.monotonic() + 30
    while not (state := site.scheduler.state(run)).final and time.monotonic() < end:
        time.sleep(0.5)
    return state


def _is_out_of_memory(run: RunFolder) -> bool:
    logs = run.logs()
    if not logs:
        return False
    failure = ending_of_attempt(tail(logs[-1], TAIL_BYTES)).failure
    return failure is not None and failure.code in OUT_OF_MEMORY


def _outcome(run: RunFolder, state: JobState, why: str, cut: bool, grid: GridPoint) -> Outcome | None:
    """What a run that has ended says; None for one that was cut off before it had enough iterations."""
    data = run_from_folder(run)
    report = data.report
    predicted = predict(grid.prepared)
    speeds = tuple(data.speeds("tokens/s/GPU"))
    failure = report.failure
    peak_gib = None
    if report.peak_memory_mib:
        peak_gib = report.peak_memory_mib / 1024
    common = {
        "run": run.run_id,
        "predicted_ms": predicted.step_ms,
        "predicted_gib": predicted.peak_gib,
        "needs_gib": predicted.needs_gib,
        "peak_gib": peak_gib,
        "seconds": seconds_of(run),
    }
    if failure and failure.code in OUT_OF_MEMORY:
        return Outcome("out_of_memory", why=failure.message, **common)  # type: ignore[arg-type]
    if why == "out of memory" or state.status == "out_of_memory":
        return Outcome("out_of_memory", why="out of memory", **common)  # type: ignore[arg-type]
    measured = (report.status == "ok" or cut) and len(speeds) >= FEWEST
    if measured:
        return Outcome(
            "ok",
            speeds=speeds,
            step_ms=_median(report.step_time_ms),
            tflops=_median(report.tflops_per_gpu),
            **common,  # type: ignore[arg-type]
        )
    if cut:
        return None
    if not why and failure is not None:
        why = f"{failure.code}: {failure.message}"
    for problem in errors_of(report.health):
        why = why or f"{problem.code}: {problem.message}"
    if not why and report.status == "ok":
        why = f"only {len(speeds)} iterations count; {WANTED} are wanted: pass --iterations"
    return Outcome("failed", why=why or f"{state.status} {state.detail}".strip(), **common)  # type: ignore[arg-type]


def _median(statistic: Statistic | None) -> float | None:
    if statistic is None:
        return None
    return statistic.median


def seconds_of(run: RunFolder) -> float:
    """Seconds that the jobs of a run have taken, from when they were first seen running to the last sign of each."""
    manifest = run.manifest()
    seen = manifest.get(RUNNING_SINCE) or {}
    total = 0.0
    for number, job in enumerate(manifest.get("jobs") or []):
        try:
            begun = datetime.fromisoformat(str(seen.get(job["id"], job["submitted"]))).timestamp()
        except ValueError:
            continue
        last_sign = begun
        for attempt in run.attempts():
            if attempt.job_id == job["id"] or attempt.restart == number:
                last_sign = max(last_sign, _last_write(attempt.log), _last_write(attempt.log.with_suffix(".exit")))
        total += last_sign - begun
    return total


def _last_write(file: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 without the file."""
    if not file.is_file():
        return 0.0
    return file.stat().st_mtime


def _note_start(run: RunFolder) -> None:
    """Note when the newest job of a run was first seen running: what it waited for before costs nothing."""
    manifest = run.manifest()
    job = manifest["jobs"][-1]["id"]
    seen = manifest.get(RUNNING_SINCE) or {}
    if job not in seen:
        run.update(**{RUNNING_SINCE: {**seen, job: now()}})
