"""One iteration under torch's profiler, GPU activities only, summed by kernel family.

What a GPU ran is the strongest evidence that FP8 ran. It is one line of the log, `fp8launch-kernels: {json}`. The
profiled iteration and the next one (rank 0 sums up while the others wait) are slow, so reports exclude them.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from fp8launch.injob.rank import training_loop
from fp8launch.injob.rank.training_loop import attempt, say
from fp8launch.plugins.measure.injob import kernel_families

_WHAT = "the kernel profile"
# What the profiler shows next to kernels on the GPU's time line.
_NO_KERNEL = re.compile(r"^(?:nccl:|## |ProfilerStep|(?:Context|Stream|Event)\b.*(?:Sync|Wait))")


def install(iteration: int) -> None:
    """Profile an iteration of Megatron's training loop. Never raises."""
    attempt(_WHAT, lambda: training_loop.observe(_ProfiledIteration(iteration)))


class _ProfiledIteration(training_loop.Observer):
    def __init__(self, number: int) -> None:
        self._number = number
        self._profile: Profile | None = None

    def before_step(self, model: Any, iteration: int | None) -> None:
        if iteration == self._number:
            self._profile = start_profile()

    def after_step(self, model: Any, iteration: int | None) -> bool:
        if self._profile is not None:
            self._profile.print(self._number)
        return iteration is not None and iteration < self._number


def start_profile() -> Profile | None:
    """Start a profile of this process. Return None, and report why, if that fails."""
    return attempt(_WHAT, Profile)  # type: ignore[no-any-return]


class Profile:
    """A running profile. Raises what torch raises, and RuntimeError if this torch cannot profile a GPU."""

    def __init__(self) -> None:
        if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
            raise RuntimeError("this torch cannot profile a GPU here")
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        torch.cuda.synchronize()
        self._profiler.start()
        self._began = time.perf_counter()

    def print(self, iteration: int) -> None:
        """Stop, and print the kernels of an iteration. A failure is reported."""
        attempt(_WHAT, lambda: say("fp8launch-kernels: ", {"v": 1, "rank": 0, "iteration": iteration, **self._stop()}))

    def _stop(self) -> dict[str, object]:
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
    """Yield the name and the nanoseconds of every kernel.

    torch's own summary takes minutes for the 100,000 kernels of a large batch, so the raw results are read if this
    torch has them.
    """
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
