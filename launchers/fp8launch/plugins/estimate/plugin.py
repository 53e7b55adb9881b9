"""Estimates of parameters, memory and cost: see docs/memory.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="estimate",
    commands={
        "estimate": Command(
            "fp8launch.plugins.estimate.cli:estimate",
            "Prepare",
            "estimate parameters, memory per GPU, step time and GPU-hours",
            before="render",
        ),
    },
    memory_models={"memory": "fp8launch.plugins.estimate.fit:MODEL"},
)
