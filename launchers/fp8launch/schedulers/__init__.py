"""Look up schedulers by name. Implementations are imported on first use."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from fp8launch import plugin_registry
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import Severity, did_you_mean, error
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Scheduler

# Training must not run on a login node, so commands there submit to the cluster or fail.
CLUSTER_DEFAULT = "sbatch"


def names() -> tuple[str, ...]:
    """Return the names that `--backend` accepts."""
    return tuple(plugin_registry.offered("schedulers"))


def by_name(name: str) -> Scheduler:
    """Return the scheduler with this name. Raises UserError if it is unknown or its plugin is broken."""
    offered = plugin_registry.offered("schedulers")
    if name not in offered:
        if absent := plugin_registry.absent_error("schedulers", name, f"the backend '{name}'", "--backend"):
            raise absent
        fix = did_you_mean(name, offered, f"use one of {', '.join(offered)}")
        raise error("unknown-backend", f"'{name}' is not a backend", "--backend", fix)
    found: Scheduler = plugin_registry.load(offered[name])()
    return found


def of_run(run: RunFolder) -> Scheduler:
    """Return the scheduler that a run was submitted to."""
    return by_name(str(run.manifest().get("backend")))


def cluster() -> Scheduler:
    """Return the cluster's scheduler, no matter how jobs are submitted to it."""
    return by_name(CLUSTER_DEFAULT)


def problem_codes() -> dict[str, Severity]:
    """Return the codes of problems that schedulers report, with their severities."""
    codes: dict[str, Severity] = {}
    for _, make in plugin_registry.loaded("schedulers"):
        codes |= make().problem_codes()
    return codes


def default(profile: Cluster) -> Scheduler:
    """Return the cluster's scheduler if this machine or the profile belongs to a cluster, else the local one.

    It does not matter whether the cluster answers: a controller that is down is no reason to train on a login node.
    """
    expected = cluster()
    return expected if expected.is_expected(profile) else by_name("local")


def probe_runtime(profile: Cluster, environment: Mapping[str, str]) -> Runtime:
    """Return the runtime set in the profile, else the first one found here. Raises UserError (exit code 3)."""
    if profile.runtime is not None:
        return profile.runtime
    for runtime, _ in cluster().container_runtimes(environment):
        return runtime
    if shutil.which("apptainer") or shutil.which("singularity"):
        return "apptainer"
    if shutil.which("ch-run"):
        return "charliecloud"
    raise error(
        "no-container-runtime",
        "the recipe uses a container image, but this machine has neither pyxis nor Apptainer nor Charliecloud",
        "container.image",
        "set `runtime:` in the cluster profile, or run without an image: --set container.image=null",
        exit_code=3,
    )
