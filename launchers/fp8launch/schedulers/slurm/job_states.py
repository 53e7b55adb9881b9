"""The states of Slurm jobs: what squeue, sacct and the run folder say, put together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fp8launch.rundir.attempts import attempts_of
from fp8launch.rundir.registry import newest_job
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState, Status, ended_with
from fp8launch.schedulers.slurm.job_rows import Answer, JobRow, OwnJob, ask_sacct, ask_squeue

_WORDS: dict[Status, tuple[str, ...]] = {
    "pending": ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    "running": ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"),
    "completed": ("COMPLETED",),
    "failed": ("FAILED", "LAUNCH_FAILED"),
    "node_fail": ("BOOT_FAIL", "NODE_FAIL"),
    "cancelled": ("CANCELLED", "REVOKED", "PREEMPTED"),
    "timeout": ("TIMEOUT", "DEADLINE"),
    "out_of_memory": ("OUT_OF_MEMORY",),
}
_STATUS: dict[str, Status] = {}
for _status, _words in _WORDS.items():
    _STATUS |= dict.fromkeys(_words, _status)
# Why an ended job ended. Any other reason is what it waited for before it began.
_REASONS_OF_AN_END = (
    "NonZeroExitCode", "RaisedSignal", "TimeLimit", "OutOfMemory", "NodeDown", "NodeFail", "BadConstraints",
    "JobLaunchFailure", "SystemFailure", "Prolog", "BootFail", "Deadline", "DependencyNeverSatisfied", "FailedLaunch",
)  # fmt: skip
# Slurm's signal for a batch script whose output file the node could not open.
_NO_OUTPUT_FILE = 53
_NOT_LAUNCHED = "JobLaunchFailure"
BY_US = "by fp8launch cancel"


def states(runs: Sequence[RunFolder]) -> list[JobState]:
    """Return the state of each run's newest job, from squeue, then sacct, then the run folder itself.

    squeue knows the jobs that live; sacct those that ended, where a site has it; the exit status that the batch script
    left shows the end even where sacct is off or the controller does not answer.
    """
    newest: list[OwnJob] = []
    following: list[OwnJob] = []
    for run in runs:
        newest.append((newest_job(run) or "", run))
        following.append((attempts_of(run).waiting or "", run))
    jobs = dict.fromkeys(own for own in (*newest, *following) if own[0])
    queue = ask_squeue(jobs)
    live = _states_in(queue, "squeue")
    # squeue remembers a job for some minutes after its end, without its exit code.
    gone = [] if queue.trouble else [own for own in jobs if own not in live]
    accounts = ask_sacct([own for own in jobs if own not in live or live[own].final], gone)
    ended = _states_in(accounts, "sacct")
    found = []
    for own, waiting in zip(newest, following, strict=True):
        state = _state(own, live, ended, queue, accounts)
        # While another attempt waits for its turn the run is not over, however the newest one ended.
        if state.final and waiting in live and not live[waiting].final:
            state = live[waiting]
        elif state.final and waiting[0] and not (queue.trouble or accounts.trouble):
            state = _without_follow_up(state, waiting, live, ended)
        found.append(state)
    return found


def _without_follow_up(
    state: JobState, waiting: OwnJob, live: Mapping[OwnJob, JobState], ended: Mapping[OwnJob, JobState]
) -> JobState:
    """Return the state of a run whose next attempt will not come about, because its job ended before it began."""
    job, run = waiting
    known = attempts_of(run)
    if known.finished or known.stopped or job == newest_job(run):
        return state
    end = ended.get(waiting) or live.get(waiting)
    words = "is no longer known to Slurm" if end is None else f"is {end}"
    return JobState("interrupted", f"job {job}, which was to continue the run, {words}", state.exit_code, state.source)


def _state(
    own: OwnJob, live: Mapping[OwnJob, JobState], ended: Mapping[OwnJob, JobState], queue: Answer, accounts: Answer
) -> JobState:
    job, run = own
    if not job:
        return JobState("unknown", "was never submitted", source="run folder")
    if own in live and not live[own].final:
        return live[own]
    attempts = [attempt for attempt in run.attempts() if attempt.job_id == job]
    exit_status = None
    if attempts:
        exit_status = attempts[-1].exit_status
    if own in ended and (ended[own].final or exit_status is None):
        return _explained(ended[own], run, began=bool(attempts))
    if own in live:
        return _explained(replace(live[own], exit_code=exit_status), run, began=bool(attempts))
    if run.manifest().get("cancelled") and exit_status != 0:
        return JobState("cancelled", BY_US, exit_status, "run folder")
    if exit_status is not None:
        return ended_with(exit_status)
    return _unknown(queue, accounts, began=bool(attempts))


def _unknown(queue: Answer, accounts: Answer, began: bool) -> JobState:
    """Say which source is silent; a job that neither began nor waits any more was dropped."""
    if queue.trouble:
        return JobState("unknown", queue.trouble, source="squeue")
    if accounts.trouble:
        detail = f"the job is no longer in the queue, and its end cannot be determined: {accounts.trouble}"
        return JobState("unknown", detail, source="sacct")
    if began:
        return JobState("interrupted", "Slurm no longer knows the job, and it left no exit status", source="squeue")
    detail = (
        "Slurm no longer knows the job, and it never started: it was cancelled while it waited, or dropped; repeat "
        "the submit with --retry-failed to submit it again"
    )
    return JobState("unknown", detail, source="squeue", dropped=True)


def _explained(state: JobState, run: RunFolder, began: bool) -> JobState:
    """Add what Slurm's word leaves out."""
    if state.status == "failed" and state.exit_code == 128 + _NO_OUTPUT_FILE and not began:
        detail = (
            f"{state.detail}: the node could not write below {run.path} (Slurm's exit code 0:53): the run root must be "
            "on a file system that every node sees; set run_root in the cluster profile, or --run-root"
        )
        return replace(state, detail=detail, folder_unseen=True)
    if state.status == "failed" and not began and _NOT_LAUNCHED in state.detail:
        # squeue has no exit code; the accounting may be more exact later.
        detail = (
            f"{state.detail}: a node could not start the job, most often because it cannot write below {run.path}, "
            "which must be on a file system that every node sees"
        )
        return replace(state, detail=detail)
    if state.status == "cancelled" and run.manifest().get("cancelled"):
        # In place of Slurm's number of the user.
        return replace(state, detail=f"{re.sub(r'( by [0-9]+| while it waited)$', '', state.detail)} {BY_US}")
    return state


def _states_in(answer: Answer, source: str) -> dict[OwnJob, JobState]:
    states = {}
    for own, row in answer.rows.items():
        states[own] = JobState(status_of(row.word), _detail(row), row.exit_code, source)
    return states


def status_of(word: str) -> Status:
    """Return the status that a word of Slurm's for a job's state means."""
    # "CANCELLED by 1000": the first word counts. A word that no version above had is a job that has not ended.
    first = next(iter(word.split()), "")
    return _STATUS.get(first.rstrip("+"), "unknown")


def _detail(row: JobRow) -> str:
    state = JobState(status_of(row.word))
    if row.reason in ("", "None"):
        return row.word
    if state.final and not row.reason.startswith(_REASONS_OF_AN_END):
        return row.word
    return f"{row.word}: {row.reason}"
