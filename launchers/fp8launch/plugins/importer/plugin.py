"""Import argument lists and launch scripts as recipes: see docs/own_model.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="importer",
    requires=("forks",),
    commands={
        "import": Command(
            "fp8launch.plugins.importer.cli:import_", "Prepare", "turn an argument list or launch script into a recipe"
        ),
    },
)
