"""Records of the time of one layer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

Seconds: TypeAlias = "defaultdict[str, float]"


def seconds() -> Seconds:
    """Return an empty record of seconds by term."""
    return defaultdict(float)


@dataclass(frozen=True)
class HostTime:
    """Seconds that the host needs to launch the kernels of a layer, without kernels in CUDA graphs.

    `waiting` is the time in which the GPU waits for kernels that the host launches after the routing.
    """

    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0


@dataclass
class LayerTime:
    """Seconds of both passes of a layer by term, the repeated work of recompute, and the host's time.

    `routed` is the part of the forward pass after the routing: dispatch, experts and combination.
    """

    forward: Seconds = field(default_factory=seconds)
    backward: Seconds = field(default_factory=seconds)
    recompute: float = 0.0
    routed: float = 0.0
    host: HostTime = HostTime()

    @cached_property
    def both(self) -> Seconds:
        """The seconds of both passes together. Read it only when the layer is complete."""
        found = self.forward.copy()
        for name, part in self.backward.items():
            found[name] += part
        return found

    @cached_property
    def forward_seconds(self) -> float:
        """The seconds of the forward pass. Read it only when the layer is complete."""
        return sum(self.forward.values())
