"""A dataset built by Slurm: an array over its shards, then a job that merges them."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8launch.cluster.profile import Cluster
from fp8launch.data.build import missing
from fp8launch.data.files import read_json, write_json
from fp8launch.data.plan import BuildPlan
from fp8launch.job.batch_script import AUTHOR, sbatch_lines
from fp8launch.job.build_job import own_options, site_options
from fp8launch.job.shell_quoting import quote
from fp8launch.rundir.atomic_io import uninterrupted, write_atomically
from fp8launch.schedulers.base import Scheduler

# Under which key the jobs of a build were submitted.
RECORD = "array.json"


@dataclass(frozen=True)
class DataJobs:
    """The jobs of a build. `array` is None where no shard was missing, `merge` where none has been submitted."""

    array: str | None
    merge: str | None
    submitted: bool

    @property
    def ids(self) -> list[str]:
        return [each for each in (self.array, self.merge) if each is not None]


def submit_build(
    plan: BuildPlan,
    scheduler: Scheduler,
    cluster: Cluster,
    limit: str,
    most_tasks: int,
    cpus: int | None,
    arguments: Sequence[str],
) -> DataJobs:
    """Submit the array and the merge, except those that the queue still has from the same command.

    Each task has `cpus`, and `arguments` are options of `data build-part`. The caller holds the folder. Raises
    UserError where Slurm refuses or does not answer.
    """
    known = known_jobs(plan, scheduler)
    if known is not None and known.merge is not None:
        return known
    begin = [sys.executable, "-m", "fp8launch", "data", "build-part", str(plan.folder), *arguments]
    with uninterrupted():
        # Cut off after the array: its tasks are at work, and only the merge is missing.
        key, array = _key(plan), None
        if known is not None:
            array = known.array
        if array is None:
            key = f"data-{secrets.token_hex(6)}"
            write_json(plan.folder / RECORD, {"key": key})
            array = _submit_array(plan, scheduler, cluster, limit, most_tasks, cpus, begin, key)
        waits = []
        if array:
            waits = [f"--dependency=afterok:{array}", "--kill-on-invalid-dep=yes"]
        options = {**_options(plan, cluster, limit), "output": _log(plan, "%j")}
        script = plan.folder / "array.merge.sbatch"
        write_atomically(script, _script(plan, "merges a dataset", options, cluster, f"{shlex.join(begin)} --merge"))
        merge = scheduler.submit_script(script, f"{key}.merge", waits, comment=options.get("comment"))
        return DataJobs(array, merge, submitted=True)


def _submit_array(
    plan: BuildPlan,
    scheduler: Scheduler,
    cluster: Cluster,
    limit: str,
    most_tasks: int,
    cpus: int | None,
    begin: Sequence[str],
    key: str,
) -> str | None:
    """Submit tasks for the shards that are missing; None where none is."""
    shards = missing(plan)
    if not shards:
        return None
    tasks = min(len(shards), most_tasks, scheduler.array_limit())
    options = {**_options(plan, cluster, limit), "array": f"0-{tasks - 1}", "output": _log(plan, "%A_%a")}
    if cpus:
        options["cpus-per-task"] = str(cpus)
    script = plan.folder / "array.sbatch"
    part = f'{shlex.join(begin)} --task "$SLURM_ARRAY_TASK_ID" --of {tasks}'
    write_atomically(script, _script(plan, "shards of a dataset", options, cluster, part))
    return scheduler.submit_script(script, f"{key}.array", comment=options.get("comment"))


def known_jobs(plan: BuildPlan, scheduler: Scheduler) -> DataJobs | None:
    """Return the jobs of an earlier command that have not all ended; None where there are none.

    The key finds a submission that was cut off: `merge` is None where only the array was submitted.
    """
    key = _key(plan)
    if key is None:
        return None
    found = scheduler.find([f"{key}.array", f"{key}.merge"])
    jobs = DataJobs(found.get(f"{key}.array"), found.get(f"{key}.merge"), submitted=False)
    if not jobs.ids or not scheduler.waiting_or_running(jobs.ids):
        return None
    return jobs


def _key(plan: BuildPlan) -> str | None:
    content = read_json(plan.folder / RECORD)
    if not content:
        return None
    key: str = content["key"]
    return key


def _log(plan: BuildPlan, job: str) -> str:
    return str(plan.folder / f"slurm-{job}.out")


def _options(plan: BuildPlan, cluster: Cluster, limit: str) -> dict[str, str | None]:
    options: dict[str, str | None] = {
        "job-name": f"data-{Path(plan.prefix).name}"[:60],
        "nodes": "1",
        "ntasks-per-node": "1",
        "time": limit,
    }
    return options | site_options(cluster) | own_options(cluster)


def _script(plan: BuildPlan, what: str, options: dict[str, str | None], cluster: Cluster, command: str) -> str:
    lines = ["#!/bin/bash", f"# {what}: {plan.prefix!r}. {AUTHOR}"]
    lines += [*sbatch_lines(options.items()), "", "set -euo pipefail"]
    if cluster.setup:
        lines += ["set +eu", *cluster.setup, "set -eu"]
    # Python's -m imports from its working folder first: there, only files of this build may lie.
    lines.append(f"cd {quote(str(plan.folder))}")
    # Not `export`: bash evaluates what is assigned to some of its own variables.
    environment = [quote(f"{name}={value}") for name, value in cluster.env.items()]
    if environment:
        command = " ".join(["env", *environment, command])
    return "\n".join([*lines, f"exec {command}", ""])
