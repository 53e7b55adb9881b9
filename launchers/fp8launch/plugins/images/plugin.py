"""Container images as files."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="images",
    commands={
        "images": Command(
            "fp8launch.plugins.images.cli:images",
            "Site",
            "list container images, or import one as a file",
            before="completion",
        )
    },
)
