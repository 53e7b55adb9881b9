"""Kernel profiles and statistics of FP8 tensors: see docs/verify.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="measure",
    measurements={"launch.profile_iteration": "kernel profile", "launch.tensor_stats": "tensor statistics"},
    report_fields={"tensor_stats": "fp8launch.plugins.measure.report:tensor_stats"},
    in_job=("fp8launch.plugins.measure.injob",),
)
