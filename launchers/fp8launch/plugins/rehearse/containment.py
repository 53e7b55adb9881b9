"""Limit what a rehearsal can use and reach: no secrets, no network, bounded memory, nothing that outlives the command.

A rehearsal runs Megatron's code and the recipe's own script. The limits keep mistakes in them from harming the machine
that the user works on. They are not a sandbox for code that the user does not trust; such code is never rehearsed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NoReturn

GIB = 2**30
# linux/prctl.h, linux/sched.h, linux/if.h and linux/sockios.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
# The kernel's limit includes address space that is reserved but never touched; ours does not.
_UNTOUCHED_GIB = 2
# Killed processes may take a while to disappear; this is the longest wait.
_LEAVING_SECONDS = 10.0

# Variables that programs need from the user's shell: paths and languages, but no tokens or addresses.
_INHERITED = {
    "CC", "CONDA_PREFIX", "CXX", "CUDA_HOME", "CUDNN_HOME", "CUDNN_PATH", "HF_HOME", "HF_HUB_CACHE", "HOME",
    "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
    "PYTHONPYCACHEPREFIX", "SHELL", "TEMP", "TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME",
}  # fmt: skip


class _Ended(Exception):
    """The command has ended, or wants this process to end."""


def minimal_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the shell variables that a rehearsal gets. The recipe's own `env` is added to them."""
    return {name: value for name, value in environment.items() if name in _INHERITED or name.startswith("LC_")}


def enter(memory_gib: float, parent: int) -> None:
    """Restrict this process and everything that it starts, then return in a child, for which this process waits.

    If the kernel does not support one of the restrictions, it is skipped without an error, and the others still apply.
    Namespaces require a process without threads, so call this before importing anything else. Everything ends when the
    process `parent` ends.
    """
    if _try(_leave_network):
        os.environ["HF_HUB_OFFLINE"] = "1"  # so that no library waits for a network
    _limit_memory(memory_gib)
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        _keep(worker, parent)
    end_with_parent(keeper)


def _keep(worker: int, parent: int) -> NoReturn:
    """Wait until the child or the parent ends, and leave no descendant behind.

    Only this process, which runs nothing from a recipe, can do so: a daemon outlives the process that started it.
    """
    status = 1
    for stream in (0, 1):  # the child's: a copy that stays open here would hide the child's end
        os.close(stream)
    adopt_orphans()
    try:
        signal.signal(signal.SIGTERM, _end)
        end_with_parent(parent, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    except _Ended:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()
        os._exit(status if status >= 0 else 128 - status)


def _end(number: int, frame: object) -> NoReturn:
    raise _Ended


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel signal this process when its parent is gone, for whatever reason (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent was already gone
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the parent of all its orphaned descendants, even after setsid (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(process: int) -> list[int]:
    """Return the ids of a process's children, or none if the kernel does not list them or the process is gone."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def descendants_of(process: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found: list[int] = []
    pending = [process]
    while pending:
        children = children_of(pending.pop())
        found += children
        pending += children
    return found


def end_children(keep: Collection[int] = ()) -> None:
    """Kill this process's children except `keep`, and the descendants that it adopts from them."""
    ends = time.monotonic() + _LEAVING_SECONDS
    while time.monotonic() < ends:
        strays = [child for child in children_of(os.getpid()) if child not in keep]
        if not strays:
            return
        for child in strays:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in strays:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def usage_of(process: int) -> tuple[float, float]:
    """Return the processor seconds and the GiB of memory of a process and its descendants. Raises psutil.Error."""
    import psutil

    seconds, used = 0.0, 0
    for position, one in enumerate([process, *descendants_of(process)]):
        with suppress(psutil.Error) if position else nullcontext():
            found = psutil.Process(one)
            seconds += sum(found.cpu_times()[:4])
            # Memory that a descendant still shares with the process that forked it counts only once.
            used += found.memory_full_info().uss if position else found.memory_info().rss
    return seconds, used / GIB


def _try(step: Callable[[], None]) -> bool:
    """Take a step if a forked process can take it.

    A step that fails halfway would leave this process without its user id.
    """
    trial = os.fork()
    if trial == 0:
        with suppress(BaseException):
            step()
            os._exit(0)
        os._exit(1)
    if os.waitpid(trial, 0)[1]:
        return False
    step()
    return True


def _leave_network() -> None:
    """Move to a private network that has only a loopback interface. Raises OSError or AttributeError.

    Root can do so directly; other users need a user namespace, which many kernels let everyone create.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNET):
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(loopback, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(loopback, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _limit_memory(gib: float) -> None:
    """Limit the memory that each process can reserve (Linux) to a little more than it may touch."""
    limit = int((gib + _UNTOUCHED_GIB) * GIB)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
