"""`fp8launch --remote CLUSTER`: commands on a login node, by ssh. See docs/ssh.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

_RUN_REMOTE = "fp8launch.plugins.ssh.remote:run_remote"

# `--at` is the older name of the option.
PLUGIN = Plugin(name="ssh", relays={"remote": _RUN_REMOTE, "at": _RUN_REMOTE})
