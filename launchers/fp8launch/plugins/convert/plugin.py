"""Conversion of weights from Hugging Face to Megatron and back: see docs/convert.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="convert",
    requires=("bridge",),
    commands={
        "convert": Command(
            "fp8launch.plugins.convert.cli:convert", "Prepare", "convert weights to and from Hugging Face"
        ),
    },
    engines={"convert": "fp8launch.plugins.convert.engine:Convert"},
    recipe_sections={"convert": "fp8launch.plugins.convert.section:Convert"},
    in_job=("fp8launch.plugins.convert.injob",),
)
