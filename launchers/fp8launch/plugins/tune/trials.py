"""Run one trial as a run of the study: submit it, follow it, end it early if it has failed, and read its results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from fp8launch.check.checker import check_all
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import error
from fp8launch.injob.supervisor.failures import ending_of_attempt
from fp8launch.injob.supervisor.health_rules import errors_of
from fp8launch.injob.supervisor.log_lines import tail
from fp8launch.injob.supervisor.run_records import now
from fp8launch.plugins.tune.candidates import Prediction, first_error, predict
from fp8launch.plugins.tune.state import Outcome
from fp8launch.report.intervals import FEWEST
from fp8launch.report.read_run import run_from_folder
from fp8launch.report.run_report import Statistic
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import MANIFEST, RunFolder
from fp8launch.rundir.study import StudyFolder, locked
from fp8launch.schedulers.base import JobState, Scheduler
from fp8launch.submit.submission import HELD_SECONDS, recover_cut_off
from fp8launch.submit.submit import GridPoint, submit_study
from fp8launch.wording import counted

OUT_OF_MEMORY = frozenset(("out-of-memory", "host-out-of-memory"))
# Measured iterations that a trial should have; FEWEST is the minimum.
WANTED = 5
# How much of the end of a live log is searched for a failure, and how often.
TAIL_BYTES = 200_000
LOOK_SECONDS = 2.0
# How long a failed process group may take to exit on its own.
GRACE_SECONDS = 5.0
# After this long without a known state the command gives up; the next command finds the run again.
LOST_SECONDS = 120.0
# Manifest entry: when each job, by id, was first seen running.
RUNNING_SINCE = "running_since"
INTERRUPTED = "interrupted by Ctrl-C"


@dataclass(frozen=True)
class Ended:
    """How a trial ended.

    `outcome` is None if the run was stopped after `seconds`, before it had enough iterations; `why` gives the reason.
    `interrupted` means that the user pressed Ctrl-C.
    """

    outcome: Outcome | None
    seconds: float = 0.0
    why: str = ""
    interrupted: bool = False


@dataclass(frozen=True)
class Bound:
    """A limit of the search that ends a trial after `seconds` without making it a failure; `why` names the limit."""

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
    site: Site, grid: GridPoint, predicted: Prediction, at_most: float, again: bool, bound: Bound | None
) -> Ended:
    """Run a trial to its end, or wait for the end of one that was submitted earlier.

    A trial that takes longer than `at_most` seconds is stopped and has failed. One that is stopped by `bound` stays
    open, unless enough iterations were measured; with `again` such a trial is submitted once more. Ctrl-C is raised:
    the caller ends the trial by `end_interrupted`.
    """
    run = site.study.run(grid.run_name)
    ends = None
    if bound is not None:
        ends = Bound(time.monotonic() + bound.seconds, bound.why)
    checked = check_all([grid.prepared], site.cluster, scheduler=site.scheduler)[0]
    if not checked.ok:
        return Ended(Outcome("refused", why=first_error(checked.problems)))
    grid = replace(grid, checked=checked.as_json(), job=checked.job)
    submit_study([grid], site.cluster, site.root, site.scheduler, name=site.study.study_id, retry=again)
    state, why = _follow(site, run, at_most, ends)
    cut = ends is not None and why == ends.why
    outcome = _outcome(run, state, why, cut, predicted)
    if outcome is not None:
        return Ended(outcome, 0.0, why)
    return Ended(None, seconds_of(run), why)


def end_interrupted(site: Site, grid: GridPoint) -> Ended:
    """End a trial after Ctrl-C, whether this command or an earlier one submitted it.

    The trial stays open, unless enough iterations were measured.
    """
    run = site.study.run(grid.run_name)
    state = _ended_by_user(site, run)
    if not _was_submitted(run):
        return Ended(None, 0.0, INTERRUPTED, interrupted=True)
    outcome = _outcome(run, state, INTERRUPTED, cut=True, predicted=predict(grid.prepared, site.cluster))
    return Ended(outcome, seconds_of(run), INTERRUPTED, interrupted=True)


def _was_submitted(run: RunFolder) -> bool:
    return (run.path / MANIFEST).is_file() and bool(job_ids(run))


def _ended_by_user(site: Site, run: RunFolder) -> JobState:
    """End the job of a trial after Ctrl-C. A second Ctrl-C does not wait for the job to end."""
    state = JobState("cancelled", INTERRUPTED)
    if not (run.path / MANIFEST).is_file():
        return state
    try:
        # This command or an earlier one may have ended between submitting the job and recording its id. The study is
        # locked while an sbatch that outlived its launcher is still submitting the job.
        with locked(site.study, HELD_SECONDS):
            recover_cut_off([run], site.scheduler, settle=True)
        if not _was_submitted(run):
            return state
        site.say(f"\n{INTERRUPTED}: ending the trial {run.run_id}; the same command continues with it")
        site.scheduler.cancel([run])
        state = _settled(site, run)
    except KeyboardInterrupt:
        state = JobState("unknown", INTERRUPTED)
    if not state.final:
        site.say(f"its job may still be running: `fp8launch runs {site.study.study_id}` shows its state")
    return state


def _follow(site: Site, run: RunFolder, at_most: float, ends: Bound | None) -> tuple[JobState, str]:
    """Wait for a run to end; return its last state, and the reason if this command ended it."""
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
    """Decide when to end a run: at the bound, after its longest time, or if its log says out of memory."""

    def __init__(self, run: RunFolder, at_most: float, ends: Bound | None) -> None:
        self._run, self._at_most, self._ends = run, at_most, ends
        self._started: float | None = None
        self._looked = self._failed = 0.0

    def at(self, clock: float, state: JobState) -> str:
        """Return the reason to end the run now, or an empty string."""
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
    """Return when the state of a run became unknown, or 0 while it is known."""
    if state.status != "unknown":
        return 0.0
    return since or clock


def _settled(site: Site, run: RunFolder) -> JobState:
    """Return the state of a cancelled run once it is final, or after half a minute."""
    end = time.monotonic() + 30
    while not (state := site.scheduler.state(run)).final and time.monotonic() < end:
        time.sleep(0.5)
    return state


def _is_out_of_memory(run: RunFolder) -> bool:
    logs = run.logs()
    if not logs:
        return False
    failure = ending_of_attempt(tail(logs[-1], longest=TAIL_BYTES)).failure
    return failure is not None and failure.code in OUT_OF_MEMORY


def _outcome(run: RunFolder, state: JobState, why: str, cut: bool, predicted: Prediction) -> Outcome | None:
    """Return the outcome of a run that has ended, or None if it was cut off before it had enough iterations."""
    report = run_from_folder(run)
    speeds = tuple(report.speeds("tokens/s/GPU"))
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
            step_ms=_median(report.speed.step_time_ms),
            tflops=_median(report.speed.tflops_per_gpu),
            **common,  # type: ignore[arg-type]
        )
    if cut:
        return None
    if not why and failure is not None:
        why = f"{failure.code}: {failure.message}"
    for problem in errors_of(report.health):
        why = why or f"{problem.code}: {problem.message}"
    if not why and report.status == "ok":
        why = f"only {counted(len(speeds), 'iteration')} can be measured and {WANTED} are needed: pass --iterations"
    return Outcome("failed", why=why or f"{state.status} {state.detail}".strip(), **common)  # type: ignore[arg-type]


def _median(statistic: Statistic | None) -> float | None:
    if statistic is None:
        return None
    return statistic.median


def seconds_of(run: RunFolder) -> float:
    """Return the seconds that the jobs of a run took, each from its first sighting as running to its last output."""
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
    """Return the modification time of a file in seconds since 1970, or 0 if it does not exist."""
    if not file.is_file():
        return 0.0
    return file.stat().st_mtime


def _note_start(run: RunFolder) -> None:
    """Record when the newest job of a run was first seen running, because time in the queue costs nothing."""
    manifest = run.manifest()
    job = manifest["jobs"][-1]["id"]
    seen = manifest.get(RUNNING_SINCE) or {}
    if job not in seen:
        run.update(**{RUNNING_SINCE: {**seen, job: now()}})
