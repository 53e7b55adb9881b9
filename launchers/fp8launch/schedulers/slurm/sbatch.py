"""Submission by sbatch: single runs, job arrays, and refusals with a hint on what to change."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from fp8launch.diagnostics import UserError, advice_on, error
from fp8launch.injob.slurm.commands import will_pass
from fp8launch.job.job import Job
from fp8launch.rundir.run_dir import RunFolder, write_atomically
from fp8launch.schedulers.base import SUBMIT_LIMIT
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.schedulers.slurm.job_comment import job_comment
from fp8launch.schedulers.slurm.options import Options, sbatch_options, site_comment
from fp8launch.schedulers.slurm.slurm_jobs import find_jobs

# The options that differ from run to run; all others must be the same for the tasks of an array.
_OF_ONE_TASK = ("job-name", "output", "comment")
Group = Sequence[tuple[RunFolder, Job]]
# A busy controller may take this long to answer.
SBATCH_SECONDS = 120.0
# A controller that has just started refuses jobs until its nodes have reported back: how often to retry, and when.
NODE_TRIES = 6
NODE_SECONDS = 5.0

_OVER_LIMIT = "submit limit"
# A word of sbatch's message, and what to change.
_ADVICE = {
    # Slurm's message for any limit of an account or QOS: "Job violates accounting/QOS policy (job submit limit, ...)".
    _OVER_LIMIT: "you have as many jobs as the account or QOS allows, or this one is too large or too long: repeat the "
    "command when some have ended (it submits only what is missing), or lower resources; `sacctmgr show assoc "
    "user=$USER format=account,qos,maxsubmit,maxjobs,maxwall` and `sacctmgr show qos` show the limits",
    "account": "set `account:` in the cluster profile; `sacctmgr show assoc user=$USER` lists yours",
    "partition": "set `partition:` in the cluster profile; `sinfo -s` lists the partitions",
    "qos": "set `qos:` in the cluster profile",
    "time limit": "lower resources.time, or choose another partition",
    "node configuration": "lower resources.nodes or gpus_per_node, or choose another partition",
    "unrecognized option": "this cluster lacks the pyxis plugin: set `runtime:` in the cluster profile",
}


def submit(script: Path, key: str, *options: str, comment: str = "") -> str:
    """Submit a script under `key`, with options that override the script's; return the job id.

    `comment` is the cluster profile's own comment, which follows the key.

    An sbatch that gives up waiting may have submitted the job nevertheless: then it is looked up by its key.
    """
    # The script ignores this argument, but Slurm shows it with the command, even if the site replaces comments.
    words = ["--parsable", f"--comment={job_comment(key, comment)}", *options, str(script), key]
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
    """Return sbatch's message as an error that says what to change."""
    words = " ".join(message.replace("sbatch: error:", "").split()) or "sbatch gave no reason"
    fix = advice_on(words, _ADVICE)
    if will_pass(words):
        fix = "Slurm accepts no jobs now; the run folder is kept, so repeat the command later to complete it"
    if slurm_cli.waits_for_nodes(words):
        fix = "the controller has just started and waits for its nodes; repeat the command in a minute"
    code = SUBMIT_LIMIT if _OVER_LIMIT in words else "sbatch-refused"
    return error(code, f"Slurm did not accept the job: {words}", str(script), fix, exit_code=3)


def groups_alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Divide jobs, by their positions, into arrays of jobs with equal requests, as large as the site allows."""
    alike: dict[tuple[tuple[str, str | None], ...], list[int]] = {}
    for position, job in enumerate(jobs):
        alike.setdefault(tuple(_common_options(job).items()), []).append(position)
    if len(alike) == len(jobs):
        return list(alike.values())
    limit = slurm_cli.array_limit()
    return [
        positions[start : start + limit] for positions in alike.values() for start in range(0, len(positions), limit)
    ]


def array_options(group: Group, key: str, folder: Path) -> Options:
    """Return sbatch's options for an array of these runs, without the range of its tasks."""
    first = group[0][1]
    return {
        "job-name": first.name,
        **_common_options(first),
        "output": str(folder / "logs" / "slurm-%A_%a.out"),
        "comment": job_comment(key, site_comment(first.resources)),
    }


def write_tasks(group: Group, key: str, folder: Path) -> Path:
    """Write the run folders of an array's tasks, in order, below `folder`; return the file."""
    file = folder / "arrays" / f"{key}.txt"
    write_atomically(file, "".join(f"{run.path}\n" for run, _ in group))
    return file


def _common_options(job: Job) -> Options:
    return {name: value for name, value in sbatch_options(job).items() if name not in _OF_ONE_TASK}
