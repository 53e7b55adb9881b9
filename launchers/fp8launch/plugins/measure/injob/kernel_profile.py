"""A range of iterations under torch's profiler, summed by kernel and family.

What a GPU ran is the strongest evidence that FP8 ran. It is one line of the log, `fp8launch-kernels: {json}`. The
profiled iterations and the next one (the rank sums up while the others wait) are slow, so reports exclude them. Only
the GPU's activities and their launches are recorded: with PyTorch's operators, a range takes minutes to sum up. A run
without a GPU records the operators instead, in a line `fp8launch-profile: {json}`.

The trace, `profile/rank<N>_<first>-<last>.trace.json.gz`, opens in Perfetto and in chrome://tracing.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from fp8launch.injob.rank.training_loop import attempt, say
from fp8launch.plugins.measure.injob import kernel_families
from fp8launch.plugins.measure.injob.kernel_families import Kernel, Total
from fp8launch.plugins.measure.injob.request import SAID, Request

# What the profiler shows next to kernels on the GPU's time line.
_NO_KERNEL = re.compile(r"^(?:nccl:|## |ProfilerStep|(?:Context|Stream|Event)\b.*(?:Sync|Wait))")
# A trace of more events would take minutes to write. An event takes about 400 bytes, or 25 compressed.
MOST_EVENTS = 400_000


class KernelProfile:
    """A profile by torch. `begin` raises RuntimeError if this torch cannot profile a GPU."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._on_cpu = os.environ.get("FP8LAUNCH_DEVICE") == "cpu"

    def begin(self, model: Any) -> None:
        activity = torch.profiler.ProfilerActivity.CPU if self._on_cpu else torch.profiler.ProfilerActivity.CUDA
        if activity not in torch.profiler.supported_activities():
            raise RuntimeError("this torch cannot profile a GPU here")
        self._profiler = torch.profiler.profile(activities=[activity])
        self._synchronize()
        self._profiler.start()
        self._began = time.perf_counter()

    def before_step(self, iteration: int) -> None:
        pass

    def end(self, first: int) -> None:
        self._synchronize()
        wall_ms = (time.perf_counter() - self._began) * 1e3
        self._profiler.stop()
        began = time.perf_counter()
        if self._on_cpu:
            marker, found = SAID, kernel_families.by_name(_operators(self._profiler))
        else:
            marker, found = "fp8launch-kernels: ", kernel_families.summary(list(_kernels(self._profiler)))
        record = {**self._request.record(first), "wall_ms": round(wall_ms, 1)}
        record |= {"summed_in_ms": round((time.perf_counter() - began) * 1e3, 1), **found}
        say(marker, {**record, "trace": attempt("the trace", self._write_trace)})

    def _synchronize(self) -> None:
        if not self._on_cpu:
            torch.cuda.synchronize()

    def _write_trace(self) -> str:
        raw = _raw_results(self._profiler)
        if raw is not None and len(raw.events()) > MOST_EVENTS:
            raise RuntimeError(f"{len(raw.events())} events are more than {MOST_EVENTS}; profile fewer iterations")
        file = self._request.file(".trace.json.gz")
        self._profiler.export_chrome_trace(str(file))
        return str(file)


def _raw_results(profiler: Any) -> Any:
    """Return the profiler's raw results, if this torch has them. Its own summary takes minutes for 100,000 kernels."""
    raw = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    return raw if hasattr(raw, "events") else None


def _kernels(profiler: Any) -> Iterator[Kernel]:
    raw = _raw_results(profiler)
    if raw is not None:
        cuda = torch._C._autograd.DeviceType.CUDA
        for event in raw.events():
            if event.device_type() == cuda and not _NO_KERNEL.match(event.name()):
                yield Kernel(event.name(), *_time(event))
        return
    for event in profiler.events():
        if "CUDA" in str(event.device_type) and not _NO_KERNEL.match(event.name):
            start, duration = event.time_range.start, event.time_range.elapsed_us()
            yield Kernel(event.name, int(start * 1000), int(duration * 1000))


def _time(event: Any) -> tuple[int, int]:
    """Return start and duration in nanoseconds. Older releases count in microseconds."""
    if hasattr(event, "duration_ns"):
        return int(event.start_ns()), int(event.duration_ns())
    return int(event.start_us()) * 1000, int(event.duration_us()) * 1000


def _operators(profiler: Any) -> dict[str, Total]:
    """Return PyTorch's operators, each with its own time on the CPU."""
    return {row.key: Total(row.count, int(row.self_cpu_time_total * 1000)) for row in profiler.key_averages()}
