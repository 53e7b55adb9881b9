"""Describe this node in one log line from its first process, `fp8launch-node: {json}`.

Runs are comparable only on equal machines, and a slow node can be identified only by its name. The information comes
from the driver's files, so that nothing initializes CUDA before Megatron does.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

NODE = "fp8launch-node: "
DRIVER = Path("/proc/driver/nvidia")


def describe(env: Mapping[str, str], driver: Path = DRIVER) -> dict[str, object]:
    """Return the Slurm name of the `node`, the `rank` that prints it, `gpus` (number by model), and the `driver`."""
    models: dict[str, int] = {}
    for file in sorted(driver.glob("gpus/*/information")):
        found = re.search(r"^Model:\s*(.+?)\s*$", _text(file), re.MULTILINE)
        if found:
            models[found[1]] = models.get(found[1], 0) + 1
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", _text(driver / "version"))
    return {
        "node": env.get("SLURMD_NODENAME") or socket.gethostname(),
        "rank": int(env.get("RANK", "0")),
        "gpus": models,
        "driver": version[1] if version else None,
    }


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many out-of-memory kills the kernel counts, over all cgroups; None if it does not count them."""
    found = re.search(r"^oom_kill (\d{1,18})$", _text(counters), re.MULTILINE)
    return int(found[1]) if found else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def announce() -> None:
    """Print the line, from the first process of each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # If a process on this node is killed, the supervisor compares memory_kills with the count at that time.
        # Iteration lines have local time, and utc_offset makes it comparable with other times.
        more = {"memory_kills": memory_kills(), "utc_offset": time.localtime().tm_gmtoff}
        print(NODE + json.dumps({**describe(os.environ), **more}), flush=True)
