"""Datasets for Megatron, built from text: see docs/text.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="data",
    commands={
        "data": Command(
            "fp8launch.plugins.data.cli:data", "Prepare", "build datasets from text; inspect, split and blend them"
        ),
    },
)
