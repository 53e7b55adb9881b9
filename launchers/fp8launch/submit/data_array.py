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
from fp8launch.job.batch_script import AUTHOR
from fp8launch.job.build_job import own_options, site_options
from fp8launch.job.shell_quoting import quote
from fp8launch.rundir.atomic_io import write_atomically
from fp8launch.schedulers.base import Scheduler


@dataclass(frozen=True)
class DataJobs:
    """The jobs of a build; `array` is None where no shard was missing."""

    array: str | None
    merge: str
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
    """Submit the array and the merge; find those that the queue still has from the same command.

    Each task has `cpus`, and `arguments` are options of `data build-part`. Raises UserError where Slurm refuses or does
    not answer.
    """
    record = plan.folder / "array.json"
    known = _known(record, scheduler)
    if known is not None:
        return known
    shards = missing(plan)
    key = f"data-{secrets.token_hex(6)}"
    write_json(record, {"key": key})
    begin = [sys.executable, "-m", "fp8launch", "data", "build-part", str(plan.folder), *arguments]
    array = None
    waits: list[str] = []
    if shards:
        tasks = min(len(shards), most_tasks, scheduler.array_limit())
        options = {**_options(plan, cluster, limit), "array": f"0-{tasks - 1}", "output": _log(plan, "%A_%a")}
        if cpus:
            options["cpus-per-task"] = str(cpus)
        script = plan.folder / "array.sbatch"
        part = f'{shlex.join(begin)} --task "$SLURM_ARRAY_TASK_ID" --of {tasks}'
        write_atomically(script, _script(plan, "shards of a dataset", options, cluster, part))
        array = scheduler.submit_script(script, f"{key}.array", comment=options.get("comment"))
        waits = [f"--dependency=afterok:{array}", "--kill-on-invalid-dep=yes"]
    options = {**_options(plan, cluster, limit), "output": _log(plan, "%j")}
    script = plan.folder / "array.merge.sbatch"
    write_atomically(script, _script(plan, "merges a dataset", options, cluster, f"{shlex.join(begin)} --merge"))
    merge = scheduler.submit_script(script, f"{key}.merge", waits, comment=options.get("comment"))
    write_json(record, {"key": key, "array": array, "merge": merge})
    return DataJobs(array, merge, submitted=True)


def _known(record: Path, scheduler: Scheduler) -> DataJobs | None:
    """Return the jobs of an earlier command whose merge has not ended; the key finds a submission that was cut off."""
    content = read_json(record)
    if not content:
        return None
    key = content["key"]
    found = scheduler.find([f"{key}.array", f"{key}.merge"])
    merge = found.get(f"{key}.merge")
    if merge is None or not scheduler.waiting_or_running([merge]):
        return None
    return DataJobs(found.get(f"{key}.array"), merge, submitted=False)


def _log(plan: BuildPlan, job: str) -> str:
    return str(plan.folder / f"slurm-{job}.out")


def _options(plan: BuildPlan, cluster: Cluster, limit: str) -> dict[str, str | None]:
    options: dict[str, str | None] = {
        "job-name": f"data-{Path(plan.prefix).name}"[:60],
        "nodes": "1",
        "ntasks-per-node": "1",
        "time": limit,
    }
    named = site_options(cluster)
    options |= {name: value for name, value in named.items() if value is not None}
    if cluster.exclusive:
        options["exclusive"] = None
    return options | own_options(cluster)


def _script(plan: BuildPlan, what: str, options: dict[str, str | None], cluster: Cluster, command: str) -> str:
    lines = ["#!/bin/bash", f"# {what}: {plan.prefix!r}. {AUTHOR}"]
    lines += [
        f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(value)}") for name, value in options.items()
    ]
    lines += ["", "set -euo pipefail"]
    if cluster.setup:
        lines += ["set +eu", *cluster.setup, "set -eu"]
    # Python's -m imports from its working folder first: there, only files of this build may lie.
    lines.append(f"cd {quote(str(plan.folder))}")
    # Not `export`: bash evaluates what is assigned to some of its own variables.
    environment = [quote(f"{name}={value}") for name, value in cluster.env.items()]
    start = ["exec env", *environment, command] if environment else ["exec", command]
    return "\n".join([*lines, " ".join(start), ""])
