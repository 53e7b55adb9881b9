"""Megatron's own validators, run without torch or a GPU: the check's layer `megatron`."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="validators",
    validators={"megatron_lm": "fp8launch.plugins.validators.layer:validate_runs"},
)
