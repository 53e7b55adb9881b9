"""Processes that a rank starts for itself outlive the SIGTERM that asks the rank to save and leave.

Slurm sends it to every process of a step. Megatron installs a handler that only takes note, in the rank and (as its
forks have it too) in its data loader. Processes that multiprocessing starts afresh have none and are gone at once: the
server of the queue through which the checkpoint's writers report, for one, and the save that was asked for fails.
"""

from __future__ import annotations

import signal
from multiprocessing import popen_fork, popen_forkserver, popen_spawn_posix, util
from typing import Any


def outlive_sigterm() -> None:
    """From here on, what multiprocessing starts afresh has SIGTERM blocked, and is ended by its parent with SIGKILL.

    Twice is once.
    """
    start: Any = util.spawnv_passfds
    if getattr(start, "blocks_sigterm", False):
        return

    def blocking(*arguments: Any) -> Any:
        # The mask of the calling thread is what a new process starts with; a handler would be lost, and a
        # disposition is the whole process's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return start(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    blocking.blocks_sigterm = True  # type: ignore[attr-defined]
    util.spawnv_passfds = blocking  # type: ignore[assignment]
    # Python ends daemonic children at its own exit by SIGTERM, and waits for them.
    for popen in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]
