"""A Slurm cluster as its commands list it: partitions, nodes, and the accounts of this user.

The fields used are the same from 22.05 to 25.11.
"""

from __future__ import annotations

import functools
import getpass
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fp8launch.hardware.gpus import GPUS
from fp8launch.recipe.slurm_time import slurm_seconds
from fp8launch.schedulers.slurm import slurm_cli

# A busy controller takes seconds to answer; a missing one must not delay a check for long.
TIMEOUT = 15.0
# States of a node that is temporarily out of service, without sinfo's marks (*, ~, #, $, @, ...).
OUT_OF_SERVICE = ("down", "drain", "fail", "error", "unknown", "future")


@dataclass(frozen=True)
class Node:
    """`gpus` maps GPU types to counts; if a site names no types, the type is ''."""

    name: str
    state: str
    gpus: Mapping[str, int]
    cpus: int
    features: frozenset[str]

    @property
    def in_service(self) -> bool:
        return not self.state.startswith(OUT_OF_SERVICE)

    def gpus_of(self, kind: str | None) -> int:
        """Return how many GPUs a job can request on this node, of one type or of any."""
        if kind is None:
            return sum(self.gpus.values())
        return self.gpus.get(kind, 0)


@dataclass(frozen=True)
class Admission:
    """The accounts or QOS that a partition admits; if `allowed` is None, all except the denied ones."""

    allowed: frozenset[str] | None = None
    denied: frozenset[str] = frozenset()

    def admits(self, name: str) -> bool:
        if self.allowed is None:
            return name.lower() not in self.denied
        return name.lower() in self.allowed

    @property
    def restricts(self) -> bool:
        return self.allowed is not None or bool(self.denied)

    def __str__(self) -> str:
        if self.allowed is None:
            return f"all but {', '.join(sorted(self.denied))}"
        return ", ".join(sorted(self.allowed))


@dataclass(frozen=True)
class Partition:
    """`max_minutes` and `max_nodes` are None without a limit."""

    name: str
    state: str
    default: bool
    max_minutes: int | None
    max_nodes: int | None
    min_nodes: int
    total_nodes: int
    nodes: tuple[Node, ...]
    accounts: Admission = Admission()
    qos: Admission = Admission()

    @property
    def in_service(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.in_service)


@dataclass(frozen=True)
class Site:
    partitions: Mapping[str, Partition]

    @property
    def defaults(self) -> list[Partition]:
        """The default partitions; empty if the site has none."""
        return [partition for partition in self.partitions.values() if partition.default]


@dataclass(frozen=True)
class Silent:
    """No controller answers; `words` are Slurm's own."""

    words: str


@dataclass(frozen=True)
class Association:
    """One account of a user, the QOS allowed with it, and its default QOS."""

    account: str
    qos: tuple[str, ...]
    default_qos: str | None


@functools.lru_cache(maxsize=1)
def read_site(slurm_conf: str | None) -> Site | Silent | None:
    """Return the cluster's partitions and nodes; None if there is no cluster. Queried once per process.

    `slurm_conf` is the environment's SLURM_CONF, which selects the cluster.
    """
    # If no controller answers, other commands retry for a minute or more; ping returns sooner.
    ping = slurm_cli.call("scontrol", "ping", timeout=TIMEOUT)
    if ping.returncode == 127 or "Could not establish a configuration source" in ping.stderr:
        return None  # Slurm's packages are installed, but there is no cluster
    if " UP" not in ping.stdout:
        return Silent(
            slurm_cli.one_line(ping.stderr or ping.stdout, 300) or f"scontrol ping ended with {ping.returncode}"
        )
    partitions = slurm_cli.call("scontrol", "--oneliner", "show", "partition", timeout=TIMEOUT)
    nodes = slurm_cli.call("sinfo", "-h", "-a", "-N", "-o", "%R|%N|%T|%G|%c|%f", timeout=TIMEOUT)
    for answer in (partitions, nodes):
        if answer.returncode:
            return Silent(slurm_cli.one_line(answer.stderr or answer.stdout, 300))
    return Site({p.name: p for p in parse_partitions(partitions.stdout, parse_nodes(nodes.stdout))})


def associations() -> list[Association]:
    """Return this user's accounts by name; none if Slurm keeps no accounts or does not list them."""
    names: dict[str, set[str]] = {}
    defaults: dict[str, str | None] = {}
    # One line for each partition of an account.
    for line in _sacctmgr("assoc", f"user={getpass.getuser()}", "format=account,qos,defaultqos"):
        fields = line.split("|")
        if len(fields) < 3 or not fields[0]:
            continue
        account, qos, default = fields[0], fields[1], fields[2]
        names.setdefault(account, set()).update(filter(None, qos.split(",")))
        defaults[account] = default or defaults.get(account)
    return [Association(account, tuple(sorted(names[account])), defaults[account]) for account in sorted(names)]


def default_account() -> str | None:
    """Return the user's default account; None if Slurm does not say."""
    words = " ".join(_sacctmgr("user", getpass.getuser(), "format=defaultaccount")).split()
    return words[0] if words else None


def flags_of_qos(qos: str) -> str:
    """Return the flags of a QOS, such as the limits of a partition that it lifts; empty if Slurm does not say."""
    return " ".join(_sacctmgr("qos", qos, "format=flags"))


def _sacctmgr(*what: str) -> list[str]:
    shown = slurm_cli.call("sacctmgr", "-n", "-P", "show", *what, timeout=TIMEOUT)
    return [] if shown.returncode else shown.stdout.splitlines()


def parse_nodes(text: str) -> dict[str, list[Node]]:
    """Read lines of sinfo's `%R|%N|%T|%G|%c|%f`; return the nodes by partition."""
    found: dict[str, list[Node]] = {}
    for line in text.splitlines():
        fields = list(map(str.strip, line.split("|")))
        if len(fields) != 6:
            continue
        partition, name, state, gres, cpus, features = fields
        node = Node(
            name,
            re.sub(r"[^a-z_].*", "", state.lower()),
            parse_gpus(gres),
            number(cpus) or 0,
            frozenset(re.findall(r"[\w.=:/-]+", features)) - {"null"},
        )
        found.setdefault(partition, []).append(node)
    return found


def parse_gpus(gres: str) -> dict[str, int]:
    """Return the GPUs in a node's generic resources, such as `gpu:h200:8(S:0-1),gpu:8,shard:16` or `(null)`."""
    gpus: dict[str, int] = {}
    # Parentheses hold sockets and indices, which may contain commas.
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        match = re.fullmatch(r"gpu(?::([^:]+))??(?::([0-9]{1,18})([kKmM]?))?", part.strip())
        if match:
            scale = {"": 1, "k": 1024, "m": 1024**2}[(match[3] or "").lower()]
            kind = match[1] or ""
            gpus[kind] = gpus.get(kind, 0) + int(match[2] or 1) * scale
    return gpus


def gpu_model(gres_type: str) -> str | None:
    """Return the GPU that a type such as `nvidia_h100_80gb_hbm3` means. The longest name wins: gb200 contains b200."""
    return max((name for name in GPUS if name in gres_type.lower()), key=len, default=None)


def parse_partitions(text: str, nodes: Mapping[str, list[Node]]) -> list[Partition]:
    """Read lines of `scontrol --oneliner show partition`: KEY=VALUE words."""
    found = []
    for line in text.splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = words.get("PartitionName")
        if name is None:
            continue
        own = tuple(nodes.get(name, ()))
        found.append(
            Partition(
                name,
                words.get("State", "UP"),
                words.get("Default") == "YES",
                minutes(words.get("MaxTime", "")),
                number(words.get("MaxNodes")),
                number(words.get("MinNodes")) or 0,
                number(words.get("TotalNodes")) or len(own),
                own,
                _admission(words.get("AllowAccounts"), words.get("DenyAccounts")),
                _admission(words.get("AllowQos"), words.get("DenyQos")),
            )
        )
    return found


def _admission(allowed: str | None, denied: str | None) -> Admission:
    """Read a partition's lists of names; Slurm prints `ALL`, or a list of denied names instead."""
    if allowed is None or allowed == "ALL":
        return Admission(denied=_names(denied))
    return Admission(_names(allowed))


def _names(text: str | None) -> frozenset[str]:
    return frozenset(filter(None, (text or "").lower().split(",")))


def number(text: str | None) -> int | None:
    """Return a whole number that Slurm printed; None for anything else."""
    if text is None or not re.fullmatch(r"[0-9]{1,18}", text):
        return None
    return int(text)


def minutes(text: str) -> int | None:
    """Return a Slurm time in minutes, rounded up; None for UNLIMITED and other text."""
    seconds = slurm_seconds(text)
    return None if seconds is None else -(-seconds // 60)
