"""Seconds of one layer by term, as its parts add them up."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

Seconds: TypeAlias = "defaultdict[str, float]"


def seconds() -> Seconds:
    """Seconds by term, none yet."""
    return defaultdict(float)


@dataclass(frozen=True)
class HostTime:
    """Seconds in which the host launches the kernels of a layer, without those that CUDA graphs replay.

    `waiting` are those in which the GPU waits for kernels that the host launches once it knows the routing.
    """

    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0


@dataclass
class LayerTime:
    """Seconds of both passes by term; beside them what recompute repeats, and the host's time.

    `routed` is the part of the forward pass that follows the routing: dispatch, experts and combination.
    """

    forward: Seconds = field(default_factory=seconds)
    backward: Seconds = field(default_factory=seconds)
    recompute: float = 0.0
    routed: float = 0.0
    host: HostTime = HostTime()
