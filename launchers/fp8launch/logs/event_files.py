"""Event files: binary files with a training's metrics, such as TensorBoard's. Plugins read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from fp8launch import plugin_registry
from fp8launch.logs import ParsedLog

# Reads one log, with one process, from each file.
Reader: TypeAlias = Callable[[Sequence[Path]], list[ParsedLog]]

_KIND = "event_files"


def event_files(path: Path) -> list[Path]:
    """Return the event files in a folder, oldest first, or `path` itself if it is one; none for anything else."""
    for mark in _marks():
        if path.is_file() and mark in path.name:
            return [path]
        # The name contains the time of the start in seconds.
        files = sorted(path.glob(f"*{mark}*")) if path.is_dir() else []
        if files:
            return files
    return []


def read_events(files: Sequence[Path]) -> list[ParsedLog]:
    """Read the event files of one run. Raises UserError if their plugin or its library is missing."""
    mark = next(mark for mark in _marks() if mark in files[0].name)
    if absent := plugin_registry.absent_error(_KIND, mark, files[0].name, str(files[0])):
        raise absent
    reader: Reader = plugin_registry.load(plugin_registry.offered(_KIND)[mark])
    return reader(files)


def _marks() -> list[str]:
    """Return parts of file names that identify event files, including formats of absent plugins."""
    return [*plugin_registry.offered(_KIND), *plugin_registry.absent(_KIND)]
