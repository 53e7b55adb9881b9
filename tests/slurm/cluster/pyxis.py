"""Pyxis and enroot in the test cluster, where the machine has them; the tests install neither.

Debian packages neither of them, so a developer builds both (tests/slurm/README.md). Pyxis is found where its own
`make install` puts it, enroot on PATH; FP8LAUNCH_TEST_PYXIS and FP8LAUNCH_TEST_ENROOT name other places.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from .packages import SEARCH

PLUGIN = "spank_pyxis.so"
FOLDERS = (
    "/usr/local/lib/slurm",
    "/usr/lib/slurm",
    "/usr/lib64/slurm",
    f"/usr/lib/{platform.machine()}-linux-gnu/slurm-wlm",
    f"/usr/lib/{platform.machine()}-linux-gnu/slurm",
)


@dataclass(frozen=True)
class Pyxis:
    """The plugin and the enroot that it calls."""

    plugin: Path
    enroot: Path


def find() -> Pyxis | str:
    """What is installed here, or why there is nothing, in words for a skipped test."""
    named = os.environ.get("FP8LAUNCH_TEST_PYXIS")
    places = [Path(named)] if named else [Path(folder, PLUGIN) for folder in FOLDERS]
    plugin = next((path for path in places if path.is_file()), None)
    if plugin is None:
        where = named or ", ".join(FOLDERS)
        return f"needs pyxis ({PLUGIN} in {where}): tests/slurm/README.md says how to build it"
    enroot = shutil.which(os.environ.get("FP8LAUNCH_TEST_ENROOT", "enroot"), path=SEARCH)
    if enroot is None:
        return "needs enroot on PATH, or FP8LAUNCH_TEST_ENROOT: tests/slurm/README.md says how to build it"
    return Pyxis(plugin, Path(enroot))


def plugstack(pyxis: Pyxis, local: Path) -> str:
    """Slurm's line for the plugin; `local` is the disk of each node, for containers of two nodes have one name."""
    return f"required {pyxis.plugin} runtime_path={local}/pyxis\n"


def wrapper(pyxis: Pyxis, local: Path) -> str:
    """An enroot that keeps everything on the node's own disk.

    Pyxis drops ENROOT_DATA_PATH and its like from a job's environment, and enroot.conf is the machine's own.
    """
    names = {"RUNTIME": "run", "CACHE": "cache", "DATA": "data", "TEMP": "tmp"}
    exports = [f"export ENROOT_{name}_PATH={local}/enroot/{folder}" for name, folder in names.items()]
    made = " ".join(f"{local}/enroot/{folder}" for folder in names.values())
    # Its own programs lie beside it.
    exports.append(f'export PATH={shlex.quote(str(pyxis.enroot.parent))}:"$PATH"')
    lines = ["#!/bin/sh", *exports, f"mkdir -p {made}", f'exec {shlex.quote(str(pyxis.enroot))} "$@"', ""]
    return "\n".join(lines)
