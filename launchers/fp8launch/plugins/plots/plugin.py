"""The pictures and the HTML report of `compare`: see docs/compare.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="plots",
    comparison_files={
        "html": "fp8launch.plugins.plots.files:HTML",
        "plot": "fp8launch.plugins.plots.files:PLOT",
    },
)
