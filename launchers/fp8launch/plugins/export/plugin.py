"""Runs exported to Weights & Biases, MLflow or TensorBoard."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="export",
    commands={
        "export": Command("fp8launch.plugins.export.cli:export", "Read", "export runs to W&B, MLflow or TensorBoard"),
    },
)
