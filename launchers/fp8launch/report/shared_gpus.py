"""Which runs used a GPU at the same time? Their speeds depend on each other, and not only on their settings.

After its first iteration, a job prints the identifiers of its GPUs and the time (`injob/rank/probe.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from fp8launch.logs import ParsedLog
from fp8launch.logs.evidence import of_kind
from fp8launch.untyped import as_mapping, as_seconds

# Two runs share a GPU if they overlap for more than this part of the shorter one. Less barely moves a median.
_LEAST = 0.1


@dataclass(frozen=True)
class GpuUse:
    """One attempt on its GPUs, from its first iteration to its last one, in seconds since 1970."""

    gpus: frozenset[str]
    began: float
    ended: float

    def shared_with(self, later: GpuUse) -> bool:
        """Return whether a use that began later, of the same GPU, disturbed this one. A copy of a log does not."""
        both = min(self.ended, later.ended) - later.began
        shorter = min(self.ended - self.began, later.ended - later.began)
        return both > _LEAST * shorter and later.began > self.began


def gpu_use(log: ParsedLog) -> GpuUse | None:
    """Return how an attempt used its GPUs; None if its log does not name them."""
    gpus, times = set(), []
    for evidence in of_kind("probe", log.evidence):
        gpu, time = as_mapping(evidence.data.get("software")).get("gpu_id"), as_seconds(evidence.data.get("time"))
        if isinstance(gpu, str) and time is not None:
            gpus.add(gpu)
            times.append(time)
    if not gpus:
        return None
    numbers, step_times = log.iterations.column("number"), log.iterations.column("step_time_ms")
    took = [(after - before) * ms for (before, after), ms in zip(pairwise(numbers), step_times[1:], strict=True)]
    seconds = math.fsum(ms / 1e3 for ms in took if 0 < ms < math.inf)
    return GpuUse(frozenset(gpus), min(times), min(times) + seconds)


def sharers(uses: Sequence[Sequence[GpuUse]]) -> list[list[int]]:
    """Return for each run, given by its attempts, the positions of the runs that it shared a GPU with."""
    by_gpu: dict[str, list[tuple[int, GpuUse]]] = {}
    for run, attempts in enumerate(uses):
        for use in attempts:
            for gpu in use.gpus:
                by_gpu.setdefault(gpu, []).append((run, use))
    found: list[set[int]] = [set() for _ in uses]
    for of_one in by_gpu.values():
        of_one.sort(key=lambda run_and_use: run_and_use[1].began)
        for place, (run, use) in enumerate(of_one):
            for other, later in islice(of_one, place + 1, None):
                if later.began >= use.ended:
                    break
                if run != other and use.shared_with(later):
                    found[run].add(other)
                    found[other].add(run)
    return list(map(sorted, found))
