"""The processes of a build: each takes shards until none is left, and ends when the one that started it does."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.data.bad_input import BadInput
from fp8launch.data.encoders import encoder_of
from fp8launch.data.gigatoken_engine import EngineDiffers, GigatokenEncoder
from fp8launch.data.plan import BuildPlan, load_plan
from fp8launch.data.shard import ShardResult, StopOnBadInput, build_shard
from fp8launch.data.tokenizer import Encoder
from fp8launch.diagnostics import UserError

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
# An encoder that has grown by this much is made anew.
FORGET_BYTES = 256 << 20
POLL_SECONDS = 0.25
COUNTERS = 3


@dataclass(frozen=True)
class Failure:
    """Why a shard could not be built."""

    bad: BadInput | None = None
    os_error: tuple[int, str, str] | None = None
    differs: str | None = None
    user_error: Any = None


@dataclass(frozen=True)
class _Worker:
    """What a process keeps between shards. `memory`: what it used before the first one."""

    plan: BuildPlan
    encoder: Encoder
    skip: bool
    memory: int


_worker: tuple[_Worker, Callable[..., None]] | None = None


class WorkersEnded(Exception):
    """A process of the build was killed, most likely for its memory."""


def build_shards(
    plan: BuildPlan,
    numbers: Iterable[int],
    engine: str,
    processes: int,
    skip: bool,
    progress: Callable[[int, int, int], None],
) -> Iterator[tuple[int, ShardResult | Failure]]:
    """Build shards in parallel; yield each with its result. `progress` gets totals of these processes as they come."""
    if processes == 1:
        yield from _one_by_one(plan, numbers, engine, skip, progress)
        return
    context = multiprocessing.get_context("spawn")
    counts = context.RawArray(ctypes.c_longlong, COUNTERS * processes)
    slots = context.Value(ctypes.c_int, 0)
    arguments = (str(plan.folder), engine, skip, counts, slots, os.getpid())
    waiting = iter(numbers)
    running: dict[Future[ShardResult | Failure], int] = {}
    pool = ProcessPoolExecutor(processes, context, _start, arguments)
    try:
        while True:
            while len(running) < 2 * processes and (number := next(waiting, None)) is not None:
                running[pool.submit(_build, number)] = number
            if not running:
                return
            done, _ = wait(running, POLL_SECONDS, FIRST_COMPLETED)
            progress(*(sum(counts[at::COUNTERS]) for at in range(COUNTERS)))
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        raise WorkersEnded from None
    finally:
        _end(pool)


def _one_by_one(
    plan: BuildPlan, numbers: Iterable[int], engine: str, skip: bool, progress: Callable[[int, int, int], None]
) -> Iterator[tuple[int, ShardResult | Failure]]:
    """Build shards in this process: nothing has to start."""
    totals = [0] * COUNTERS
    worker = _Worker(plan, encoder_of(plan.tokenizer, engine), skip, resident_bytes())

    def count(*more: int) -> None:
        for at, value in enumerate(more):
            totals[at] += value
        progress(*totals)

    for number in numbers:
        yield number, _build_with(worker, number, count)


def _end(pool: ProcessPoolExecutor) -> None:
    """Kill the processes: what they have not finished is built again."""
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


def _start(folder: str, engine: str, skip: bool, counts: Any, slots: Any, parent: int) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    _end_with_parent(parent)
    plan = load_plan(Path(folder))
    assert plan is not None
    with slots.get_lock():
        slot = slots.value
        slots.value += 1
    first = COUNTERS * (slot % (len(counts) // COUNTERS))

    def count(*more: int) -> None:
        for at, value in enumerate(more):
            counts[first + at] += value

    _worker = _Worker(plan, encoder_of(plan.tokenizer, engine), skip, resident_bytes()), count


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _build(number: int) -> ShardResult | Failure:
    assert _worker is not None
    worker, count = _worker
    return _build_with(worker, number, count)


def _build_with(worker: _Worker, number: int, count: Callable[..., None]) -> ShardResult | Failure:
    try:
        result = build_shard(worker.plan, number, worker.encoder, worker.skip, count)
    except StopOnBadInput as exc:
        return Failure(bad=exc.bad)
    except EngineDiffers as exc:
        return Failure(differs=str(exc))
    except UserError as exc:
        return Failure(user_error=exc.problems)
    except OSError as exc:
        return Failure(os_error=(exc.errno or 0, exc.strerror or str(exc), str(exc.filename or worker.plan.folder)))
    if isinstance(worker.encoder, GigatokenEncoder) and resident_bytes() > worker.memory + FORGET_BYTES:
        worker.encoder.forget()
    return result


def resident_bytes() -> int:
    """Return the memory that this process has in use."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
