"""Make fresh Python processes that a CPU training process starts use the CPU, too (see `cpu_process`).

Python imports this module at the start of each of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _prepare() -> None:
    from fp8launch.injob.rank.compat import cpu, python311

    python311.install()
    cpu.install()


# worker.py prepares itself: only the processes below it have this folder on their path.
if os.environ.get("FP8LAUNCH_DEVICE") == "cpu":
    # In front, because another version may be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[5]))
    from fp8launch.injob.rank.compat import before_import

    before_import.call(_prepare, "megatron")
