"""Find the Slurm jobs of our runs, report their states, and cancel them.

squeue lists live jobs, and sacct lists ended ones if the site has accounting. The exit status that the batch script
left in the run folder shows how a job ended even if sacct is unavailable or the controller does not answer.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8launch.diagnostics import error
from fp8launch.rundir.attempts import attempts_of
from fp8launch.rundir.registry import job_ids, newest_job
from fp8launch.rundir.run_dir import STUDY, RunFolder
from fp8launch.schedulers.base import FINAL, JobState, Status, ended_with
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.schedulers.slurm.job_comment import find_key, key_in, key_in_command
from fp8launch.untyped import as_mapping
from fp8launch.wording import and_more

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
_STATUS: dict[str, Status] = {word: status for status, words in _WORDS.items() for word in words}
# Reasons why a job ended. Any other reason says why the job was pending.
_REASONS_OF_AN_END = (
    "NonZeroExitCode", "RaisedSignal", "TimeLimit", "OutOfMemory", "NodeDown", "NodeFail", "BadConstraints",
    "JobLaunchFailure", "SystemFailure", "Prolog", "BootFail", "Deadline", "DependencyNeverSatisfied", "FailedLaunch",
)  # fmt: skip
# The signal that Slurm reports if the node could not open the batch script's output file.
_NO_OUTPUT_FILE = 53
_BY_US = "by fp8launch cancel"
# More tasks than any site's MaxArraySize allows.
_MOST_TASKS = 4_000_001
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
# What follows the name of a run or study in a submission key.
_SERIAL = r"\.[a-z]?[0-9]+(-[0-9a-f]+)?"


@dataclass(frozen=True)
class JobRow:
    """A job as shown by squeue or sacct. Texts that are not shown are empty.

    `command` is the submitted script, and `submitted_by` the complete command line that submitted it.
    """

    job: str
    word: str
    reason: str = ""
    name: str = ""
    comment: str = ""
    exit_code: int | None = None
    command: str = ""
    submitted_by: str = ""

    @property
    def key(self) -> str | None:
        """The key of the job's submission. At most sites, accounting keeps sbatch's command line but no comments."""
        key = key_in(self.comment)
        if key is None:
            key = key_in_command(self.submitted_by)
        return key


# Slurm reuses job ids once it runs out of them, so two runs can have jobs with the same id.
OwnJob = tuple[str, RunFolder]


@dataclass(frozen=True)
class Answer:
    """The jobs listed by a command, by id and run. If the command failed, `trouble` says why."""

    rows: Mapping[OwnJob, JobRow] = field(default_factory=dict)
    trouble: str = ""


def states(runs: Sequence[RunFolder]) -> list[JobState]:
    """Return the state of each run's newest job, from squeue, then sacct, then the run folder itself."""
    newest = [(newest_job(run) or "", run) for run in runs]
    following = [(attempts_of(run).waiting or "", run) for run in runs]
    jobs = [own for own in dict.fromkeys([*newest, *following]) if own[0]]
    queue = _ask_squeue(jobs)
    live = {own: _state_in_row(row, "squeue") for own, row in queue.rows.items()}
    gone = [] if queue.trouble else [own for own in jobs if own not in live]
    # squeue still lists a job for some minutes after its end, but without an exit code.
    accounts = _ask_sacct([own for own in jobs if own not in live or live[own].final], gone)
    ended = {own: _state_in_row(row, "sacct") for own, row in accounts.rows.items()}
    found = []
    for own, waiting in zip(newest, following, strict=True):
        state = _state(own, live, ended, queue, accounts)
        # As long as another attempt is pending, the run has not ended, however the newest attempt ended.
        if state.final and waiting in live and not live[waiting].final:
            state = live[waiting]
        elif state.final and waiting[0] and not (queue.trouble or accounts.trouble):
            state = _without_follow_up(state, waiting, ended.get(waiting) or live.get(waiting))
        found.append(state)
    return found


def cancel_runs(runs: Sequence[RunFolder]) -> None:
    """Cancel all jobs of these runs, including pending successors, but no unrelated job with the same id."""
    jobs = [(job, run) for run in runs for job in (*job_ids(run), attempts_of(run).waiting) if job]
    if not jobs:
        return
    rows, trouble = _queue_rows(runs)
    if trouble:
        names = and_more(list(dict(jobs)), 5)
        message = f"cannot determine which run the jobs {names} belong to: {trouble}"
        raise error("slurm-silent", message, None, "retry when Slurm answers", 3)
    alive = {row.job: row for row in rows if status_of(row.word) not in FINAL}
    ours = {job for job, run in jobs if job in alive and is_job_of(alive[job], run)}
    # Cancelling an array by its id ends a thousand tasks at once. Do so if all live tasks of the array are ours.
    others = {number_of(job) for job in alive if job not in ours}
    words = {job if number_of(job) in others else number_of(job) for job in ours}
    scancel(sorted(words, key=lambda job: [int(part) for part in job.split("_")]))


def scancel(ids: Sequence[str]) -> None:
    """Cancel jobs. It is not an error if a job has already ended."""
    if not ids:
        return
    done = slurm_cli.call("scancel", *ids)
    if done.returncode and "invalid job id" not in done.stderr.lower():
        message = f"Slurm did not cancel {', '.join(ids)}: {done.stderr.strip()}"
        raise error("scancel-failed", message, fix="`fp8launch runs` lists the jobs still running", exit_code=3)


def find_jobs(keys: Sequence[str]) -> dict[str, str]:
    """Return the job ids that Slurm has for submission keys. For an array, it is the array's id.

    Raises UserError (exit code 3) if Slurm does not answer, because the jobs may exist.
    """
    if not keys:
        return {}
    shown = slurm_cli.call("squeue", "-h", "-t", "all", "-o", "%F|%o|%k", "-u", str(os.getuid()))
    if shown.returncode:
        raise error(
            "slurm-silent",
            f"cannot determine what was submitted before: {slurm_cli.one_line(shown.stderr)}",
            fix="repeat the command when Slurm answers; nothing is submitted twice",
            exit_code=3,
        )
    # Jobs that ended a while ago are only in the accounting database.
    accounted = slurm_cli.call("sacct", "-X", "-n", "-P", "-S", "now-14days", "-o", "JobID,SubmitLine,Comment")
    lines = shown.stdout.splitlines()
    if accounted.returncode == 0:
        lines = [*accounted.stdout.splitlines(), *lines]
    found = {}
    for line in lines:
        job, _, command_and_comment = line.partition("|")
        key = find_key(command_and_comment, keys)
        if key is not None:
            found[key] = number_of(job)  # if several jobs have the same key, the last one counts
    return found


def is_job_of(row: JobRow, run: RunFolder) -> bool:
    """Return whether a job belongs to this run. A new database counts from 1, so another job may have the same id."""
    # The manifest may come from an unpacked archive and describe another user's job, but the folder's path cannot.
    places = [run.path]
    if (run.path.parent / STUDY).is_file():
        places.append(run.path.parent)
    own_key = re.compile(f"({'|'.join(re.escape(place.name) for place in places)}){_SERIAL}")
    if row.key is not None:
        return row.key == run.run_id or own_key.fullmatch(row.key) is not None
    # Some sites drop comments or write their own. In that case, compare the script: it is in the run folder or, with
    # NeMo-Run, in a folder named after the key. `command` is the path of the script and its arguments.
    script = Path(row.command)
    below = any(script.resolve().is_relative_to(place.resolve()) for place in places)
    if row.command and not below and not any(map(own_key.fullmatch, script.parts)):
        return False
    manifest = run.manifest()
    names = [name for name in (manifest.get("name"), as_mapping(manifest.get("slurm")).get("job-name")) if name]
    return not row.name or not names or row.name in names


def number_of(job: str) -> str:
    """Return the id of a job, or of the array to which a task belongs."""
    return job.partition("_")[0]


def tasks_of(listed: str) -> Iterator[str]:
    """Yield the jobs that an id such as `12`, `12_3` or `12_[0-2,7%4]` refers to."""
    match = re.fullmatch(r"([0-9]{1,18})_\[([0-9,:-]*)(?:%[0-9]*)?\]", listed)
    if match is None:
        yield listed
        return
    for part in match[2].split(","):
        numbers = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?", part)
        if numbers is not None:
            first, last, step = int(numbers[1]), int(numbers[2] or numbers[1]), max(1, int(numbers[3] or 1))
            for number in range(first, min(last + 1, _MOST_TASKS), step):
                yield f"{match[1]}_{number}"


def status_of(word: str) -> Status:
    """Return the status for Slurm's name of a job state."""
    # Only the first word of "CANCELLED by 1000" counts. A job with an unknown state has not ended.
    first = next(iter(word.split()), "")
    return _STATUS.get(first.rstrip("+"), "unknown")


def exit_code(text: str) -> int | None:
    """Convert Slurm's status:signal to an exit status as a shell would show it."""
    match = re.fullmatch(r"([0-9]{1,6}):?([0-9]{0,6})", text)
    if match is None:
        return None
    status, signal = int(match[1]), int(match[2] or 0)
    return 128 + signal if status == 0 and signal else status


def _ask_squeue(jobs: Collection[OwnJob]) -> Answer:
    """Return the jobs that squeue still lists."""
    if not jobs:
        return Answer()
    rows, trouble = _queue_rows(run for _, run in jobs)
    return Answer(_rows_of(jobs, rows), trouble)


def _queue_rows(runs: Iterable[RunFolder]) -> tuple[list[JobRow], str]:
    """Return the queued jobs of these runs' owners, or the reason why squeue does not answer."""
    # Query all jobs of a user: with -j, Slurm 22.05 refuses the whole query if it has forgotten a single id.
    # -r lists each task of a pending array.
    shown = slurm_cli.call("squeue", "-r", "-h", "-t", "all", "-o", "%i|%T|%r|%j|%k|%o", "-u", _users(runs))
    if shown.returncode:
        return [], slurm_cli.trouble(shown)
    rows = []
    for line in shown.stdout.splitlines():
        job, word, reason, name, comment, command = [*line.split("|", 5), *[""] * 5][:6]
        if job:
            rows.append(JobRow(job, word, reason, name, comment, command=command))
    return rows, ""


def _ask_sacct(jobs: Collection[OwnJob], gone: Collection[OwnJob]) -> Answer:
    """Return the jobs that accounting knows, or none if accounting is disabled.

    `gone` are the jobs that squeue no longer lists. For the others, accounting may not have a record yet.
    """
    if not jobs:
        return Answer()
    # -X lists jobs without steps, -D lists every attempt of a requeued job (the newest is last), -P does not truncate.
    # Arrays are queried as a whole, because tasks cancelled while pending share one row that no task id finds.
    fields = "JobID,State,ExitCode,Reason,JobName,Comment,SubmitLine"
    asked = dict(jobs)
    # A manifest may come from another site, and sacct refuses the whole query if one id is not Slurm's.
    numbers = ",".join(dict.fromkeys(number_of(job) for job in asked if _JOB_ID.fullmatch(job)))
    users = _users(run for _, run in jobs)
    shown = slurm_cli.call("sacct", "-X", "-n", "-P", "-D", "-u", users, "-o", fields, "-j", numbers)
    if shown.returncode:
        if shown.returncode == 127 or "accounting storage is disabled" in shown.stderr.lower():
            return Answer()
        return Answer(trouble=slurm_cli.trouble(shown))
    rows = []
    arrays: dict[str, JobRow] = {}
    for line in shown.stdout.splitlines():
        listed, word, code, reason, name, comment, submitted_by = [*line.split("|", 6), *[""] * 6][:7]
        row = JobRow(listed, word, reason, name, comment, exit_code(code), submitted_by=submitted_by)
        if "_" in listed:
            arrays[number_of(listed)] = row
        rows += [replace(row, job=job) for job in tasks_of(listed) if job in asked]
    # A task that is cancelled while pending is removed from its array without a record.
    recorded = {row.job for row in rows}
    for job, run in gone:
        array = arrays.get(number_of(job))
        began = any(attempt.job_id == job for attempt in run.attempts())
        if array is not None and job not in recorded and not began:
            rows.append(replace(array, job=job, word="CANCELLED while it waited", reason="", exit_code=None))
    return Answer(_rows_of(jobs, rows))


def _rows_of(jobs: Collection[OwnJob], rows: Iterable[JobRow]) -> dict[OwnJob, JobRow]:
    """Return the newest row of each job. Rows that name the run take precedence over rows that merely fit it."""
    by_number: dict[str, list[JobRow]] = {}
    for row in rows:
        by_number.setdefault(row.job, []).append(row)
    found = {}
    for job, run in jobs:
        own = [row for row in by_number.get(job, ()) if is_job_of(row, run)]
        # Key and folder are unique to a run.
        named = [row for row in own if row.key is not None or f"{run.path}/" in row.submitted_by]
        if own:
            found[job, run] = (named or own)[-1]
    return found


def _users(runs: Iterable[RunFolder]) -> str:
    """Return the user ids of the folders' owners, who may own jobs of these runs."""
    owners = {os.getuid()}
    for run in runs:
        with contextlib.suppress(OSError):
            owners.add(run.path.stat().st_uid)
    return ",".join(map(str, sorted(owners)))


def _state_in_row(row: JobRow, source: str) -> JobState:
    status, detail = status_of(row.word), row.word
    waited_for = status in FINAL and not row.reason.startswith(_REASONS_OF_AN_END)
    if row.reason not in ("", "None") and not waited_for:
        detail += f": {row.reason}"
    return JobState(status, detail, row.exit_code, source)


def _state(
    own: OwnJob, live: Mapping[OwnJob, JobState], ended: Mapping[OwnJob, JobState], queue: Answer, accounts: Answer
) -> JobState:
    job, run = own
    if not job:
        return JobState("unknown", "was never submitted", source="run folder")
    if own in live and not live[own].final:
        return _held(live[own], run)
    attempts = [attempt for attempt in run.attempts() if attempt.job_id == job]
    exit_status = attempts[-1].exit_status if attempts else None
    if own in ended and (ended[own].final or exit_status is None):
        return _explained(ended[own], run, began=bool(attempts))
    if own in live:
        return _explained(replace(live[own], exit_code=exit_status), run, began=bool(attempts))
    if run.manifest().get("cancelled") and exit_status != 0:
        return JobState("cancelled", _BY_US, exit_status, "run folder")
    if exit_status is not None:
        return ended_with(exit_status)
    if queue.trouble:
        return JobState("unknown", queue.trouble, source="squeue")
    if accounts.trouble:
        detail = f"the job is no longer in the queue, and its end cannot be determined: {accounts.trouble}"
        return JobState("unknown", detail, source="sacct")
    if attempts:
        return JobState("interrupted", "Slurm no longer knows the job, and it left no exit status", source="squeue")
    detail = (
        "Slurm no longer knows the job, and it never started: it was cancelled while it waited, or dropped; repeat "
        "the submit with --retry-failed to submit it again"
    )
    return JobState("unknown", detail, source="squeue", dropped=True)


def _held(state: JobState, run: RunFolder) -> JobState:
    """Name the run that a held job waits for."""
    after = as_mapping(run.manifest().get("study")).get("after")
    if after is None or "JobHeldUser" not in state.detail:
        return state
    return replace(state, detail=f"PENDING: waits for {after}")


def _explained(state: JobState, run: RunFolder, began: bool) -> JobState:
    """Add details that are not in Slurm's state."""
    if state.status == "failed" and state.exit_code == 128 + _NO_OUTPUT_FILE and not began:
        detail = (
            f"{state.detail}: the node could not write below {run.path} (Slurm's exit code 0:53): the run root must be "
            "on a file system that every node sees; set run_root in the cluster profile, or --run-root"
        )
        return replace(state, detail=detail, folder_unseen=True)
    if state.status == "failed" and not began and "JobLaunchFailure" in state.detail:
        # squeue has no exit code. Accounting may know more later.
        detail = (
            f"{state.detail}: a node could not start the job, most often because it cannot write below {run.path}, "
            "which must be on a file system that every node sees"
        )
        return replace(state, detail=detail)
    if state.status == "cancelled" and run.manifest().get("cancelled"):
        # This replaces Slurm's numeric user id.
        return replace(state, detail=f"{re.sub(r'( by [0-9]+| while it waited)$', '', state.detail)} {_BY_US}")
    return state


def _without_follow_up(state: JobState, waiting: OwnJob, end: JobState | None) -> JobState:
    """Return the state of a run whose next attempt will not start, because its job ended while pending.

    `fp8launch cancel` ends both jobs, and a supervisor that is killed with them cannot record anything.
    """
    job, run = waiting
    known = attempts_of(run)
    if known.finished or known.stopped or job == newest_job(run) or run.manifest().get("cancelled"):
        return state
    words = "is no longer known to Slurm" if end is None else f"is {end}"
    return JobState("interrupted", f"job {job}, which was to continue the run, {words}", state.exit_code, state.source)
