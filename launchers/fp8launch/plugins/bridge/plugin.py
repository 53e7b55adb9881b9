"""Recipes of Megatron-Bridge, trained by Bridge's own loop: see docs/recipes.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="bridge",
    engines={"bridge": "fp8launch.plugins.bridge.engine:Bridge"},
    recipe_sections={"bridge": "fp8launch.plugins.bridge.section:Bridge"},
    recipe_sources={"bridge": "fp8launch.plugins.bridge.named:RECIPES"},
    published_recipes={"bridge": "fp8launch.plugins.bridge.listing:show"},
    in_job=("fp8launch.plugins.bridge.injob",),
)
