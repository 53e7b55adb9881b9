"""Record submissions so that nothing is submitted twice and no job is lost.

The manifest has a submission's key before the scheduler is called, and the job id afterwards. If a run has a key but no
job, its submission was interrupted in between (kill, power cut, full disk, no answer). In that case, the scheduler is
queried for the key before anything is submitted again.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8launch import schedulers
from fp8launch.diagnostics import MACHINE_LACKS, UserError, error
from fp8launch.injob.supervisor.run_records import new_submission, now, start_of, this_launcher
from fp8launch.rundir.atomic_io import Busy, held, sync_folder, uninterrupted
from fp8launch.rundir.attempts import forbid_more
from fp8launch.rundir.registry import job_ids, need_mine
from fp8launch.rundir.run_dir import MANIFEST, RunFolder
from fp8launch.rundir.study import StudyFolder
from fp8launch.schedulers.base import JobState, Scheduler, Submission
from fp8launch.secrets import redacted
from fp8launch.untyped import as_mapping

# A controller that did not answer in time may still accept the job within this time.
RECENT_SECONDS = 120.0
SETTLE_SECONDS = 5.0
# A launcher on another host cannot be observed. It counts as dead after this time.
ELSEWHERE_SECONDS = 300.0
# How long to wait for a launcher that holds a lock.
HELD_SECONDS = 30.0
# Interrupted submissions up to this age are completed.
REMEMBERED_SECONDS = 14 * 86400.0
# If an interrupted command is repeated later than this, it starts a new run.
REPEATED_SECONDS = 3600.0
# Errors after which the job may exist, or the same request may be accepted a little later.
_UNCLEAR = re.compile(
    r"timed out|did not answer|contact|communication|connection|interrupt|gave no reason|temporarily", re.I
)


def submit_under(key: str, runs: Sequence[RunFolder], submit: Callable[[], Sequence[str]]) -> None:
    """Submit runs under a key (as one array if there are several), and record the job of each.

    `submit` calls the scheduler and returns the job ids. The caller must hold the lock of the runs or their study.
    """
    with uninterrupted():
        for index, run in enumerate(runs):
            run.update(submission=new_submission(key, index if len(runs) > 1 else None))
            sync_folder(run.path)  # the key must survive a power cut once the scheduler has the job
        try:
            jobs = submit()
        except UserError as refused:
            if not _UNCLEAR.search(str(refused)):
                for run in runs:
                    words = redacted(str(refused))
                    run.update(submission={**_submission_of(run), "answered": True, "refused": words})
            raise
        for run, job in zip(runs, jobs, strict=True):
            record_job(run, job)


def submit_held(run: RunFolder, scheduler: Scheduler) -> None:
    """Submit a job of a run that waits for its release, and record it."""
    key = next_key(run)
    submit_under(key, [run], lambda: [scheduler.submit_held(run, key)])


def next_key(run: RunFolder) -> str:
    """Return a key that no earlier job has, not even one of a deleted run with the same name."""
    return f"{run.run_id}.s{len(job_ids(run))}-{secrets.token_hex(3)}"


def record_reported(run: RunFolder) -> None:
    """Record that the user has seen the run's job. From now on, the same command starts a new run."""
    with contextlib.suppress(OSError):
        run.update(submission={**run.manifest()["submission"], "reported": True})


def record_waiting(run: RunFolder) -> None:
    """Record that this launcher waits for the run to end. If it is killed, the same command resumes waiting."""
    with contextlib.suppress(OSError):
        run.update(submission={**run.manifest()["submission"], "waiting": True, **this_launcher()})


def record_job(run: RunFolder, job_id: str) -> None:
    """Record the job of a run after the scheduler has answered."""
    manifest = run.manifest()
    entries: dict[str, Any] = {}
    if submission := manifest.get("submission"):
        entries["submission"] = {**submission, "answered": True}
    try:
        jobs = [*manifest.get("jobs", []), {"id": job_id, "submitted": now()}]
        run.update(jobs=jobs, cancelled=None, **entries)
    except OSError as exc:
        raise error(
            "run-root",
            f"job {job_id} was submitted, but cannot be recorded: {exc.strerror or exc}",
            str(run.path),
            "free disk space, then repeat the command: it finds the job and submits nothing twice",
            3,
        ) from None


def _submission_of(run: RunFolder) -> Mapping[str, Any]:
    return run.manifest().get("submission") or {}


def is_open(run: RunFolder) -> bool:
    """Return whether a submission of the run has started but its outcome is not recorded."""
    submission = _submission_of(run)
    return bool(submission) and not submission.get("answered")


def under_way(run: RunFolder) -> bool:
    """Return whether the launcher that submits this run is still alive, as far as this host can tell."""
    submission = _submission_of(run)
    if _is_on_this_host(run):
        pid = submission.get("pid")
        alive = isinstance(pid, int) and pid != os.getpid() and start_of(pid)
        return bool(alive) and alive == submission.get("started")
    return _age(run) < ELSEWHERE_SECONDS


def find_cut_off(root: Path, name: str, content: str, scheduler: Scheduler) -> RunFolder | None:
    """Return the newest run below `root` with the same content whose launcher was killed before reporting the run.

    Raises UserError (exit code 3) if a launcher on another host may have been killed just now.
    """
    for file in sorted(root.glob(f"{name}-*/{MANIFEST}"), reverse=True):
        run = RunFolder(file.parent)
        if not _may_be_cut_off(run, content, scheduler):
            continue
        if not under_way(run):
            return run
        if not _is_on_this_host(run):
            # Login nodes share an address, so a user who lost the connection may come back on another host.
            _wait_for_report(run, scheduler)
    return None


def _may_be_cut_off(run: RunFolder, content: str, scheduler: Scheduler) -> bool:
    """Return whether a run has the same content as this submission and was not reported to the user."""
    try:
        recent = (run.path / MANIFEST).stat().st_mtime >= time.time() - REMEMBERED_SECONDS
        if not recent or not run.is_mine:
            return False
        manifest = run.manifest()
        same = manifest.get("content") == content and manifest.get("backend") == scheduler.name
        return same and (is_open(run) or _is_unreported(run, scheduler))
    except (OSError, UserError):
        return False


def _wait_for_report(run: RunFolder, scheduler: Scheduler) -> None:
    """Wait until a launcher on another host has reported its run, which takes only seconds if it is alive."""
    end = time.monotonic() + HELD_SECONDS
    while is_open(run) or _is_unreported(run, scheduler):
        if time.monotonic() >= end:
            host, left = _submission_of(run).get("host"), max(1.0, ELSEWHERE_SECONDS - _age(run))
            message = f"a launcher on {host} is submitting the same run, {run.run_id}, or was killed"
            fix = f"if it was killed, repeat the command in {left:.0f} s to complete that run"
            raise error("run-busy", message, str(run.path), fix, MACHINE_LACKS)
        time.sleep(0.5)


def _is_unreported(run: RunFolder, scheduler: Scheduler) -> bool:
    """Return whether the launcher was killed after it got a job, but before the user saw it or the end of the run."""
    submission = _submission_of(run)
    if submission.get("reported") is not False or not job_ids(run):
        return False
    if not submission.get("waiting"):
        return _age(run) < REPEATED_SECONDS
    # A launcher on another host may go on waiting for days.
    return _is_on_this_host(run) and (_age(run) < REPEATED_SECONDS or not scheduler.state(run).final)


def _is_on_this_host(run: RunFolder) -> bool:
    return _submission_of(run).get("host") == os.uname().nodename


def recover_cut_off(runs: Sequence[RunFolder], scheduler: Scheduler, settle: bool = False) -> None:
    """Record the jobs of runs whose submission was interrupted and that no launcher is submitting. Errors are ignored.

    `settle` is as in `recover_jobs`.
    """
    for run in runs:
        with contextlib.suppress(OSError, UserError, Busy):
            if is_open(run) and run.is_mine and not under_way(run):
                with held(run.path):
                    recover_jobs([run], scheduler, settle)


def without_job(run: RunFolder) -> JobState:
    """Return the state of a run without a job: it waits for another run to end, or was not submitted."""
    after = as_mapping(run.manifest().get("study")).get("after")
    if after and not is_open(run):
        return JobState("pending", f"waits for {after}", source="run folder")
    return JobState("unknown", describe_without_job(run), source="run folder")


def describe_without_job(run: RunFolder) -> str:
    """Describe why a run has no job."""
    if refused := _submission_of(run).get("refused"):
        return f"refused: {refused}"
    if not is_open(run):
        return "was never submitted"
    if under_way(run):
        return "is being submitted"
    return "its submission was interrupted, and no job is known; repeat the same submit command to complete it"


def recover_jobs(runs: Sequence[RunFolder], scheduler: Scheduler, settle: bool = True) -> None:
    """Record the jobs of runs whose submission was interrupted.

    With `settle`, the scheduler is queried again after some seconds about very recent submissions. Raises UserError
    (exit code 3) if the scheduler does not answer, because a job may exist.
    """
    left = _recover([run for run in runs if is_open(run)], scheduler)
    if settle and any(_age(run) < RECENT_SECONDS for run in left):
        time.sleep(SETTLE_SECONDS)
        _recover(left, scheduler)


def _recover(runs: Sequence[RunFolder], scheduler: Scheduler) -> list[RunFolder]:
    """Record the jobs that the scheduler has for these runs. Return the runs for which it has no new job."""
    if not runs:
        return []
    submissions = []
    for run in runs:
        entry = _submission_of(run)
        submissions.append(Submission(run, str(entry.get("key")), entry.get("index")))
    found = scheduler.recover(submissions)
    new = {run: job for run, job in found.items() if job not in job_ids(run)}
    for run, job in new.items():
        record_job(run, job)
    return [run for run in runs if run not in new]


def cancel_study(study: StudyFolder) -> list[RunFolder]:
    """Cancel the runs of a study that have not ended, and return them. Raises UserError for another user's study."""
    need_mine(study)
    runs = study.runs()
    need_mine(*runs)
    if not runs:
        return []
    scheduler = schedulers.of_run(runs[0])
    recover_cut_off(runs, scheduler)
    return cancel_runs(list(filter(job_ids, runs)), scheduler)


def cancel_runs(runs: Sequence[RunFolder], scheduler: Scheduler) -> list[RunFolder]:
    """Cancel the jobs of the runs that have not ended, prevent further attempts, and return these runs.

    Slurm forgets jobs that were cancelled before they started, so the manifest records the cancellation.
    """
    under_way = [run for run, state in zip(runs, scheduler.states(runs), strict=True) if not state.final]
    if not under_way:
        return []
    for run in under_way:
        forbid_more(run)
    scheduler.cancel(under_way)
    unrecorded = None
    for run in under_way:
        try:
            run.update(cancelled=now())
        except OSError as exc:
            unrecorded = exc
    if unrecorded is not None:
        message = f"the jobs are cancelled, but their run folders do not say so: {unrecorded.strerror}"
        raise error("cannot-write", message, str(unrecorded.filename), "make room on this file system", MACHINE_LACKS)
    return under_way


def _age(run: RunFolder) -> float:
    """Return the seconds since the run's submission started, at least 0 even if clocks disagree."""
    try:
        begun = datetime.fromisoformat(str(_submission_of(run).get("begun")))
        return max(0.0, time.time() - begun.timestamp())
    except (ValueError, OverflowError):
        return ELSEWHERE_SECONDS
