"""The Slurm cluster of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping

from fp8launch.cluster.profile import Cluster
from fp8launch.plugins.doctor.finding import Finding, State
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.schedulers.slurm.inventory import Partition, Silent, read_site


def describe(cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield Slurm's version, its partitions and whether it keeps accounts."""
    site = read_site(environment.get("SLURM_CONF"))
    if site is None:
        if shutil.which("sbatch"):
            advice = "log in to a machine of the cluster; `--backend local` trains on this machine"
            yield Finding("note", "Slurm", "its commands are installed, but they find no cluster", advice)
        else:
            yield Finding(
                "note", "Slurm", "no sbatch found: runs start on this machine", "log in to a machine of the cluster"
            )
        return
    if isinstance(site, Silent):
        yield Finding("missing", "Slurm", f"no controller answers: {site.words}", "see `scontrol ping`")
        return
    yield Finding("ok", "Slurm", slurm_cli.version() or "of an unknown version")
    yield from map(_partition, site.partitions.values())
    if cluster.partition is None and not site.defaults:
        yield Finding("missing", "default partition", "none", "set `partition:` in the cluster profile")
    yield _accounting()


def _partition(partition: Partition) -> Finding:
    gpus = set()
    for node in partition.nodes:
        for kind, count in node.gpus.items():
            gpus.add(f"{count} x {kind or 'GPU'}")
    size = f"{len(partition.in_service)} of {partition.total_nodes} nodes in service"
    state: State = "ok" if partition.state == "UP" else "note"
    words = partition.state.lower()
    if partition.default:
        words += " (default)"
    has = ", ".join(sorted(gpus)) or "no GPUs known to Slurm"
    return Finding(state, f"partition {partition.name}", f"{words}, {size}, {has}")


def _accounting() -> Finding:
    shown = slurm_cli.call("sacct", "-X", "-n", "-P", "-o", "JobID", "-S", "now", timeout=10)
    if shown.returncode == 0:
        return Finding("ok", "accounting", "sacct answers")
    why = slurm_cli.one_line(shown.stderr, 120) or "sacct not found"
    return Finding("note", "accounting", why, "optional: run folders also record how jobs ended")
