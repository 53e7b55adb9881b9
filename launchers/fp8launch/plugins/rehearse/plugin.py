"""Rehearsals: see docs/rehearsal.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="rehearse",
    requires=("bridge", "validators"),
    check_layers={"rehearse": "fp8launch.plugins.rehearse.option:LAYER"},
)
