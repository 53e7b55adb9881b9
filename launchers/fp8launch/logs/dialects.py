"""Formats of iteration lines. An engine names the format that its processes print.

Every log is searched for Megatron's format and the additions of NeMo, Primus and Megatron-Bridge (`lines`, `reader`). A
plugin whose program prints another format adds a dialect: how to find its lines, and how to read one of them. Logs
without any Megatron line are searched for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8launch import plugin_registry
from fp8launch.logs.lines import Iteration


@dataclass(frozen=True)
class Dialect:
    """Iteration lines of a program with its own format.

    Lines of interest contain `needle`. `parse` reads one of them under the field names of `logs.field_names`, such as
    `step_time_ms`, and returns None for a line that is not an iteration after all.
    """

    name: str
    needle: bytes
    parse: Callable[[str], Iteration | None]


def others() -> tuple[Dialect, ...]:
    """Return all dialects but Megatron's."""
    return tuple(dialect for _, dialect in plugin_registry.loaded("log_dialects"))
