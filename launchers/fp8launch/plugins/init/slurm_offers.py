"""What this Slurm cluster offers the user, and whether it would take a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.schedulers.slurm import preflight
from fp8launch.schedulers.slurm.inventory import (
    Association,
    Partition,
    Site,
    associations,
    default_account,
    gpu_model,
    read_site,
)
from fp8launch.wording import counted


@dataclass(frozen=True)
class PartitionOffer:
    """A partition as a choice.

    `gpus` has its GPU types with the most of each on a node, '' for a type without a name; `models` has the GPU, by
    fp8launch's name, that each type means, None where it is unclear.
    """

    name: str
    gpus: Mapping[str, int]
    models: Mapping[str, str | None]
    nodes: int
    default: bool
    max_minutes: int | None

    @property
    def words(self) -> str:
        """The partition's GPUs, nodes and time limit in a few words."""
        kinds = [f"{count} x {kind or 'GPU'}" for kind, count in sorted(self.gpus.items())]
        gpus = " or ".join(kinds) or "no GPUs known to Slurm"
        limit = "no time limit"
        if self.max_minutes is not None:
            limit = f"at most {self.max_minutes} minutes"
        return f"{counted(self.nodes, 'node')}, {gpus} each, {limit}"

    @property
    def typed(self) -> list[str]:
        """The named GPU types of its nodes."""
        return sorted(filter(None, self.gpus))

    def gpu_of(self, kind: str | None) -> str | None:
        """Return the GPU, by fp8launch's name, that a GPU type of this partition means; None where it is unclear."""
        if kind:
            return self.models.get(kind)
        models = set(map(self.models.get, self.typed))
        return models.pop() if len(models) == 1 else None


@dataclass(frozen=True)
class SiteOffers:
    """What a user may choose: partitions that take jobs, the most suitable first, and the user's accounts."""

    partitions: tuple[PartitionOffer, ...]
    accounts: tuple[Association, ...]
    default_account: str | None

    def qos_of(self, account: str | None) -> Association | None:
        """Return the association of an account; without a name, the only association."""
        if account is None:
            return self.accounts[0] if len(self.accounts) == 1 else None
        return next((one for one in self.accounts if one.account == account), None)


def site_offers() -> SiteOffers:
    """Ask Slurm for its partitions and the user's accounts. Raises UserError where no Slurm answers."""
    site = read_site(os.environ.get("SLURM_CONF"))
    if not isinstance(site, Site):
        why = "this machine belongs to no Slurm cluster"
        if site is not None:
            why = f"no Slurm controller answers: {site.words}"
        fix = "run this on a login node of the cluster; `fp8launch clusters` lists examples to copy"
        raise error("no-slurm", why, None, fix, MACHINE_LACKS)
    return SiteOffers(tuple(partitions(site)), tuple(associations()), default_account())


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
    """Return why Slurm would reject a job of one node with these sbatch options; None if it would accept the job."""
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    return preflight.test_only("\n".join(["#!/bin/sh", "#SBATCH --nodes=1 --time=1", *lines, "true", ""]))
