"""Formats of iteration lines. An engine names the one that its processes print.

Megatron's format is read from every log, with what NeMo, Primus and Megatron-Bridge add to it (`lines`, `reader`). A
plugin whose program prints another one adds a dialect: how to find its lines, and how to read one of them. Logs without
a line of Megatron's are searched for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8launch import plugin_registry
from fp8launch.logs.lines import Iteration

MEGATRON = "megatron"


@dataclass(frozen=True)
class Dialect:
    """Iteration lines of a program that does not print Megatron's.

    Lines of interest contain `needle`. `parse` reads one of them under the field names of `logs.field_names`, such as
    `step_time_ms`, and returns None for a line that is not an iteration after all.
    """

    name: str
    needle: bytes
    parse: Callable[[str], Iteration | None]


def names() -> tuple[str, ...]:
    """Return the names that an engine's description may hold."""
    return (MEGATRON, *plugin_registry.offered("log_dialects"))


def others() -> tuple[Dialect, ...]:
    """Return the dialects besides Megatron's."""
    return tuple(dialect for _, dialect in plugin_registry.loaded("log_dialects"))
