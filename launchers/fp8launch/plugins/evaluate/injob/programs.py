"""Run another in-job program as a part of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8launch.injob.rank import leaving, rank_watch

_POLL = 0.2  # seconds


class OutOfTime(Exception):
    """The job ends soon."""


def run_program(
    file: Path, words: Sequence[str], more: Mapping[str, str] | None = None, until: float = float("inf")
) -> int:
    """Run a program of a rank with these arguments and additional variables, and return its exit status.

    It ends with this process. Raises OutOfTime at the time `until`, in seconds since 1970.
    """
    environment = {**os.environ, leaving.PART: "1", rank_watch.AGENT: str(os.getpid()), **(more or {})}
    with subprocess.Popen([sys.executable, str(file), "--", *words], env=environment) as child:
        try:
            while child.poll() is None:
                if time.time() > until:
                    raise OutOfTime
                time.sleep(_POLL)
        finally:
            child.kill()
    status = child.returncode
    return status if status >= 0 else 128 - status
