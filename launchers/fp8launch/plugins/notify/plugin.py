"""Notifications about the end of a run, by a command or a webhook: see docs/runs.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="notify",
    run_listeners={"notify": "fp8launch.plugins.notify.notify:notifier"},
    end_commands={"notify": "fp8launch.plugins.notify.job_end:notify_at_end"},
    in_job=("fp8launch.plugins.notify.injob",),
)
