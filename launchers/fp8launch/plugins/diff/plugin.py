"""The differences between two recipes."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="diff",
    commands={
        "diff": Command(
            "fp8launch.plugins.diff.cli:diff", "Prepare", "show how two recipes differ, and what that affects"
        )
    },
)
