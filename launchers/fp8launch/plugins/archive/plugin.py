"""A run in one file, for a bug report."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="archive",
    commands={
        "archive": Command(
            "fp8launch.plugins.archive.cli:archive", "Read", "write a run to one file for a bug report, without secrets"
        )
    },
)
