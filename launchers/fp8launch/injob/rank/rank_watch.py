"""Ends a helper process of a rank when the rank is gone.

A rank that is killed cannot end its helpers (data loaders, writers of checkpoints, managers, trackers), and Slurm waits
for all of them. Every helper looks once a second whether its rank is still there. The kernel's own signal for this
(PR_SET_PDEATHSIG) comes when the *thread* ends that started the helper, which is too early for one that a thread
started.

Loaded by `signals`, and by its path at the start of every process that multiprocessing starts afresh: standard library
only, and nothing of fp8launch.
"""

from __future__ import annotations

import os
import signal
import threading
import time

AGENT = "FP8LAUNCH_AGENT"  # the process of node.py that started this rank; supervisor/training_step.py knows it too
EVERY = 1.0  # seconds


def start_time(pid: int) -> str | None:
    """When a process was started, as the kernel counts; None for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (runs at every start of a helper)
            # The command's name, in parentheses, may hold anything; the state follows, and the start is the 22nd field.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def end_with(pid: int, started: str | None) -> None:
    """End this process, and what it forks, when process `pid`, which was started then, is gone."""
    _watch(pid, started)
    os.register_at_fork(after_in_child=lambda: _watch(pid, started))


def tie_forks() -> None:
    """In a rank: what it forks ends with it."""
    rank, started = os.getpid(), start_time(os.getpid())
    os.register_at_fork(after_in_child=lambda: _watch(rank, started))


def _watch(pid: int, started: str | None) -> None:
    def look() -> None:
        while start_time(pid) == started:
            time.sleep(EVERY)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="fp8launch-rank-watch", daemon=True).start()
