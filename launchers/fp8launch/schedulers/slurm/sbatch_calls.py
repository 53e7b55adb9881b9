"""Submitting to Slurm, finding what was submitted, and a refusal in words that say what to change."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fp8launch.diagnostics import UserError, advice_on, error
from fp8launch.injob.supervisor.slurm_cli import will_pass
from fp8launch.job.job import Job
from fp8launch.job.job_comment import find_key, job_comment, text_in
from fp8launch.schedulers.base import SUBMIT_LIMIT
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.schedulers.slurm.job_rows import number_of

# A busy controller may take this long to answer.
SBATCH_SECONDS = 120.0
# A controller that has just started refuses jobs until its nodes have reported back: how often to ask again, and when.
NODE_TRIES = 6
NODE_SECONDS = 5.0

_OVER_LIMIT = "submit limit"
# A word of sbatch's message, and what to change.
_ADVICE = {
    # Slurm's words for all limits of an account or QOS: "Job violates accounting/QOS policy (job submit limit, ...)".
    _OVER_LIMIT: "you have as many jobs as the account or QOS allows, or this one is too large or too long: repeat the "
    "command when some have ended (it submits only what is missing), or lower resources; `sacctmgr show assoc "
    "user=$USER format=account,qos,maxsubmit,maxjobs,maxwall` and `sacctmgr show qos` show the limits",
    "account": "set `account:` in the cluster profile; `sacctmgr show assoc user=$USER` lists yours",
    "partition": "set `partition:` in the cluster profile; `sinfo -s` lists those that exist",
    "qos": "set `qos:` in the cluster profile",
    "time limit": "lower resources.time, or choose another partition",
    "node configuration": "lower resources.nodes or gpus_per_node, or choose another partition",
    "unrecognized option": "this cluster lacks the pyxis plugin: set `runtime:` in the cluster profile",
}


def with_key(job: Job, key: str) -> Job:
    """Return the job with this key in its comment, before what the cluster profile has there."""
    options = dict(job.slurm)
    if "comment" in options:
        options["comment"] = job_comment(key, text_in(options["comment"]))
    return replace(job, slurm=tuple(options.items()))


def sbatch(script: Path, key: str, *options: str, comment: object = None) -> str:
    """Submit a script under `key`, with options that win over its own; return the job id.

    `comment` is the script's own comment, of which the cluster profile's part is kept.

    An sbatch that gives up waiting may have submitted all the same: then the job is looked for by its key.
    """
    # The script ignores this argument, but Slurm shows it with the command, even where the site replaces comments.
    words = ["--parsable", f"--comment={job_comment(key, text_in(comment))}", *options, str(script), key]
    done = slurm_cli.call("sbatch", *words, timeout=SBATCH_SECONDS)
    for _ in range(NODE_TRIES):
        if done.returncode == 0 or not slurm_cli.waits_for_nodes(done.stderr):
            break
        time.sleep(NODE_SECONDS)
        done = slurm_cli.call("sbatch", *words, timeout=SBATCH_SECONDS)
    # --parsable prints "id" or "id;cluster".
    match = re.match(r"(\d+)", done.stdout.strip())
    if done.returncode == 0 and match:
        return match[1]
    if done.returncode == slurm_cli.NO_ANSWER or "timed out" in done.stderr.lower():
        found = find_jobs([key])
        if key in found:
            return found[key]
    raise refusal(done.stderr, script)


def refusal(message: str, script: Path) -> UserError:
    """Return sbatch's own words as an error that says what to change."""
    words = " ".join(message.replace("sbatch: error:", "").split()) or "sbatch gave no reason"
    fix = advice_on(words, _ADVICE)
    if will_pass(words):
        fix = "Slurm accepts no jobs now; the run folder is kept, so repeat the command later to complete it"
    if slurm_cli.waits_for_nodes(words):
        fix = "the controller has just started and waits for its nodes; repeat the command in a minute"
    code = SUBMIT_LIMIT if _OVER_LIMIT in words else "sbatch-refused"
    return error(code, f"Slurm did not accept the job: {words}", str(script), fix, exit_code=3)


def find_jobs(keys: Sequence[str]) -> dict[str, str]:
    """Return the jobs that Slurm has for submissions by key: key to job id, an array's own id for an array.

    Raises UserError (exit code 3) when Slurm does not answer: then nobody knows.
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
    # Jobs that ended a while ago are in the accounting only.
    accounted = slurm_cli.call("sacct", "-X", "-n", "-P", "-S", "now-14days", "-o", "JobID,SubmitLine,Comment")
    lines = shown.stdout.splitlines()
    if accounted.returncode == 0:
        lines = [*accounted.stdout.splitlines(), *lines]
    return _jobs_by_key(lines, keys)


def _jobs_by_key(lines: Iterable[str], keys: Sequence[str]) -> dict[str, str]:
    """Read lines of JOB|COMMAND|COMMENT; of several jobs with one key the last one counts."""
    found = {}
    for line in lines:
        job, _, rest = line.partition("|")
        key = find_key(rest, keys)
        if key is not None:
            found[key] = number_of(job)
    return found
