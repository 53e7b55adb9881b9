"""Build a dataset on a cluster: a job array builds its shards, and another job merges them."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8launch.cluster.profile import Cluster
from fp8launch.datasets.manifest import read_json
from fp8launch.job.build_job import site_resources
from fp8launch.job.job import Resources
from fp8launch.job.shell_quoting import quote
from fp8launch.plugins.data.build import missing
from fp8launch.plugins.data.files import write_json
from fp8launch.plugins.data.plan import BuildPlan
from fp8launch.plugins.data.slurm_program import TASK, Program, submit_program, waiting_or_running
from fp8launch.rundir.atomic_io import uninterrupted
from fp8launch.schedulers.slurm.slurm_cli import array_limit
from fp8launch.schedulers.slurm.slurm_jobs import find_jobs

# The key with which the jobs of a build were submitted.
RECORD = "array.json"


@dataclass(frozen=True)
class DataJobs:
    """The jobs of a build. `array` is None if no shard was missing, `merge` is None if it was not submitted yet."""

    array: str | None
    merge: str | None
    submitted: bool

    @property
    def ids(self) -> list[str]:
        return [each for each in (self.array, self.merge) if each is not None]


def submit_build(
    plan: BuildPlan,
    known: DataJobs | None,
    cluster: Cluster,
    limit: str,
    most_tasks: int,
    cpus: int | None,
    arguments: Sequence[str],
) -> DataJobs:
    """Submit the array and the merge job, except for `known` ones of an earlier command.

    Each task gets `cpus` CPUs, and `arguments` are options of `data build-part`. The caller holds the folder's lock.
    Raises UserError if Slurm refuses a job or does not answer.
    """
    if known is not None and known.merge is not None:
        return known
    begin = [sys.executable, "-m", "fp8launch", "data", "build-part", str(plan.folder), *arguments]
    with uninterrupted():
        # The submission was interrupted after the array: only the merge job is missing.
        key, array = _key(plan), None
        if known is not None:
            array = known.array
        if array is None:
            key = f"data-{secrets.token_hex(6)}"
            write_json(plan.folder / RECORD, {"key": key})
            array = _submit_array(plan, cluster, limit, most_tasks, cpus, begin, key)
        merging = _program(plan, cluster, "merges a dataset", "array.merge", f"{shlex.join(begin)} --merge", limit)
        merge = submit_program(merging, f"{key}.merge", after=array)
        return DataJobs(array, merge, submitted=True)


def _submit_array(
    plan: BuildPlan,
    cluster: Cluster,
    limit: str,
    most_tasks: int,
    cpus: int | None,
    begin: Sequence[str],
    key: str,
) -> str | None:
    """Submit tasks for the missing shards. Return None if no shard is missing."""
    shards = missing(plan)
    if not shards:
        return None
    tasks = min(len(shards), most_tasks, array_limit())
    part = f'{shlex.join(begin)} --task "{TASK}" --of {tasks}'
    program = _program(plan, cluster, "shards of a dataset", "array", part, limit, tasks, cpus)
    return submit_program(program, f"{key}.array")


def known_jobs(plan: BuildPlan) -> DataJobs | None:
    """Return the jobs of an earlier command if any of them is still queued or running, else None.

    The key also finds an interrupted submission; `merge` is None if only the array was submitted.
    """
    key = _key(plan)
    if key is None:
        return None
    found = find_jobs([f"{key}.array", f"{key}.merge"])
    jobs = DataJobs(found.get(f"{key}.array"), found.get(f"{key}.merge"), submitted=False)
    if not jobs.ids or not waiting_or_running(jobs.ids):
        return None
    return jobs


def _key(plan: BuildPlan) -> str | None:
    content = read_json(plan.folder / RECORD)
    if not content:
        return None
    key: str = content["key"]
    return key


def _program(
    plan: BuildPlan,
    cluster: Cluster,
    about: str,
    file: str,
    command: str,
    limit: str,
    tasks: int | None = None,
    cpus: int | None = None,
) -> Program:
    lines = []
    if cluster.setup:
        lines += ["set +eu", *cluster.setup, "set -eu"]
    # `python -m` imports from the working directory first, and this one holds only the build's files.
    lines.append(f"cd {quote(str(plan.folder))}")
    # Not `export`: bash evaluates values that are assigned to some of its own variables.
    environment = [quote(f"{name}={value}") for name, value in cluster.env.items()]
    if environment:
        command = " ".join(["env", *environment, command])
    lines.append(f"exec {command}")
    name = f"data-{Path(plan.prefix).name}"[:60]
    need = site_resources(cluster, Resources(time_limit=limit, cpus_per_task=cpus))
    return Program(name, f"{about}: {plan.prefix!r}", plan.folder, file, tuple(lines), need, tasks)
