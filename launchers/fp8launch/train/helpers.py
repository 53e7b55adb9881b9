"""Signals of a rank and of the processes that it starts for itself.

SIGTERM asks a rank to save and leave, and its helpers must outlive it. Slurm sends it to every process of a step.
Megatron installs a handler that only takes note, in the rank and (as its forks have it too) in its data loader.
Processes that multiprocessing starts afresh have none and are gone at once: the server of the queue through which the
checkpoint's writers report, for one, and the save that was asked for fails. SIGUSR1 asks a rank for its stack:
`watch.py` does when a training hangs.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
from multiprocessing import popen_fork, popen_forkserver, popen_spawn_posix, util
from pathlib import Path
from typing import Any

WITH_PARENT = {signal.SIGTERM, signal.SIGUSR1}  # what a helper leaves to the rank


def outlive_sigterm() -> None:
    """From here on, what multiprocessing starts afresh has these signals blocked; its parent ends it with SIGKILL.

    Twice is once.
    """
    start: Any = util.spawnv_passfds
    if getattr(start, "blocks_sigterm", False):
        return

    def blocking(*arguments: Any) -> Any:
        # The mask of the calling thread is what a new process starts with; a handler would be lost, and a
        # disposition is the whole process's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WITH_PARENT)
        try:
            return start(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    blocking.blocks_sigterm = True  # type: ignore[attr-defined]
    util.spawnv_passfds = blocking  # type: ignore[assignment]
    atexit.register(_end_daemons)  # runs before multiprocessing's own, which was registered before
    # Python ends daemonic children at its own exit by SIGTERM, and waits for them.
    for popen in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]


def _end_daemons() -> None:
    """A rank that fails must not wait for its data loader, which takes note of SIGTERM and goes on for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would report each as a failure of its own
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def answer_with_stack() -> None:
    """SIGUSR1 prints where this process is, even while it waits inside C code; its forks ignore it.

    To stderr, or where torchrun's ranks share that of their node, to a file of its own in FP8LAUNCH_STACKS.
    """
    folder = os.environ.get("FP8LAUNCH_STACKS")
    file = Path(folder, os.environ["RANK"]).open("w") if folder else sys.stderr  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    os.register_at_fork(after_in_child=_leave_it_to_the_parent)


def _leave_it_to_the_parent() -> None:
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
