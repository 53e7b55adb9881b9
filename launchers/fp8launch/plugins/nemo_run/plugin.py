"""The backend `nemo-run`: see docs/nemo_run.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(name="nemo_run", schedulers={"nemo-run": "fp8launch.plugins.nemo_run.scheduler:NemoRunScheduler"})
