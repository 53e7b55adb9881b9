"""Recipes whose stages are separate runs, one after the other: see docs/stages.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="stages",
    requires=("bridge", "convert", "evaluate", "init"),
    recipe_kinds={"stages": "fp8launch.plugins.stages.kind:STAGES"},
    end_commands={"stages": "fp8launch.plugins.stages.kind:start_next_stage"},
    in_job=("fp8launch.plugins.stages.injob",),
)
