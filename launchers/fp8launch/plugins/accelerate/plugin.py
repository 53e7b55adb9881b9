"""Training with Hugging Face Accelerate, for comparisons: see docs/peers.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="accelerate",
    requires=("measure",),
    engines={"accelerate": "fp8launch.plugins.accelerate.engine:Accelerate"},
    recipe_sections={"accelerate": "fp8launch.plugins.accelerate.section:Accelerate"},
    in_job=("fp8launch.plugins.accelerate.injob",),
)
