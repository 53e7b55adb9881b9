"""Time of collective communication over NVLink and, beyond its domain, the network.

Megatron places ranks in the order tensor, context (or expert), data, pipeline: a group of `size` ranks that are
`stride` apart spans `size * stride` neighbouring GPUs. Traffic between NVLink domains crosses the network. NCCL's rings
use the network cards of all members in a domain at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8launch.plugins.plan.speeds import Speeds

# Seconds of a step of a ring over NVLink and over the network, and of a reduction in NVLink's switches, which need no
# ring (src/graph/tuning.cc of NCCL, protocol Simple).
_NVLINK_STEP, _NETWORK_STEP, _SWITCH = 3.4e-6, 14e-6, 25e-6


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their number, and the distance in GPUs between two neighbours."""

    size: int
    stride: int = 1

    def inside(self, domain: int) -> int:
        """Return the number of members in one NVLink domain."""
        return max(min(self.size, domain // self.stride), 1)

    def link(self, speeds: Speeds) -> str:
        """Return the name of the slowest link that the group uses."""
        if self.inside(speeds.device.links.domain) >= self.size:
            return "NVLink"
        return "network"


def gather(size: float, group: Group, speeds: Speeds) -> float:
    """Return the seconds of an all-gather or reduce-scatter. `size` is the whole tensor in bytes."""
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


def ring_latency(group: Group, speeds: Speeds) -> float:
    """Return the seconds of an all-gather or reduce-scatter of a few bytes, which visits all members in turn."""
    if group.size <= 1:
        return 0.0
    inside = group.inside(speeds.device.links.domain)
    if inside >= group.size:
        return _SWITCH
    domains = -(-group.size // inside)
    return (domains - 1) * _NETWORK_STEP + (group.size - domains) * _NVLINK_STEP


def exchange(size: float, group: Group, speeds: Speeds) -> float:
    """Return the seconds of an all-to-all. `size` is the bytes that each rank sends to all ranks together."""
    if group.size <= 1:
        return 0.0
    inside = group.inside(speeds.device.links.domain)
    near = size * (inside - 1) / group.size
    far = size * (group.size - inside) / group.size
    return max(near / speeds.nvlink, far / speeds.network)


def send(size: float, group: Group, speeds: Speeds) -> float:
    """Return the mean seconds to send `size` bytes to the next member; some are in another NVLink domain."""
    if group.size <= 1:
        return 0.0
    inside = group.inside(speeds.device.links.domain)
    if inside >= group.size:
        return size / speeds.nvlink
    return size * ((inside - 1) / speeds.nvlink + 1 / speeds.pair) / inside


def rotate(size: float, group: Group, speeds: Speeds) -> float:
    """Return the seconds in which every member of a ring sends `size` bytes to the next, over the slowest link."""
    if group.size <= 1:
        return 0.0
    if group.inside(speeds.device.links.domain) >= group.size:
        return size / speeds.nvlink
    return size / speeds.pair
