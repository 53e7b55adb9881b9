"""What a cluster offers one user: the choices of a first cluster profile, as plain values of any scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8launch.wording import counted


@dataclass(frozen=True)
class Association:
    """One account of a user, the QOS allowed with it, and the QOS of a job that names none."""

    account: str
    qos: tuple[str, ...]
    default_qos: str | None


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
        """Return the association of an account; without a name, that of the only one."""
        if account is None:
            return self.accounts[0] if len(self.accounts) == 1 else None
        return next((one for one in self.accounts if one.account == account), None)
