"""Reactions of plugins when a run that `--wait` follows turns unhealthy or ends."""

from __future__ import annotations

from typing import Protocol

from fp8launch import plugin_registry
from fp8launch.injob.supervisor.health_rules import HealthProblem
from fp8launch.report.run_report import RunReport
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState


class RunListener(Protocol):
    """A receiver of events of followed runs. It must not raise: the runs continue regardless."""

    def unhealthy(self, run: RunFolder, problem: HealthProblem) -> None:
        """Receive a problem in the training's health, once for each code and severity, while the run continues."""

    def ended(self, run: RunFolder, state: JobState, report: RunReport | None, good: bool) -> None:
        """Receive the end of a run. Its report is None if it left no log; `good` decides `--wait`'s exit code."""


def run_listeners() -> list[RunListener]:
    """Return the listeners of all plugins. Raises UserError if one is configured wrongly.

    To be called before anything is submitted, so that a run is not followed without its listeners.
    """
    return [listener for _, listener_of in plugin_registry.loaded("run_listeners") if (listener := listener_of())]
