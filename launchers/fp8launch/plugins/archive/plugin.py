"""A run in one file, for a bug report."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="archive",
    commands={
        "archive": Command(
            "fp8launch.plugins.archive.cli:archive", "Read", "pack a run, without secrets, for a bug report"
        )
    },
)
