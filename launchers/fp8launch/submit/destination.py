"""Decide where the jobs of a command run: the scheduler, and the cluster profile with the command's options applied."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp8launch import schedulers
from fp8launch.cluster.profile import Cluster, load_cluster
from fp8launch.diagnostics import Problem, error
from fp8launch.recipe.load import Override
from fp8launch.recipe.yaml_source import Node
from fp8launch.rundir.registry import all_runs
from fp8launch.schedulers.base import Scheduler

# sbatch options that recipes set, and how to set them there.
_NAMED = ("nodes", "time", "partition", "account", "qos", "nodelist", "exclude", "reservation", "nice")
_DECIDED_ELSEWHERE = {
    **{name: f"--{name}" for name in _NAMED},
    **dict.fromkeys(("ntasks", "ntasks-per-node", "gpus", "gpus-per-node"), "--set resources.gpus_per_node=N"),
    "cpus-per-task": "--set resources.cpus_per_task=N",
    "job-name": "--set name=NAME",
}


def destination(
    command: str,
    cluster: str | None,
    backend_name: str | None,
    slurm: Mapping[str, Any],
    warn: Callable[[Iterable[Problem]], object],
) -> tuple[Cluster, Scheduler]:
    """Return the profile with the given Slurm options, and the scheduler. Raises UserError if jobs cannot run there.

    `command` is what the user could run on the login node instead. `warn` receives a problem if jobs run on this
    machine because Slurm is installed but has no cluster.
    """
    profile = _with_slurm_options(load_cluster(cluster), slurm)
    if profile.ssh is not None:
        message = f"jobs for the cluster '{profile.name}' are submitted from its login node"
        raise error("needs-at", message, "--cluster", f"fp8launch --remote {cluster or profile.name} {command} ...")
    if backend_name:
        scheduler = schedulers.by_name(backend_name)
    else:
        scheduler = schedulers.default(profile)
        if not profile.name and not _given(slurm) and scheduler.has_no_cluster(os.environ) and not _used_a_cluster():
            message = f"{scheduler.name} is installed but finds no cluster, so jobs run on this machine"
            fix = f"pass `--backend {scheduler.name}` to prevent this, or `--backend local` to silence this warning"
            warn([Problem("warning", "no-cluster", message, fix=fix)])
            scheduler = schedulers.by_name("local")
    if scheduler.capabilities.on_this_machine:
        _refuse_without_slurm(slurm, scheduler.name)
    return profile, scheduler


def time_override(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the recipe override for `--time`, if given."""
    if not stated.get("time"):
        return ()
    limit = stated["time"]
    return (Override(f'resources.time="{limit}"', f"--time {limit}"),)


def _with_slurm_options(profile: Cluster, stated: Mapping[str, Any]) -> Cluster:
    """Override the profile with the Slurm options of one submission. Raises UserError for an invalid value."""
    names = ("partition", "account", "qos", "nodelist", "reservation")
    tree = {name: Node(stated[name], f"--{name}") for name in names if stated.get(name)}
    if stated.get("exclude"):
        # Nodes that the profile excludes are unusable for all runs, so --exclude adds to them.
        nodes = ",".join(filter(None, (profile.exclude, stated["exclude"])))
        tree["exclude"] = Node(nodes, "--exclude")
    options = dict(map(_pair, stated.get("extra", ())))
    if stated.get("nice") is not None:
        options["nice"] = Node(stated["nice"], "--nice")
    if options:
        tree["options"] = Node(options, "--slurm")
    if not tree:
        return profile
    found = Cluster.from_node(Node(tree, "command line"))
    update = {name: getattr(found, name) for name in tree if name != "options"}
    update["options"] = {**profile.options, **found.options}
    origins = {name: f"--{name}" for name in tree if name != "options"}
    origins |= {f"options.{name}": f"--slurm {name}" for name in found.options}
    # Otherwise, an option of the same name in the profile would override the command line.
    for name in update:
        update["options"].pop(name, None)
    return profile.model_copy(update=update).stated_by(origins)


def _used_a_cluster() -> bool:
    """Return whether this user has submitted runs to a cluster. If so, nothing may train on this login node."""
    on_this_machine = {name for name in schedulers.names() if schedulers.by_name(name).capabilities.on_this_machine}
    return any(run.manifest().get("backend") not in on_this_machine and run.is_mine for run in all_runs())


def _given(stated: Mapping[str, Any]) -> list[str]:
    """Return the given options that only Slurm supports."""
    return [
        f"--{name}".replace("--extra", "--slurm")
        for name, value in stated.items()
        if value not in (None, ()) and name != "time"
    ]


def _refuse_without_slurm(stated: Mapping[str, Any], backend: str) -> None:
    """Raise UserError if Slurm options are given but the scheduler does not support them."""
    if given := _given(stated):
        message = f"{', '.join(given)} would have no effect: the {backend} backend starts processes on this machine"
        raise error("no-slurm-options", message, given[0], "remove it, or submit to Slurm")


def _pair(text: str) -> tuple[str, Node]:
    key, sign, value = text.removeprefix("--").partition("=")
    key = key.replace("_", "-")
    if key in _DECIDED_ELSEWHERE:
        fix = f"use {_DECIDED_ELSEWHERE[key]}"
        raise error("bad-slurm-option", f"'{key}' has its own option", f"--slurm {text}", fix)
    if key and sign and not value:
        fix = f"add the value, as in --slurm {key}=VALUE, or write --slurm {key} if the option takes none"
        raise error("bad-slurm-option", f"'{key}' has no value after '='", f"--slurm {text}", fix)
    if not key:
        fix = "write for example --slurm mail-type=FAIL, or --slurm contiguous if the option takes no value"
        raise error("bad-slurm-option", "must look like KEY=VALUE", f"--slurm {text}", fix)
    return key, Node(value if sign else True, f"--slurm {text}")
