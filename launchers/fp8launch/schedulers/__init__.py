"""Schedulers by name. Each implementation is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Severity, did_you_mean, error
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Scheduler

# Name to the module and the class that implement it.
_BUILT_IN = {
    "sbatch": ("fp8launch.schedulers.slurm.sbatch", "SbatchScheduler"),
    "submitit": ("fp8launch.schedulers.slurm.submitit", "SubmititScheduler"),
    "nemo-run": ("fp8launch.schedulers.slurm.nemo_run", "NemoRunScheduler"),
    "local": ("fp8launch.schedulers.local", "LocalScheduler"),
}
_registered: dict[str, Callable[[], Scheduler]] = {}

# Training must not run on a login node, so a command that runs there submits to Slurm or fails.
CLUSTER_DEFAULT = "sbatch"


def names() -> tuple[str, ...]:
    """Return the names that `--backend` takes."""
    return (*_BUILT_IN, *_registered)


def register(name: str, factory: Callable[[], Scheduler]) -> None:
    """Add a scheduler under a name of its own."""
    _registered[name] = factory


def by_name(name: str) -> Scheduler:
    """Return the scheduler of that name. Raises UserError for an unknown one."""
    if name in _registered:
        return _registered[name]()
    if name not in _BUILT_IN:
        fix = did_you_mean(name, names(), f"use one of {', '.join(names())}")
        raise error("unknown-backend", f"'{name}' is not a backend", "--backend", fix)
    module, class_name = _BUILT_IN[name]
    found: Scheduler = getattr(importlib.import_module(module), class_name)()
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
