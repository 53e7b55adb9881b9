"""Measurements in Megatron's training loop that the environment requests.

FP8LAUNCH_PROFILE_ITERATION=N   a kernel profile of iteration N on rank 0 (`kernel_profile`)
FP8LAUNCH_TENSOR_STATS=N        statistics of FP8 tensors in every Nth iteration (`tensor_stats`)
"""

from __future__ import annotations

import os


def install() -> None:
    """Raises CannotMeasure."""
    every = int(os.environ.get("FP8LAUNCH_TENSOR_STATS") or 0)
    if every:
        from fp8launch.plugins.measure.injob import tensor_stats

        tensor_stats.install(every)
    profiled = int(os.environ.get("FP8LAUNCH_PROFILE_ITERATION") or 0)
    if profiled and os.environ.get("RANK", "0") == "0":
        from fp8launch.plugins.measure.injob import kernel_profile

        kernel_profile.install(profiled)
