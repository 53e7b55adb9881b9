"""The layer `memory`: whether a run fits on its GPUs, by the memory model of a plugin (`Plugin.memory_models`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fp8launch import plugin_registry
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.diagnostics import Problem, Severity

CODES: Mapping[str, Severity] = {"does-not-fit": "error", "tight-memory": "warning"}
_NAME = "memory"


@dataclass(frozen=True)
class MemoryModel:
    """A plugin's estimate of the memory that a run needs.

    problems  yields at most one problem, with a code of CODES; none for a run that the model does not cover
    summary   returns a phrase such as `61.5 of 79.6 GiB per GPU, estimated ± 2%`
    """

    problems: Callable[[ResolvedRun], Iterable[Problem]]
    summary: Callable[[ResolvedRun], str]


def memory_model() -> MemoryModel | None:
    """Return the memory model of the active plugins, or None."""
    models: dict[str, MemoryModel] = dict(plugin_registry.loaded("memory_models"))
    return models.get(_NAME)


def state() -> str:
    """Return the layer's state in a check that requests it: "ran", or "not run: " and the reason."""
    if _NAME in plugin_registry.offered("memory_models"):
        return "ran"
    return f"not run: the plugin {plugin_registry.absent_plugin('memory_models', _NAME)} is not active"
