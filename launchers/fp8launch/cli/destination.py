"""Where a command's jobs go: the cluster profile, the scheduler, and options of Slurm for this one command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from fp8launch import schedulers
from fp8launch.cli.output import cluster_option
from fp8launch.cli.slurm_options import refuse_without_slurm, slurm_options, with_slurm_options
from fp8launch.cluster.profile import Cluster, load_cluster
from fp8launch.diagnostics import error
from fp8launch.schedulers.base import Scheduler


class BackendName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """The name of a scheduler, of those that are there when the command runs."""

    name = "backend"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(schedulers.names())}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in schedulers.names():
            self.fail(f"{value!r} is not one of {', '.join(schedulers.names())}", param, ctx)
        return value


destination_options = (
    cluster_option,
    click.option(
        "--backend",
        "backend_name",
        type=BackendName(),
        help="Scheduler (default: sbatch on a Slurm cluster, else local).",
    ),
    *slurm_options,
    click.option("--run-root", "root", help="Folder for run folders, on a file system that all nodes share."),
)


def destination(
    command: str, cluster: str | None, backend_name: str | None, slurm: Mapping[str, Any]
) -> tuple[Cluster, Scheduler]:
    """The profile with the stated options of Slurm, and the scheduler. Raises UserError where jobs cannot go there."""
    profile = with_slurm_options(load_cluster(cluster), slurm)
    if profile.ssh is not None:
        message = f"jobs for the cluster '{profile.name}' are submitted from its login node"
        raise error("needs-at", message, "--cluster", f"fp8launch --remote {cluster or profile.name} {command} ...")
    scheduler = schedulers.by_name(backend_name) if backend_name else schedulers.default(profile)
    if scheduler.capabilities.on_this_machine:
        refuse_without_slurm(slurm, scheduler.name)
    return profile, scheduler
