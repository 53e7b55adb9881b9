"""One iteration under torch's profiler, GPU activities only, summed by kernel family.

What a GPU ran is the strongest evidence that FP8 ran: `fp8launch-kernels: {json}` says it in one line of the log. The
profiled iteration and the next one (rank 0 sums up while the others wait) are slow; reports leave them out.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from fp8launch.injob.rank import kernel_families

# What the profiler puts beside kernels on the GPU's time line.
_NO_KERNEL = re.compile(r"^(?:nccl:|## |ProfilerStep|(?:Context|Stream|Event)\b.*(?:Sync|Wait))")


class Profile:
    """`start` before the iteration, `stop` after it. Raises what torch raises, RuntimeError without a GPU profiler."""

    def __init__(self) -> None:
        if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
            raise RuntimeError("this torch cannot profile a GPU here")
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def start(self) -> None:
        torch.cuda.synchronize()
        self._profiler.start()
        self._began = time.perf_counter()

    def stop(self) -> dict[str, object]:
        torch.cuda.synchronize()
        wall = time.perf_counter() - self._began
        self._profiler.stop()
        began = time.perf_counter()
        found = kernel_families.summary(kernel_families.totals(_events(self._profiler)))
        return {
            "wall_ms": round(wall * 1e3, 1),
            "summed_in_ms": round((time.perf_counter() - began) * 1e3, 1),
            **found,
        }


def _events(profiler: Any) -> Iterator[tuple[str, int]]:
    """(name, ns) of every kernel. torch's own summary takes minutes for the 100 000 kernels of a large batch, so the
    raw results are read where this torch shows them."""
    raw = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    if raw is not None and hasattr(raw, "events"):
        cuda = torch._C._autograd.DeviceType.CUDA
        for event in raw.events():
            if event.device_type() == cuda and not _NO_KERNEL.match(event.name()):
                yield event.name(), _nanoseconds(event)
        return
    for event in profiler.events():
        if "CUDA" in str(event.device_type) and not _NO_KERNEL.match(event.name):
            yield event.name, int(event.time_range.elapsed_us() * 1000)


def _nanoseconds(event: Any) -> int:
    return int(event.duration_ns()) if hasattr(event, "duration_ns") else int(event.duration_us()) * 1000
