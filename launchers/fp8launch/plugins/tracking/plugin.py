"""Runs in Weights & Biases, MLflow or TensorBoard, while they run or afterwards: see docs/tracking.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="tracking",
    commands={
        "export": Command("fp8launch.plugins.tracking.cli:export", "Read", "export runs to W&B, MLflow or TensorBoard"),
    },
    rules={
        "tracking-library": "fp8launch.plugins.tracking.rules:tracking_library",
        "tracking-login": "fp8launch.plugins.tracking.rules:tracking_login",
    },
    recipe_sections={"tracking": "fp8launch.plugins.tracking.section:Tracking"},
    setup_lines={"tracking": "fp8launch.plugins.tracking.job_lines:start_trackers"},
    end_commands={"tracking": "fp8launch.plugins.tracking.job_lines:end_trackers"},
    in_job=("fp8launch.plugins.tracking.injob",),
)
