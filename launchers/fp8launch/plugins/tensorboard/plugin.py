"""TensorBoard event files as logs: see docs/compare.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="tensorboard",
    event_files={"tfevents": "fp8launch.plugins.tensorboard.event_files:read_events"},
)
