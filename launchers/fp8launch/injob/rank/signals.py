"""Signals of a rank and of the processes that it starts for itself.

SIGTERM asks a rank to save and leave, and its helpers must outlive the signal. Slurm sends it to every process of a
step. Megatron installs a handler that only takes note, in the rank and (as its forks have it too) in its data loader.
Processes that multiprocessing starts afresh have none and are gone at once: the server of the queue through which the
checkpoint's writers report, for one, and the save that was asked for fails. SIGUSR1 asks a rank for its stack: the
supervisor's hang watchdog sends it. A helper whose rank was killed ends with it (`rank_watch`).
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

from fp8launch.injob.rank import rank_watch

WITH_PARENT = {signal.SIGTERM, signal.SIGUSR1}  # what a helper leaves to the rank


def tie_helpers_to_rank() -> None:
    """From here on, helper processes leave SIGTERM to the rank, and end when the rank is gone.

    What multiprocessing starts afresh has the signals blocked, and its parent ends it with SIGKILL. A second call does
    nothing.
    """
    start: Any = util.spawnv_passfds
    if getattr(start, "ties_to_rank", False):
        return

    def start_tied(path: Any, arguments: Any, *rest: Any) -> Any:
        # The mask of the calling thread is what a new process starts with; a handler would be lost, and a
        # disposition is the whole process's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WITH_PARENT)
        try:
            return start(path, _watching(arguments), *rest)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    start_tied.ties_to_rank = True  # type: ignore[attr-defined]
    util.spawnv_passfds = start_tied  # type: ignore[assignment]
    rank_watch.tie_forks()
    atexit.register(_end_daemons)  # runs before multiprocessing's own, which was registered before
    # Python ends daemonic children at its own exit by SIGTERM, and waits for them.
    for popen in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]


def _watching(arguments: Any) -> list[Any]:
    """The command of a fresh Python process, `python ... -c PROGRAM`, with the watch on its rank before the program."""
    words = list(arguments)
    if "-c" in words[:-1]:
        at = words.index("-c") + 1
        rank = os.getpid()
        file, started = str(Path(rank_watch.__file__).resolve()), rank_watch.start_time(rank)
        load = f"_watch = {{}}; exec(open({file!r}).read(), _watch); _watch['end_with']({rank}, {started!r})"
        words[at] = f"{load}\n{words[at]}"
    return words


def _end_daemons() -> None:
    """A rank that fails must not wait for its data loader, which catches SIGTERM and never exits."""
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
