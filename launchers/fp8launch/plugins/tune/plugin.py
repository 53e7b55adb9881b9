"""Tuning: see docs/tune.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="tune",
    requires=("estimate", "plan", "plots"),
    commands={
        "tune": Command("fp8launch.plugins.tune.cli:tune", "Run", "find a recipe's fastest settings with short runs"),
    },
)
