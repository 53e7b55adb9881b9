"""Jobs as squeue and sacct list them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8launch.job.job_comment import key_in, key_in_command
from fp8launch.rundir.run_dir import STUDY, RunFolder
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.untyped import as_mapping

# More tasks than any site's MaxArraySize allows.
_MOST_TASKS = 4_000_001


@dataclass(frozen=True)
class JobRow:
    """A job as squeue or sacct shows it. Texts are empty where they are not shown.

    `command` is the script that was submitted, `submitted_by` the whole command line that submitted it.
    """

    job: str
    word: str
    reason: str = ""
    name: str = ""
    comment: str = ""
    exit_code: int | None = None
    command: str = ""
    submitted_by: str = ""


# Slurm gives the number of an old job to a new one once it has used all up: two runs can have jobs of one number.
OwnJob = tuple[str, RunFolder]


@dataclass(frozen=True)
class Answer:
    """The jobs that a command listed, by id and run; `trouble` says why it listed none, empty where it answered."""

    rows: Mapping[OwnJob, JobRow] = field(default_factory=dict)
    trouble: str = ""


def ask_squeue(jobs: Collection[OwnJob]) -> Answer:
    """Return those of these jobs that squeue lists."""
    if not jobs:
        return Answer()
    rows, trouble = queue_rows(run for _, run in jobs)
    return Answer(_rows_of(jobs, rows), trouble)


def _rows_of(jobs: Collection[OwnJob], rows: Iterable[JobRow]) -> dict[OwnJob, JobRow]:
    """Return the newest row of each job; those that name its run are preferred to those that only could be its own."""
    by_number: dict[str, list[JobRow]] = {}
    for row in rows:
        by_number.setdefault(row.job, []).append(row)
    found = {}
    for job, run in jobs:
        own = [row for row in by_number.get(job, ()) if is_job_of(row, run)]
        named = [row for row in own if _names(row, run)]
        if own:
            found[job, run] = (named or own)[-1]
    return found


def _names(row: JobRow, run: RunFolder) -> bool:
    """Return whether a row has the run's key or its folder, which no other run has."""
    return _key(row) is not None or f"{run.path}/" in row.submitted_by


def _key(row: JobRow) -> str | None:
    """Return the key of a job's submission: most accountings keep no comments, but the command line of sbatch."""
    key = key_in(row.comment)
    if key is None:
        return key_in_command(row.submitted_by)
    return key


def queue_rows(runs: Iterable[RunFolder]) -> tuple[list[JobRow], str]:
    """Return the jobs in squeue of those who made these runs, and why there are none where squeue does not answer."""
    # All of a user's jobs: with -j, one id that Slurm has forgotten makes 22.05 refuse the whole question.
    # -r shows each task of an array that waits.
    shown = slurm_cli.call("squeue", "-r", "-h", "-t", "all", "-o", "%i|%T|%r|%j|%k|%o", "-u", _users(runs))
    if shown.returncode:
        return [], slurm_cli.trouble(shown)
    rows = []
    for line in shown.stdout.splitlines():
        job, word, reason, name, comment, command = [*line.split("|", 5), "", "", "", "", ""][:6]
        if job:
            rows.append(JobRow(job, word, reason, name, comment, command=command))
    return rows, ""


def ask_sacct(jobs: Collection[OwnJob], gone: Collection[OwnJob]) -> Answer:
    """Return those of these jobs that the accounting knows; none if accounting is disabled.

    `gone` are the jobs that squeue does not know. Of the others the accounting may have no record yet.
    """
    if not jobs:
        return Answer()
    # -X the job itself, -D every attempt of a requeued one (the last row is the newest), -P uncut words. An array is
    # asked for whole: its tasks that were cancelled while they waited are in one row, which no task's number finds.
    fields = "JobID,State,ExitCode,Reason,JobName,Comment,SubmitLine"
    asked = dict(jobs)
    numbers = ",".join(dict.fromkeys(map(number_of, asked)))
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
    # A task that is cancelled while it waits is removed from its array without a record.
    recorded = {row.job for row in rows}
    for job, run in gone:
        array = arrays.get(number_of(job))
        began = any(attempt.job_id == job for attempt in run.attempts())
        if array is not None and job not in recorded and not began:
            rows.append(replace(array, job=job, word="CANCELLED while it waited", reason="", exit_code=None))
    return Answer(_rows_of(jobs, rows))


def number_of(job: str) -> str:
    """Return the number of a job; of a task that of its array."""
    return job.partition("_")[0]


def tasks_of(listed: str) -> Iterator[str]:
    """Yield the jobs that an id such as `12`, `12_3` or `12_[0-2,7%4]` lists."""
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


def is_job_of(row: JobRow, run: RunFolder) -> bool:
    """Return whether a job is this run's, and not another that has its number now (a new database counts from 1)."""
    # What a manifest says may be somebody else's, in an archive that was unpacked: where the folder is, is not.
    places, study = [run.path], None
    if (run.path.parent / STUDY).is_file():
        places, study = [run.path, run.path.parent], run.path.parent.name
    if (key := _key(row)) is not None:
        serial = r"\.[a-z]?[0-9]+(-[0-9a-f]+)?"
        own = re.fullmatch(rf"{re.escape(run.run_id)}({serial})?", key)
        return bool(own or (study and re.fullmatch(rf"{re.escape(study)}{serial}", key)))
    # Some sites keep no comments, or write their own.
    manifest = run.manifest()
    experiment = as_mapping(manifest.get("nemo_run")).get("experiment")
    by_nemo_run = experiment and str(experiment) in row.command
    # The path of the script, and its arguments.
    if row.command and not by_nemo_run and not any(_is_below(Path(row.command), place) for place in places):
        return False
    names = (manifest.get("name"), as_mapping(manifest.get("slurm")).get("job-name"))
    known = list(filter(None, names))
    return not row.name or not known or row.name in known


def _is_below(script: Path, folder: Path) -> bool:
    return script.resolve().is_relative_to(folder.resolve())


def _users(runs: Iterable[RunFolder]) -> str:
    """Return the ids of the users whose jobs these runs can have: those who made the folders."""
    owners = {os.getuid()}
    for run in runs:
        with contextlib.suppress(OSError):
            owners.add(run.path.stat().st_uid)
    return ",".join(map(str, sorted(owners)))


def exit_code(text: str) -> int | None:
    """Return Slurm's status:signal as a shell would show it."""
    match = re.fullmatch(r"([0-9]{1,6}):?([0-9]{0,6})", text)
    if match is None:
        return None
    status, signal = int(match[1]), int(match[2] or 0)
    if status == 0 and signal:
        return 128 + signal
    return status
