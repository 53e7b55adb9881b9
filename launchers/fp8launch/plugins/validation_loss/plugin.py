"""Validation losses in `compare`: see docs/compare.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="validation_loss",
    comparison_columns={
        "validation": "fp8launch.plugins.validation_loss.columns:LOSS",
        "validation_relative": "fp8launch.plugins.validation_loss.columns:RELATIVE",
    },
)
