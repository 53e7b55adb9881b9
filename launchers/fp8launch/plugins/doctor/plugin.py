"""What this machine and its cluster provide."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="doctor",
    commands={
        "doctor": Command(
            "fp8launch.plugins.doctor.cli:doctor",
            "Site",
            "report what this machine and cluster provide and lack",
            before="completion",
        )
    },
)
