"""The output of `render`: a recipe's job as the cluster would receive it, without submitting it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fp8launch import schedulers
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.job.build_job import plan
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared, engine_record, phase_entry
from fp8launch.rundir.registry import run_root


def rendered_job(prepared: Prepared, cluster: Cluster, runtime: Runtime | None, portable: bool) -> Job:
    """Return the job as it would be on the cluster. Runtime and files of the cluster need not exist on this machine."""
    folder = None if portable else run_root(cluster, None) / f"{prepared.loaded.recipe.name}-RUN"
    return plan(prepared, cluster, folder, runtime=runtime or cluster.runtime or "pyxis", check_paths=False)


def rendered_json(prepared: Prepared, job: Job) -> dict[str, Any]:
    """Return everything about a recipe and its job, including the scheduler options in order."""
    request = schedulers.cluster().request(job)
    mpi = job.resources.options.get("mpi")
    return {
        "recipe": prepared.loaded.tree.plain(),
        "files": list(map(str, prepared.loaded.files)),
        "engine": engine_record(prepared, job),
        "megatron": {"version": prepared.args.version, "argv": list(prepared.args.argv)},
        "arguments": dict(prepared.args.attributes),
        "phases": list(map(phase_entry, prepared.phases)),
        "layout": asdict(prepared.layout),
        "job": {**job.as_json(), "slurm": list(map(list, request.items())), "mpi": mpi},
    }
