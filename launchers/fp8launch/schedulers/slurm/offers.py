"""What this Slurm cluster offers the user, and whether it would take a job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.schedulers.site_offers import PartitionOffer, SiteOffers
from fp8launch.schedulers.slurm import accounts, preflight
from fp8launch.schedulers.slurm.inventory import Partition, Site, gpu_model, read_site


def site_offers() -> SiteOffers:
    """Ask Slurm for its partitions and the user's accounts. Raises UserError where no Slurm answers."""
    site = read_site(os.environ.get("SLURM_CONF"))
    if not isinstance(site, Site):
        why = "this machine belongs to no Slurm cluster"
        if site is not None:
            why = f"no Slurm controller answers: {site.words}"
        fix = "run this on a login node of the cluster; `fp8launch clusters` lists examples to copy"
        raise error("no-slurm", why, None, fix, MACHINE_LACKS)
    return SiteOffers(tuple(partitions(site)), tuple(accounts.associations()), accounts.default_account())


def partitions(site: Site) -> list[PartitionOffer]:
    """Return the partitions that take jobs, the most suitable first.

    Those with GPUs come first, then Slurm's default, then those with more nodes and a longer time limit.
    """
    found = [_offer(partition) for partition in site.partitions.values() if partition.state == "UP"]

    def order(offer: PartitionOffer) -> tuple[bool, bool, int, float, str]:
        limit = offer.max_minutes if offer.max_minutes is not None else float("inf")
        return (not offer.gpus, not offer.default, -offer.nodes, -limit, offer.name)

    return sorted(found, key=order)


def _offer(partition: Partition) -> PartitionOffer:
    gpus: dict[str, int] = {}
    for node in partition.nodes:
        for kind, count in node.gpus.items():
            gpus[kind] = max(count, gpus.get(kind, 0))
    models = {kind: gpu_model(kind) for kind in gpus}
    return PartitionOffer(partition.name, gpus, models, partition.total_nodes, partition.default, partition.max_minutes)


def refusal(options: Mapping[str, str]) -> str | None:
    """Return Slurm's words against a job of one node with these sbatch options; None where it would take it."""
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    return preflight.test_only("\n".join(["#!/bin/sh", "#SBATCH --nodes=1 --time=1", *lines, "true", ""]))
