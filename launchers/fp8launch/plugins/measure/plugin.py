"""Profiles and statistics of FP8 tensors: see docs/profile.md and docs/verify.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

_RULES = "fp8launch.plugins.measure.rules"

PLUGIN = Plugin(
    name="measure",
    measurements={
        "launch.profile": "kernel profile",
        "launch.profile_iteration": "kernel profile",
        "launch.tensor_stats": "tensor statistics",
    },
    rules={
        "profile-range": f"{_RULES}:profile_range",
        "profile-ranks": f"{_RULES}:profile_ranks",
        "profile-needs-gpu": f"{_RULES}:profile_needs_gpu",
        "profile-twice": f"{_RULES}:profile_twice",
        "profile-nsys": f"{_RULES}:profile_nsys",
        "profile-leaves-few": f"{_RULES}:profile_leaves_few",
    },
    report_fields={
        "profile": "fp8launch.plugins.measure.profile_report:profile",
        "tensor_stats": "fp8launch.plugins.measure.report:tensor_stats",
    },
    in_job=("fp8launch.plugins.measure.injob",),
)
