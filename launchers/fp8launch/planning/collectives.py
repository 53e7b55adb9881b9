"""Time of collective communication over NVLink and, beyond its domain, the network.

Megatron places ranks in the order tensor, context (or expert), data, pipeline: a group of `size` ranks that are
`stride` apart spans `size * stride` neighbouring GPUs. What leaves the NVLink domain crosses the network, over the
cards of all of the group's members in the domain at once, as NCCL's rings do.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8launch.planning.speeds import Speeds


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their number, and the distance between two of them in GPUs."""

    size: int
    stride: int = 1

    def inside(self, domain: int) -> int:
        """Members within one NVLink domain."""
        return max(min(self.size, domain // self.stride), 1)

    def link(self, speeds: Speeds) -> str:
        """The slowest link that the group uses."""
        if self.inside(speeds.device.links.domain) >= self.size:
            return "NVLink"
        return "network"


def gather(size: float, group: Group, speeds: Speeds) -> float:
    """Seconds of an all-gather or reduce-scatter of `size` bytes: those of the whole tensor."""
    if group.size <= 1:
        return 0.0
    share = size * (group.size - 1) / group.size
    inside = group.inside(speeds.device.links.domain)
    over_network = share / (inside * speeds.network)
    if inside == 1:
        return over_network
    over_nvlink = share / speeds.nvlink
    if inside >= group.size:
        return over_nvlink
    return max(over_nvlink, over_network)


def exchange(size: float, group: Group, speeds: Speeds) -> float:
    """Seconds of an all-to-all in which each rank holds `size` bytes for all ranks together."""
    if group.size <= 1:
        return 0.0
    inside = group.inside(speeds.device.links.domain)
    near = size * (inside - 1) / group.size
    far = size * (group.size - inside) / group.size
    return max(near / speeds.nvlink, far / speeds.network)


def send(size: float, group: Group, speeds: Speeds) -> float:
    """Seconds to send `size` bytes to the next member, on average: one in `inside` is in another NVLink domain."""
    if group.size <= 1:
        return 0.0
    inside = group.inside(speeds.device.links.domain)
    if inside >= group.size:
        return size / speeds.nvlink
    return size * ((inside - 1) / speeds.nvlink + 1 / speeds.network) / inside


def rotate(size: float, group: Group, speeds: Speeds) -> float:
    """Seconds in which every member of a ring sends `size` bytes to the next: those of the slowest link."""
    if group.size <= 1:
        return 0.0
    if group.inside(speeds.device.links.domain) >= group.size:
        return size / speeds.nvlink
    return size / speeds.network
