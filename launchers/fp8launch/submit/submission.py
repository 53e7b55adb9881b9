"""One submission, so that nothing is submitted twice and nothing is lost.

The manifest has the submission's key before the scheduler is asked, and its job afterwards. A run with a key and no job
was cut off in between (kill, power cut, full disk, no answer): the scheduler is asked for the key before anything is
submitted again.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8launch.diagnostics import UserError, error
from fp8launch.job.job import Job
from fp8launch.rundir.atomic_io import Busy, held, start_of, sync_folder, uninterrupted
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import MANIFEST, RunFolder
from fp8launch.schedulers.base import Scheduler, Submission
from fp8launch.secrets import redacted

if TYPE_CHECKING:
    from fp8launch.job.prepared import Prepared

# A controller that was asked and did not answer in time may take the job a little later.
RECENT_SECONDS = 120.0
SETTLE_SECONDS = 5.0
# On another host nobody can see whether the launcher lives: after this long it does not.
ELSEWHERE_SECONDS = 300.0
# How long to wait for a launcher that holds what this one needs.
HELD_SECONDS = 30.0
# How far back submissions that were cut off are completed.
REMEMBERED_SECONDS = 14 * 86400.0
# A command that is repeated later than this after it was cut off means another run.
REPEATED_SECONDS = 3600.0
# Words of a refusal that leave open whether there is a job, or whether the same is accepted a little later.
_UNCLEAR = re.compile(
    r"timed out|did not answer|contact|communication|connection|interrupt|gave no reason|temporarily", re.I
)


def now() -> str:
    """Return the time as manifests write it."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def submit_job(run: RunFolder, job: Job, scheduler: Scheduler) -> None:
    """Submit a run's job under a key of its own. The caller holds the run, or its study."""
    key = next_key(run)
    with uninterrupted():
        record_begin([run], key)
        try:
            job_id = scheduler.submit(job, run, key)
        except UserError as exc:
            record_refusal([run], exc)
            raise
        record_job(run, job_id)


def next_key(run: RunFolder) -> str:
    """Return a key that no job before has, not even one of a run of this name whose folder was removed."""
    return f"{run.run_id}.s{len(job_ids(run))}-{secrets.token_hex(3)}"


def record_begin(runs: Sequence[RunFolder], key: str) -> None:
    """Record under which key these runs are being submitted, as tasks of an array when they are several."""
    for index, run in enumerate(runs):
        submission = new_submission(key)
        if len(runs) > 1:
            submission = new_submission(key, index)
        run.update(submission=submission)
        sync_folder(run.path)  # a power cut must not undo what the scheduler is about to make true


def new_submission(key: str, index: int | None = None) -> dict[str, Any]:
    """Return a manifest's entry for a submission that has begun."""
    pid = os.getpid()
    launcher = {"begun": now(), "host": os.uname().nodename, "pid": pid, "started": start_of(pid)}
    return {"key": key, "index": index, "answered": False, "reported": False, **launcher}


def record_reported(run: RunFolder) -> None:
    """Record that the user was told of the run's job: the same command again means another run."""
    with contextlib.suppress(OSError):
        run.update(submission={**run.manifest()["submission"], "reported": True})


def record_job(run: RunFolder, job_id: str, **entries: Any) -> None:
    """Add a job to those of a run, and other entries to its manifest with it."""
    manifest = run.manifest()
    submission = manifest.get("submission")
    if submission:
        entries = {"submission": {**submission, "answered": True}, **entries}
    try:
        jobs = [*manifest.get("jobs", []), {"id": job_id, "submitted": now()}]
        run.update(jobs=jobs, cancelled=None, **entries)
    except OSError as exc:
        raise error(
            "run-root",
            f"job {job_id} is submitted, but cannot be recorded: {exc.strerror or exc}",
            str(run.path),
            "free disk space, then repeat the command: it finds the job and submits nothing twice",
            3,
        ) from None


def record_refusal(runs: Sequence[RunFolder], why: UserError) -> None:
    """Record that the scheduler refused these runs, unless its words leave open whether there is a job."""
    if _UNCLEAR.search(str(why)):
        return
    for run in runs:
        submission = run.manifest().get("submission") or {}
        run.update(submission={**submission, "answered": True, "refused": redacted(str(why))})


def is_open(run: RunFolder) -> bool:
    """Return whether the run was being submitted and the outcome is not recorded."""
    submission = run.manifest().get("submission") or {}
    return bool(submission) and not submission.get("answered")


def under_way(run: RunFolder) -> bool:
    """Return whether the launcher that submits this run is still running, as far as this host can see."""
    submission = run.manifest().get("submission") or {}
    if submission.get("host") == os.uname().nodename:
        pid = submission.get("pid")
        alive = isinstance(pid, int) and pid != os.getpid() and start_of(pid)
        return bool(alive) and alive == submission.get("started")
    return _age(run) < ELSEWHERE_SECONDS


def content_key(prepared: Prepared) -> str:
    """Return a key of what a single run would run: a submission of the same completes one that was cut off."""
    from fp8launch.submit.grid import Point, point_key

    return point_key(Point(prepared.loaded.recipe.name, None), prepared)


def find_cut_off(root: Path, name: str, content: str, scheduler: Scheduler) -> RunFolder | None:
    """Return the newest run below `root` that would run the same, and whose launcher was killed before it said so."""
    oldest = time.time() - REMEMBERED_SECONDS
    for file in sorted(root.glob(f"{name}-*/{MANIFEST}"), reverse=True):
        run = RunFolder(file.parent)
        with contextlib.suppress(OSError, UserError):
            if file.stat().st_mtime < oldest or not run.is_mine or not (is_open(run) or _is_unreported(run)):
                continue
            manifest = run.manifest()
            same = manifest.get("content") == content and manifest.get("backend") == scheduler.name
            if same and not under_way(run):
                return run
    return None


def _is_unreported(run: RunFolder) -> bool:
    """Return whether a job was recorded, by its launcher or by another command, and its launcher was killed just then.

    Whoever submitted it was never told, and repeats the command.
    """
    submission = run.manifest().get("submission") or {}
    return submission.get("reported") is False and bool(job_ids(run)) and _age(run) < REPEATED_SECONDS


def recover_cut_off(runs: Sequence[RunFolder], scheduler: Scheduler, settle: bool = False) -> None:
    """Record the jobs of runs whose submission was cut off and that nobody is submitting now. Errors are ignored.

    `settle` as for `recover_jobs`.
    """
    for run in runs:
        with contextlib.suppress(OSError, UserError, Busy):
            if is_open(run) and run.is_mine and not under_way(run):
                with held(run.path):
                    recover_jobs([run], scheduler, settle)


def describe_without_job(run: RunFolder) -> str:
    """Describe why a run has no job."""
    submission = run.manifest().get("submission") or {}
    if submission.get("refused"):
        return f"refused: {submission['refused']}"
    if not is_open(run):
        return "was never submitted"
    if under_way(run):
        return "is being submitted"
    return "its submission was interrupted, and it has no known job; repeat the same submit command to complete it"


def recover_jobs(runs: Sequence[RunFolder], scheduler: Scheduler, settle: bool = True) -> list[RunFolder]:
    """Record the jobs of those runs whose submission was cut off; return the runs that have a job now.

    With `settle`, the scheduler is asked again after some seconds about what was submitted just now. Raises UserError
    (exit code 3) when it does not answer: then nobody knows.
    """
    waiting = list(filter(is_open, runs))
    recovered = _recover(waiting, scheduler)
    left = [run for run in waiting if run not in recovered]
    if settle and any(_age(run) < RECENT_SECONDS for run in left):
        time.sleep(SETTLE_SECONDS)
        recovered += _recover(left, scheduler)
    return recovered


def _recover(runs: Sequence[RunFolder], scheduler: Scheduler) -> list[RunFolder]:
    if not runs:
        return []
    submissions = []
    for run in runs:
        entry = run.manifest()["submission"]
        submissions.append(Submission(run, str(entry.get("key")), entry.get("index")))
    recovered = []
    for run, job in scheduler.recover(submissions).items():
        if job not in job_ids(run):
            record_job(run, job)
            recovered.append(run)
    return recovered


def _age(run: RunFolder) -> float:
    """Return the seconds since the run's submission began; never below zero, whatever the clocks say."""
    submission = run.manifest().get("submission") or {}
    begun = submission.get("begun")
    try:
        return max(0.0, time.time() - datetime.fromisoformat(str(begun)).timestamp())
    except (ValueError, OverflowError):
        return ELSEWHERE_SECONDS
