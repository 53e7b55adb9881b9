"""A full-screen view of runs and their logs."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="watch",
    commands={
        "watch": Command("fp8launch.plugins.watch.cli:watch", "Run", "watch runs and their logs in full screen"),
    },
)
