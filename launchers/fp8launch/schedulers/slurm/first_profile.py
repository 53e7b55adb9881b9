"""A first cluster profile from what Slurm says: what can be chosen, and the choice that most sites would make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8launch.schedulers.slurm import preflight
from fp8launch.schedulers.slurm.accounts import Association
from fp8launch.schedulers.slurm.inventory import Partition, Site, gpu_model


@dataclass(frozen=True)
class PartitionOffer:
    """A partition as a choice: its GPU types with the most of each on a node; '' is a type without a name."""

    name: str
    gpus: dict[str, int]
    nodes: int
    default: bool
    max_minutes: int | None

    @property
    def words(self) -> str:
        """The partition's GPUs, nodes and time limit in a few words."""
        kinds = [f"{count} x {kind or 'GPU'}" for kind, count in sorted(self.gpus.items())]
        limit = "no time limit" if self.max_minutes is None else f"at most {self.max_minutes} minutes"
        size = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        return f"{size}, {' or '.join(kinds) or 'no GPUs known to Slurm'} each, {limit}"

    @property
    def typed(self) -> list[str]:
        """The named GPU types of its nodes."""
        return sorted(kind for kind in self.gpus if kind)

    def gpu_of(self, kind: str | None) -> str | None:
        """Return the GPU, by fp8launch's name, that a GPU type of this partition means; None where it is unclear."""
        models = {gpu_model(one) for one in ([kind] if kind else self.typed)}
        return models.pop() if len(models) == 1 else None


def offers(site: Site) -> list[PartitionOffer]:
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
    return PartitionOffer(partition.name, gpus, partition.total_nodes, partition.default, partition.max_minutes)


def qos_of(accounts: Sequence[Association], account: str | None) -> Association | None:
    """Return the association of an account; without a name, that of the only one."""
    if account is None:
        return accounts[0] if len(accounts) == 1 else None
    return next((one for one in accounts if one.account == account), None)


def refusal(options: dict[str, str]) -> str | None:
    """Return Slurm's words against a job of one node with these sbatch options; None where it would take it."""
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    return preflight.test_only("\n".join(["#!/bin/sh", "#SBATCH --nodes=1 --time=1", *lines, "true", ""]))
