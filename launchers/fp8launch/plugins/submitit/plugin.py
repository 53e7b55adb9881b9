"""The backend `submitit`."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(name="submitit", schedulers={"submitit": "fp8launch.plugins.submitit.scheduler:SubmititScheduler"})
