"""Schedulers by name. Each implementation is imported when it is asked for."""

from __future__ import annotations

from fp8launch import plugin_registry
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Severity, did_you_mean, error
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Scheduler

# Training must not run on a login node, so a command that runs there submits to Slurm or fails.
CLUSTER_DEFAULT = "sbatch"


def names() -> tuple[str, ...]:
    """Return the names that `--backend` takes."""
    return tuple(plugin_registry.offered("schedulers"))


def by_name(name: str) -> Scheduler:
    """Return the scheduler of that name. Raises UserError for an unknown one, or if its plugin is broken."""
    offered = plugin_registry.offered("schedulers")
    if name not in offered:
        fix = did_you_mean(name, offered, f"use one of {', '.join(offered)}")
        raise error("unknown-backend", f"'{name}' is not a backend", "--backend", fix)
    found: Scheduler = plugin_registry.load(offered[name])()
    return found


def of_run(run: RunFolder) -> Scheduler:
    """Return the scheduler that a run was submitted to."""
    return by_name(str(run.manifest().get("backend")))


def cluster() -> Scheduler:
    """Return the scheduler that a cluster has, whichever way jobs are submitted to it."""
    return by_name(CLUSTER_DEFAULT)


def problem_codes() -> dict[str, Severity]:
    """Return the codes of the problems that schedulers report, with their severity."""
    from fp8launch.schedulers.slurm import preflight

    return dict(preflight.CODES)


def default(profile: Cluster) -> Scheduler:
    """Return the cluster's scheduler where this machine or the profile belongs to a cluster, else that of this machine.

    Whether the cluster answers makes no difference: nothing may train on a login node because a controller is down.
    """
    slurm = cluster()
    return slurm if slurm.is_expected(profile) else by_name("local")
