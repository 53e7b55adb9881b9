"""End the helper processes of a rank when the rank is gone.

A killed rank cannot end its helpers (data loaders, checkpoint writers, managers, trackers), and Slurm waits for all of
them. So every helper checks once a second whether its rank still exists. The kernel's own signal for this
(PR_SET_PDEATHSIG) is sent when the *thread* that started the helper ends, which may be too early.

`signals` imports this module, and every process that multiprocessing starts afresh executes it by its path: it uses
only the standard library, and nothing of fp8launch.
"""

from __future__ import annotations

import os
import signal
import threading
import time

AGENT = "FP8LAUNCH_AGENT"  # the process of node.py that started this rank; local_job.py knows it too
EVERY = 1.0  # seconds


def start_time(pid: int) -> str | None:
    """Return the start time of a process in the kernel's clock ticks; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (runs at every start of a helper)
            # The command name, in parentheses, may contain anything. The state follows, and the start is the 22nd
            # field.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def end_with(pid: int, started: str | None) -> None:
    """End this process and its forks when the process `pid` with that start time is gone."""
    _watch(pid, started)
    os.register_at_fork(after_in_child=lambda: _watch(pid, started))


def tie_forks() -> None:
    """Make the forks of this rank end with it."""
    rank, started = os.getpid(), start_time(os.getpid())
    os.register_at_fork(after_in_child=lambda: _watch(rank, started))


def _watch(pid: int, started: str | None) -> None:
    def look() -> None:
        while start_time(pid) == started:
            time.sleep(EVERY)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="fp8launch-rank-watch", daemon=True).start()
