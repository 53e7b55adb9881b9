"""Slurm's commands, read as text: the fields used here are the same from 22.05 to 25.11, its JSON is not."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8launch.backends.base import FINAL, JobState, Status
from fp8launch.job.job import Job
from fp8launch.job.plan import submission_comment, submission_key
from fp8launch.problems import error
from fp8launch.runs.attempts import attempts_of, forbid_more
from fp8launch.runs.folder import RunFolder
from fp8launch.runs.store import job_ids

# A busy controller may take this long to answer.
SBATCH_SECONDS = 120.0

# A job submitted from inside another job, or from a rank, must not inherit its size, binding and rendezvous.
_FOREIGN = re.compile(r"(SLURM|SLURMD|SBATCH|SALLOC|SRUN|PMI|PMIX|OMPI|TORCHELASTIC|SUBMITIT)(_.*)?")
_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
# Which cluster to talk to is the user's choice, not a leftover of a job.
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"}

_STATUS: dict[str, Status] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "pending",
    "RUNNING": "running",
    "COMPLETING": "running",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "RESIZING": "running",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "LAUNCH_FAILED": "failed",
    "BOOT_FAIL": "node_fail",
    "NODE_FAIL": "node_fail",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "out_of_memory",
}


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for submitting: everything but what belongs to a surrounding job."""
    source = os.environ if environment is None else environment
    return {k: v for k, v in source.items() if k in _KEPT or not (_FOREIGN.fullmatch(k) or k in _RANK)}


def call(*command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command in a clean environment; a controller that does not answer shows as exit status 124."""
    env = clean_environment()
    submits = command[0] == "sbatch"
    if not submits:  # an sbatch's environment becomes the job's
        env |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            timeout=timeout,
            check=False,
            # What is being submitted goes on when somebody presses Ctrl-C, and holds the run until it is done.
            start_new_session=submits,
            close_fds=not submits,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} did not answer within {timeout:.0f} s")
    except OSError as exc:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {exc.strerror}")


def available() -> bool:
    """A Slurm controller answers here."""
    stated = os.environ.get("SLURM_CONF")
    if stated and not Path(stated).is_file():
        return False  # Slurm's commands would look for a cluster in the DNS for a minute
    return call("sbatch", "--version").returncode == 0 and call("scontrol", "ping", timeout=10).returncode == 0


def version() -> str | None:
    """Slurm's version as sbatch prints it, None without Slurm."""
    shown = call("sbatch", "--version")
    return shown.stdout.split()[-1] if shown.returncode == 0 and shown.stdout else None


def refused(message: str, script: Path) -> Exception:
    """sbatch's own words as an error that says what to change."""
    words = " ".join(message.replace("sbatch: error:", "").split()) or "sbatch gave no reason"
    low = words.lower()
    advice = {
        "account": "set `account:` in the cluster profile; `sacctmgr show assoc user=$USER` lists yours",
        "partition": "set `partition:` in the cluster profile; `sinfo -s` lists those there are",
        "qos": "set `qos:` in the cluster profile",
        "time limit": "lower resources.time, or choose another partition",
        "node configuration": "lower resources.nodes or gpus_per_node, or choose another partition",
        "unrecognized option": "this cluster lacks the pyxis plugin: set `runtime:` in the cluster profile",
        "contact slurm controller": "the controller does not answer: the run folder is kept; try again later",
    }
    fix = next((text for key, text in advice.items() if key in low), None)
    return error("sbatch-refused", f"Slurm did not take the job: {words}", str(script), fix, exit_code=3)


def states(runs: Sequence[RunFolder]) -> list[JobState]:
    """The newest job of each run, from squeue, then sacct, then the run folder itself.

    squeue knows what lives; sacct what ended, where a site has it; the exit status that the batch script left tells the
    end even where sacct is off or the controller is silent.
    """
    newest = [ids[-1] if (ids := job_ids(run)) else "" for run in runs]
    following = [attempts_of(run).waiting or "" for run in runs]
    owners = {job: run for jobs in (newest, following) for job, run in zip(jobs, runs, strict=True) if job}
    live, trouble = _squeue(owners)
    # squeue remembers a job for some minutes after its end, without its exit code.
    ended = _sacct({job: run for job, run in owners.items() if job not in live or live[job].final})
    states = [_state(run, job, live, ended, trouble) for run, job in zip(runs, newest, strict=True)]
    # While another attempt waits for its turn the run is not over, however the newest one ended.
    return [
        live[job] if state.final and job in live and not live[job].final else state
        for state, job in zip(states, following, strict=True)
    ]


def key_of(job: Job, run: RunFolder) -> str:
    """By what a submission of this job is found again: the key in its comment, the run's name where it has none."""
    return submission_key(dict(job.slurm).get("comment")) or run.run_id


def find_jobs(keys: Sequence[str]) -> dict[str, str]:
    """The jobs that Slurm holds for submissions by key: key to job id, an array's own id for an array.

    Raises UserError (exit code 3) when Slurm does not answer: then nobody knows.
    """
    shown = call("squeue", "-h", "-t", "all", "-o", "%F|%k", "-u", str(os.getuid()))
    if shown.returncode:
        raise error(
            "slurm-silent",
            f"cannot tell what was submitted before: {' '.join(shown.stderr.split())[:200]}",
            fix="run the same command again when Slurm answers; nothing is submitted twice",
            exit_code=3,
        )
    wanted = {submission_comment(key): key for key in keys}
    # Jobs that ended a while ago are in the accounting only, and there only where the site stores comments.
    told = call("sacct", "-X", "-n", "-P", "-S", "now-14days", "-o", "JobID,Comment") if keys else None
    lines = [*(told.stdout.splitlines() if told and told.returncode == 0 else []), *shown.stdout.splitlines()]
    found = {}
    for line in lines:
        job, _, text = line.partition("|")
        if text in wanted:
            found[wanted[text]] = job.partition("_")[0]
    return found


def array_limit() -> int:
    """How many tasks an array may have here: MaxArraySize, 1 when the controller does not say."""
    shown = call("scontrol", "show", "config")
    match = re.search(r"^MaxArraySize\s*=\s*(\d{1,18})\b", shown.stdout, re.M)
    return max(1, int(match[1])) if match else 1


def sbatch(script: Path, key: str, *options: str) -> str:
    """Submit a script that carries `key`, with options that win over its own; return the job id.

    An sbatch that gives up waiting may have submitted all the same: then the job is looked for by its key.
    """
    words = ["--parsable", f"--comment={submission_comment(key)}", *options, str(script)]
    done = call("sbatch", *words, timeout=SBATCH_SECONDS)
    # --parsable prints "id" or "id;cluster".
    match = re.match(r"(\d+)", done.stdout.strip())
    if done.returncode == 0 and match:
        return match[1]
    if done.returncode == 124 or "timed out" in done.stderr.lower():
        found = find_jobs([key])
        if key in found:
            return found[key]
    raise refused(done.stderr, script)


def cancel_run(run: RunFolder) -> None:
    """End every job of a run, and whatever would follow them."""
    cancel_runs([run])


def cancel_runs(runs: Sequence[RunFolder]) -> None:
    """End every job of these runs, and whatever would follow them; never a job that only has the number of one."""
    owners: dict[str, RunFolder] = {}
    for run in runs:
        forbid_more(run)
        waiting = attempts_of(run).waiting
        owners |= dict.fromkeys([*job_ids(run), *([waiting] if waiting else [])], run)
    if not owners:
        return
    rows, trouble = _queue(list(owners.values()))
    if trouble:
        fix = "try again when Slurm answers"
        raise error("slurm-silent", f"whose jobs {_listed(owners)} are cannot be told: {trouble}", None, fix, 3)
    alive = {row.job: row for row in rows if _status(row.word) not in FINAL}
    ours = {job for job, run in owners.items() if job in alive and _is_of(alive[job], run)}
    # An array of which nothing but our own tasks is left is ended whole: one word for a thousand of them.
    arrays = {job.partition("_")[0] for job in ours if "_" in job}
    whole = {a for a in arrays if all(job in ours for job in alive if job.partition("_")[0] == a)}
    cancel(sorted(whole | {job for job in ours if job.partition("_")[0] not in whole}, key=_order))


def _order(job: str) -> tuple[int, ...]:
    return tuple(int(part) for part in job.split("_"))


def _listed(jobs: Iterable[str]) -> str:
    found = list(jobs)
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def cancel(ids: Sequence[str]) -> None:
    """scancel, quiet about jobs that have ended."""
    if not ids:
        return
    done = call("scancel", *ids)
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise error("scancel-failed", f"Slurm did not cancel {', '.join(ids)}: {done.stderr.strip()}", exit_code=3)


def _state(
    run: RunFolder, job: str, live: Mapping[str, JobState], ended: Mapping[str, JobState], trouble: str
) -> JobState:
    if not job:
        return JobState("unknown", "was never submitted", source="run folder")
    if job in live and not live[job].final:
        return live[job]
    attempts = [a for a in run.attempts() if a.job_id == job]
    left = attempts[-1].exit_status if attempts else None
    if job in ended and (ended[job].final or left is None):
        return ended[job]
    if job in live:
        return replace(live[job], exit_code=left)
    if left is not None:
        status: Status = "completed" if left == 0 else "failed"
        return JobState(status, f"exit status {left}", left, "run folder")
    return JobState("unknown", trouble or "Slurm no longer knows the job, and it left no exit status", source="squeue")


@dataclass(frozen=True)
class _Row:
    """A job as squeue or sacct tells of it. `name` and `comment` are empty where they are not told."""

    job: str
    word: str
    reason: str = ""
    name: str = ""
    comment: str = ""
    exit_code: int | None = None


def _is_of(row: _Row, run: RunFolder) -> bool:
    """The job is one of this run's, and not another that got its number since (numbers begin anew with a database)."""
    manifest = run.manifest()
    if (key := submission_key(row.comment)) is not None:
        study = (manifest.get("study") or {}).get("name")
        serial = r"\.[a-z]?[0-9]+(-[0-9a-f]+)?"
        own = re.fullmatch(rf"{re.escape(run.run_id)}({serial})?", key)
        return bool(own or (study and re.fullmatch(rf"{re.escape(str(study))}{serial}", key)))
    # Some sites keep no comments, or write their own.
    options = manifest.get("slurm")
    names = (manifest.get("name"), options.get("job-name") if isinstance(options, dict) else None)
    known = [name for name in names if name]
    return not row.name or not known or row.name in known


def _users(runs: Iterable[RunFolder]) -> str:
    """Whose jobs these runs can have: those who made the folders."""
    owners = {os.getuid()}
    for run in runs:
        with contextlib.suppress(OSError):
            owners.add(run.path.stat().st_uid)
    return ",".join(map(str, sorted(owners)))


def _queue(runs: Sequence[RunFolder]) -> tuple[list[_Row], str]:
    # All of a user's jobs: with -j, one id that Slurm has forgotten makes 22.05 refuse the whole question.
    # -r shows each task of an array that waits.
    shown = call("squeue", "-r", "-h", "-t", "all", "-o", "%i|%T|%r|%j|%k", "-u", _users(runs))
    if shown.returncode:
        return [], f"squeue: {' '.join(shown.stderr.split())[:200]}"
    cells = ([*line.split("|", 4), "", "", "", ""][:5] for line in shown.stdout.splitlines())
    return [_Row(job, word, reason, name, comment) for job, word, reason, name, comment in cells if job], ""


def _squeue(owners: Mapping[str, RunFolder]) -> tuple[dict[str, JobState], str]:
    if not owners:
        return {}, ""
    rows, trouble = _queue(list(owners.values()))
    return {
        row.job: JobState(_status(row.word), _detail(row.word, row.reason), None, "squeue")
        for row in rows
        if row.job in owners and _is_of(row, owners[row.job])
    }, trouble


def _sacct(owners: Mapping[str, RunFolder]) -> dict[str, JobState]:
    if not owners:
        return {}
    # -X the job itself, -D every attempt of a requeued one (the last row is the newest), -P uncut words.
    fields = "JobID,State,ExitCode,Reason,JobName,Comment"
    users, jobs = _users(owners.values()), ",".join(owners)
    shown = call("sacct", "-X", "-n", "-P", "-D", "-u", users, "-o", fields, "-j", jobs)
    found = {}
    for line in shown.stdout.splitlines() if shown.returncode == 0 else []:
        job, word, code, reason, name, comment = [*line.split("|", 5), "", "", "", "", ""][:6]
        row = _Row(job, word, reason, name, comment, _exit_code(code))
        if job in owners and _is_of(row, owners[job]):
            found[job] = JobState(_status(word), _detail(word, reason), row.exit_code, "sacct")
    return found


def _exit_code(text: str) -> int | None:
    """Slurm's status:signal as a shell would show it."""
    match = re.fullmatch(r"([0-9]{1,6}):?([0-9]{0,6})", text)
    if match is None:
        return None
    status, signal = int(match[1]), int(match[2] or 0)
    return 128 + signal if status == 0 and signal else status


def _status(word: str) -> Status:
    # "CANCELLED by 1000": the first word counts. A word that no version above had is a job that has not ended.
    return _STATUS.get(word.split()[0].rstrip("+") if word.strip() else "", "unknown")


def _detail(word: str, reason: str) -> str:
    return word if reason in ("", "None") else f"{word}: {reason}"
