"""One submission, so that nothing is submitted twice and nothing is lost.

Its key, which the job carries as its comment, stands in the manifest before Slurm is asked, its job afterwards. A run
with a key and no job was cut off in between (kill, power cut, full disk, no answer): Slurm is asked for the key before
anything is submitted again.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8launch.backends import slurm
from fp8launch.backends.base import Backend
from fp8launch.backends.submitit import finish_submission
from fp8launch.job.job import Job
from fp8launch.job.plan import submission_comment
from fp8launch.problems import UserError, error
from fp8launch.runs.disk import Busy, held, start_of, sync_folder, uninterrupted
from fp8launch.runs.folder import MANIFEST, RunFolder
from fp8launch.runs.store import job_ids
from fp8launch.secrecy import redacted

if TYPE_CHECKING:
    from fp8launch.runs.submit import Prepared

# A controller that was asked and did not answer in time may take the job a little later.
RECENT_SECONDS = 120.0
SETTLE_SECONDS = 5.0
# On another host nobody can see whether the launcher lives: after this long it does not.
ELSEWHERE_SECONDS = 300.0
# How long to wait for a launcher that holds what this one needs.
HELD_SECONDS = 30.0
# So far back Slurm is asked for jobs.
REMEMBERED_SECONDS = 14 * 86400.0
# sbatch's words that leave open whether there is a job.
_UNCLEAR = re.compile(r"timed out|did not answer|contact|communication|connection|interrupt|gave no reason", re.I)


def now() -> str:
    """The time as manifests write it."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def submit_job(run: RunFolder, job: Job, backend: Backend) -> None:
    """Submit a run's job under a key of its own. Whoever calls holds the run, or its study."""
    key = next_key(run)
    with uninterrupted():
        begin([run], key)
        try:
            job_id = backend.submit(keyed(job, key), run)
        except UserError as exc:
            refused([run], exc)
            raise
        record_job(run, job_id)


def next_key(run: RunFolder) -> str:
    """A key that no job before has, not even one of a run of this name whose folder was removed."""
    return f"{run.run_id}.s{len(job_ids(run))}-{secrets.token_hex(3)}"


def keyed(job: Job, key: str) -> Job:
    """The job with this key as its comment, also where a cluster profile has another: by it the job is found again."""
    return replace(job, slurm=tuple((k, submission_comment(key) if k == "comment" else v) for k, v in job.slurm))


def begin(runs: Sequence[RunFolder], key: str) -> None:
    """Write down under which key these runs are being submitted, as tasks of an array when they are several."""
    for index, run in enumerate(runs):
        run.update(submission=opening(key, index if len(runs) > 1 else None))
        sync_folder(run.path)  # a power cut must not undo what sbatch is about to make true


def opening(key: str, index: int | None = None) -> dict[str, Any]:
    """What a manifest says of a submission that has begun."""
    pid = os.getpid()
    who = {"begun": now(), "host": os.uname().nodename, "pid": pid, "started": start_of(pid)}
    return {"key": key, "index": index, "answered": False, **who}


def record_job(run: RunFolder, job_id: str, **entries: Any) -> None:
    """Add a job to those of a run, and other entries to its manifest with it."""
    manifest = run.manifest()
    submission = manifest.get("submission")
    if submission:
        entries = {"submission": {**submission, "answered": True}, **entries}
    try:
        run.update(jobs=[*manifest.get("jobs", []), {"id": job_id, "submitted": now()}], **entries)
    except OSError as exc:
        raise error(
            "run-root",
            f"job {job_id} is submitted, but cannot be written down: {exc.strerror or exc}",
            str(run.path),
            "make room, then give the same command again: it finds the job and submits nothing twice",
            3,
        ) from None


def refused(runs: Sequence[RunFolder], why: UserError) -> None:
    """Slurm took none of these runs: nothing is to be looked for. Left open where its words leave it open."""
    if _UNCLEAR.search(str(why)):
        return
    for run in runs:
        submission = run.manifest().get("submission") or {}
        run.update(submission={**submission, "answered": True, "refused": redacted(str(why))})


def is_open(run: RunFolder) -> bool:
    """The run was being submitted, and what came of it is not written down."""
    submission = run.manifest().get("submission") or {}
    return bool(submission) and not submission.get("answered")


def under_way(run: RunFolder) -> bool:
    """The launcher that submits this run is still at it, as far as can be seen from here."""
    submission = run.manifest().get("submission") or {}
    if submission.get("host") == os.uname().nodename:
        pid = submission.get("pid")
        alive = isinstance(pid, int) and pid != os.getpid() and start_of(pid)
        return bool(alive) and alive == submission.get("started")
    return _age(run) < ELSEWHERE_SECONDS


def content_key(prepared: Prepared) -> str:
    """What a single run would run: a submission of the same completes one that was cut off."""
    from fp8launch.runs.grid import Point, point_key

    return point_key(Point(prepared.loaded.recipe.name, None), prepared)


def cut_off(root: Path, name: str, content: str, backend: Backend) -> RunFolder | None:
    """The newest run below `root` that would run the same, and whose launcher was killed while it submitted it."""
    oldest = time.time() - REMEMBERED_SECONDS
    for manifest in sorted(root.glob(f"{name}-*/{MANIFEST}"), reverse=True):
        run = RunFolder(manifest.parent)
        with contextlib.suppress(OSError, UserError):
            if manifest.stat().st_mtime < oldest or not run.is_mine or not is_open(run):
                continue
            same = (run.manifest().get("content"), run.manifest().get("backend")) == (content, backend.name)
            if same and not under_way(run):
                return run
    return None


def repair(runs: Sequence[RunFolder], backend: Backend) -> None:
    """What a look at runs may mend: those that were cut off, and that nobody is submitting, get the jobs they have."""
    for run in runs:
        with contextlib.suppress(OSError, UserError, Busy):
            if is_open(run) and run.is_mine and not under_way(run):
                with held(run.path):
                    adopt([run], backend, settle=False)


def in_words(run: RunFolder) -> str:
    """How a run stands that has no job."""
    submission = run.manifest().get("submission") or {}
    if submission.get("refused"):
        return f"refused: {submission['refused']}"
    if not is_open(run):
        return "was never submitted"
    if under_way(run):
        return "is being submitted"
    return "its submission was cut off, and no job is known: the same submit completes it"


def adopt(runs: Sequence[RunFolder], backend: Backend, settle: bool = True) -> list[RunFolder]:
    """Give runs that were cut off the jobs that they have; those that got one.

    With `settle`, Slurm is asked again after some seconds for what was submitted just now. Raises UserError (exit code
    3) when Slurm does not answer: then nobody knows.
    """
    waiting = [run for run in runs if is_open(run)]
    adopted = _adopt(waiting, backend)
    left = [run for run in waiting if run not in adopted]
    if settle and any(_age(run) < RECENT_SECONDS for run in left):
        time.sleep(SETTLE_SECONDS)
        adopted += _adopt(left, backend)
    return adopted


def _adopt(runs: Sequence[RunFolder], backend: Backend) -> list[RunFolder]:
    if not runs:
        return []
    submissions = [run.manifest()["submission"] for run in runs]
    found = {} if backend.name == "local" else slurm.find_jobs(list({str(s.get("key")) for s in submissions}))
    adopted = []
    for run, submission in zip(runs, submissions, strict=True):
        index, known = submission.get("index"), job_ids(run)
        job = found.get(str(submission.get("key")))
        job = job if job is None or index is None else f"{job}_{index}"
        job = job or (_started_here(run) if backend.name == "local" else _that_logged(run, known, index))
        if job is not None and job not in known:
            if backend.name == "submitit":
                finish_submission(run.path / "submitit", job)
            record_job(run, job)
            adopted.append(run)
    return adopted


def _that_logged(run: RunFolder, known: Sequence[str], index: int | None) -> str | None:
    """The job that began this run and was forgotten by Slurm since: its log bears its id."""
    new = [attempt.job_id for attempt in run.attempts() if attempt.job_id not in known]
    return new[-1] if new and ("_" in new[-1]) == (index is not None) else None


def _started_here(run: RunFolder) -> str | None:
    from fp8launch.backends.local import started_here

    return started_here(run)


def _age(run: RunFolder) -> float:
    """Seconds since the run's submission began; never below zero, whatever the clocks say."""
    submission = run.manifest().get("submission") or {}
    begun = submission.get("begun")
    try:
        return max(0.0, time.time() - datetime.fromisoformat(str(begun)).timestamp())
    except (ValueError, OverflowError):
        return ELSEWHERE_SECONDS
