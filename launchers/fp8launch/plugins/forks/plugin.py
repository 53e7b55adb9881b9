"""Flag schemas of forks and source checkouts of Megatron-LM: see docs/recipes.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="forks",
    commands={
        "schema": Command("fp8launch.plugins.forks.cli:schema", "Prepare", "let `check` know the flags of a fork"),
    },
    rules={
        "fork-flags": "fp8launch.plugins.forks.rules:fork_flags",
        "fork-defaults": "fp8launch.plugins.forks.rules:fork_defaults",
    },
)
