"""Tags, titles and notes of runs, and the deletion of runs that nobody needs."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

_CLI = "fp8launch.plugins.housekeeping.cli"

PLUGIN = Plugin(
    name="housekeeping",
    commands={
        "tag": Command(f"{_CLI}:tag", "Run", "tag runs to find them later and to protect them"),
        "rename": Command(f"{_CLI}:rename", "Run", "give a run a title that commands accept as its name"),
        "annotate": Command(f"{_CLI}:annotate", "Run", "attach a note to runs"),
        "delete": Command(f"{_CLI}:delete", "Run", "delete run folders and checkpoints, after asking"),
    },
)
