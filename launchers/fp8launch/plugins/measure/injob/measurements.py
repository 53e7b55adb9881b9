"""Measurements in a training loop that the environment requests.

FP8LAUNCH_PROFILE={...}         a profile of a range of iterations (`request`)
FP8LAUNCH_TENSOR_STATS=N        statistics of FP8 tensors in every Nth iteration (`tensor_stats`)
"""

from __future__ import annotations

import os

from fp8launch.plugins.measure.injob import nsight
from fp8launch.plugins.measure.injob.request import requested


def start() -> None:
    """Start this rank again under Nsight Systems if the request needs it. Never raises."""
    request = requested()
    if request is not None and request.tool == "nsys":
        nsight.start_under_nsys(request)


def install(loop: str) -> None:
    """Raises CannotMeasure."""
    every = int(os.environ.get("FP8LAUNCH_TENSOR_STATS") or 0)
    if every:
        from fp8launch.plugins.measure.injob import tensor_stats

        tensor_stats.install(every)
    if requested() is not None:
        from fp8launch.plugins.measure.injob import profiled_range

        profiled_range.install(loop)
