"""Datasets for Megatron from text (docs/text.md), and conversations for fine-tuning (docs/chat_data.md)."""

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
