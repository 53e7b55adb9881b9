"""The first cluster profile and the first recipe: `fp8launch init`."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="init",
    requires=("plan",),
    commands={
        "init": Command(
            "fp8launch.plugins.init.cli:init", "Prepare", "write a first cluster profile or recipe", before="recipes"
        ),
    },
)
