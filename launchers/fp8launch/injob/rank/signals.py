"""Signals of a rank and of its helper processes.

SIGTERM asks a rank to save and exit, and its helpers must survive the signal, which Slurm sends to every process of a
step. Megatron's handler only sets a flag, in the rank and in its forks, such as the data loader. Processes that
multiprocessing starts afresh have no handler and die at once. One of them serves the queue through which the
checkpoint's writers report, so the requested save would fail. SIGUSR1 asks a rank for its stack: the supervisor's hang
watchdog sends it. A helper whose rank was killed ends with it (`rank_watch`).
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

WITH_PARENT = {signal.SIGTERM, signal.SIGUSR1}  # helpers ignore these


def tie_helpers_to_rank() -> None:
    """From here on, helper processes ignore SIGTERM, and end when the rank is gone.

    Processes that multiprocessing starts afresh have the signals blocked, and their parent ends them with SIGKILL. A
    second call does nothing.
    """
    start: Any = util.spawnv_passfds
    if getattr(start, "ties_to_rank", False):
        return

    def start_tied(path: Any, arguments: Any, *rest: Any) -> Any:
        # A new process inherits the calling thread's mask. A handler would be lost, and ignoring the signal would apply
        # to the whole rank.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WITH_PARENT)
        try:
            return start(path, _watching(arguments), *rest)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    start_tied.ties_to_rank = True  # type: ignore[attr-defined]
    util.spawnv_passfds = start_tied  # type: ignore[assignment]
    rank_watch.tie_forks()
    atexit.register(_end_daemons)  # runs before multiprocessing's own function, which was registered earlier
    # At its exit Python ends daemonic children with SIGTERM and waits for them, but they ignore it.
    for popen in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]


def _watching(arguments: Any) -> list[Any]:
    """Return the command `python ... -c PROGRAM` of a fresh process, with the watch on its rank before the program."""
    words = list(arguments)
    if "-c" in words[:-1]:
        at = words.index("-c") + 1
        rank = os.getpid()
        file, started = str(Path(rank_watch.__file__).resolve()), rank_watch.start_time(rank)
        load = f"_watch = {{}}; exec(open({file!r}).read(), _watch); _watch['end_with']({rank}, {started!r})"
        words[at] = f"{load}\n{words[at]}"
    return words


def _end_daemons() -> None:
    """Kill daemonic children: a failed rank must not wait for its data loader, which catches SIGTERM and stays."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would report each as a failure
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def answer_with_stack() -> None:
    """Make SIGUSR1 print the stack of this process, even while it waits inside C code. Its forks ignore the signal.

    The stack goes to stderr. Ranks of torchrun share stderr, so each writes to its own file in FP8LAUNCH_STACKS.
    """
    folder = os.environ.get("FP8LAUNCH_STACKS")
    file = Path(folder, os.environ["RANK"]).open("w") if folder else sys.stderr  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    os.register_at_fork(after_in_child=_leave_it_to_the_parent)


def _leave_it_to_the_parent() -> None:
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
