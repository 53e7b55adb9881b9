"""Tags, titles and notes of runs, and the deletion of runs that nobody needs."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

_CLI = "fp8launch.plugins.housekeeping.cli"

PLUGIN = Plugin(
    name="housekeeping",
    commands={
        "tag": Command(f"{_CLI}:tag", "Run", "tag runs, to find them and to keep them"),
        "rename": Command(f"{_CLI}:rename", "Run", "give a run a title, which commands accept as its name"),
        "annotate": Command(f"{_CLI}:annotate", "Run", "write a note about runs"),
        "delete": Command(f"{_CLI}:delete", "Run", "delete runs with their folders and checkpoints, after asking"),
    },
)
