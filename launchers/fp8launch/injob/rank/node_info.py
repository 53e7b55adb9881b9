"""A description of this node: one line of the log from its first process, `fp8launch-node: {json}`.

Read from the driver's own files, so that nothing touches CUDA before Megatron does. Two runs are only alike on like
machines, and a slow node is only found again by its name.
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
    """`node` as Slurm calls it, the `rank` that prints it, `gpus` as how many of each model, and the `driver`."""
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
    """The kernel's count of processes that it killed for memory, in any cgroup; None where it keeps none."""
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
        # The supervisor compares the count later, where a process of this node was killed.
        # Iteration lines have local time: with the offset of this process's clock they can be compared with others.
        more = {"memory_kills": memory_kills(), "utc_offset": time.localtime().tm_gmtoff}
        print(NODE + json.dumps({**describe(os.environ), **more}), flush=True)
