"""Make a rank exit within a bounded time after its training.

A process can stay for hours after its last line of Python: NCCL does not release a communicator that a CUDA graph
uses, a library waits for a peer at exit, a thread never ends. The job then holds its GPUs until the time limit, and a
complete run counts as failed. So graphs are released before communicators, and a process that is still running `GRACE`
seconds after its training exits at once, with the exit code that it would have had.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import sys
import threading
import time
from typing import Any

from fp8launch.injob.supervisor.failures import ALL_WRITTEN

GRACE = 60.0  # seconds; FP8LAUNCH_LEAVE_WITHIN states another number
# Set for a program that another one runs as a part of itself: its end is not the job's.
PART = "FP8LAUNCH_PART"
_BEHIND = 5.0  # seconds from the first attempt to exit to the second
_CLOCK_MONOTONIC = 1
_SIGEV_THREAD = 2
_begun = threading.Event()
_written = threading.Event()


def training_is_over(code: int = 0) -> None:
    """Exit with `code` within the grace time, whatever happens from here on. The first call counts."""
    if _begun.is_set():
        return
    _begun.set()
    grace = _grace()
    threading.Thread(target=_leave_after, args=(grace, code), name="fp8launch-leave", daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):
        _exit_by_timer(grace + _BEHIND, code)


def everything_is_written() -> None:
    """Print, from rank 0, that the run has written everything; then exit within the grace time."""
    if not _begun.is_set():
        if os.environ.get("RANK", "0") == "0" and not os.environ.get(PART):
            print(ALL_WRITTEN, flush=True)
        _written.set()
    training_is_over(0)


def skip_native_exit() -> None:
    """Let this process exit without the destructors of C++ libraries, if its training wrote everything.

    One of them ends the process with `terminate called without an active exception` if a thread still runs: two of
    nine runs with DeepSpeed did so under load. Call this first: functions registered at exit run in reverse order.
    """
    atexit.register(_leave_if_all_is_written)


def _leave_if_all_is_written() -> None:
    if _written.is_set():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)


def exit_code(left: SystemExit) -> int:
    """Return the exit status of a process that raises this exception."""
    if left.code is None:
        return 0
    return left.code if isinstance(left.code, int) else 1


def end_process_group() -> None:
    """Release the CUDA graphs, then the communicators that they use, within the grace time.

    If the process group is not destroyed, NCCL complains at exit, and gloo's ranks report the loss of rank 0's store.
    """
    training_is_over(0)
    import torch

    release_cuda_graphs()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def release_cuda_graphs() -> None:
    """Release the graphs that Megatron keeps for the life of the process."""
    for release in (_release_full_iteration_graphs, _release_layer_graphs):
        try:
            release()
        except Exception as problem:  # the run is done: its graphs must not make it fail
            print(f"fp8launch: CUDA graphs were not released: {problem!r}", file=sys.stderr, flush=True)
    gc.collect()


def _release_full_iteration_graphs() -> None:
    """Graphs of --cuda-graph-impl full_iteration, which a class of Megatron keeps by stage."""
    wrapper: Any = getattr(sys.modules.get("megatron.core.full_cuda_graph"), "FullCudaGraphWrapper", None)
    if wrapper is None:
        return
    for stage, graph in wrapper.cuda_graph.items():
        wrapper.result[stage] = None
        if graph is None:
            continue
        _synchronize()
        graph.reset()
        wrapper.cuda_graph[stage] = None


def _release_layer_graphs() -> None:
    """Graphs of single layers, made by Megatron itself."""
    module: Any = sys.modules.get("megatron.core.transformer.cuda_graphs")
    record: Any = getattr(module, "_CudagraphGlobalRecord", None)
    if module is None or not getattr(record, "cudagraph_created", False):
        return
    _synchronize()
    module.delete_cuda_graphs()


def _synchronize() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _grace() -> float:
    try:
        return max(0.0, float(os.environ.get("FP8LAUNCH_LEAVE_WITHIN", GRACE)))
    except ValueError:
        return GRACE


def _leave_after(seconds: float, code: int) -> None:
    """Exit after this many seconds, and print the process's stack."""
    time.sleep(seconds)
    rank = os.environ.get("RANK", "0")
    with contextlib.suppress(Exception):
        print(
            f"fp8launch: rank {rank} has not ended {seconds:.0f} s after its training: leaving without waiting longer",
            file=sys.stderr,
        )
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _SignalEvent(ctypes.Structure):
    """struct sigevent of Linux."""

    _fields_ = [
        ("value", ctypes.c_size_t), ("signal", ctypes.c_int), ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("padding", ctypes.c_byte * 32),
    ]  # fmt: skip


class _TimerTimes(ctypes.Structure):
    """struct itimerspec of Linux."""

    _fields_ = [("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2)]


def _exit_by_timer(seconds: float, code: int) -> None:
    """Let the C library call _exit: Python's threads stop while the interpreter shuts down."""
    libc = ctypes.CDLL(None)
    library = libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1")
    event = _SignalEvent(value=code, notify=_SIGEV_THREAD, function=ctypes.cast(libc._exit, ctypes.c_void_p).value)
    timer = ctypes.c_void_p()
    if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
        times = _TimerTimes(value=(int(seconds), int(seconds % 1 * 1e9)))
        library.timer_settime(timer, 0, ctypes.byref(times), None)
