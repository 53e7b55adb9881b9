"""Worker processes of a build. They take shards until none is left, and exit with their parent process."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import UserError
from fp8launch.plugins.data.bad_input import BadInput
from fp8launch.plugins.data.encoders import encoder_of
from fp8launch.plugins.data.gigatoken_engine import EngineDiffers, GigatokenEncoder
from fp8launch.plugins.data.plan import BuildPlan, load_plan
from fp8launch.plugins.data.shard import (
    Batch,
    EncodeAll,
    Encoded,
    Progress,
    ShardResult,
    StopOnBadInput,
    build_shard,
    encode,
)
from fp8launch.plugins.data.sources import SMALLEST_SHARD, bytes_of
from fp8launch.plugins.data.tokenizer import Encoder

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
# An encoder that has grown by this many bytes is created again.
FORGET_BYTES = 256 << 20
POLL_SECONDS = 0.25
COUNTERS = 3
# For a shard that all processes encode: batches to read ahead per process, and the limit in bytes.
AHEAD, AHEAD_BYTES = 3, 64 << 20


@dataclass(frozen=True)
class Failure:
    """Why a shard could not be built."""

    bad: BadInput | None = None
    os_error: tuple[int, str, str] | None = None
    differs: str | None = None
    user_error: Any = None


@dataclass(frozen=True)
class _Worker:
    """The state of a process between batches. `memory` is its memory before the first batch."""

    plan: BuildPlan
    encoder: Encoder
    memory: int

    def encode(self, batch: Batch) -> Encoded:
        found = encode(self.plan, self.encoder, batch)
        if isinstance(self.encoder, GigatokenEncoder) and resident_bytes() > self.memory + FORGET_BYTES:
            self.encoder.forget()
        return found

    def encode_all(self, batches: Iterator[Batch | BadInput]) -> Iterator[Encoded | BadInput]:
        for batch in batches:
            if isinstance(batch, BadInput):
                yield batch
            else:
                yield self.encode(batch)


_worker: tuple[_Worker, bool, Progress] | None = None


class WorkersEnded(Exception):
    """A worker process was killed, most likely because it ran out of memory."""


def build_shards(
    plan: BuildPlan,
    numbers: Iterable[int],
    engine: str,
    processes: int,
    skip: bool,
    progress: Callable[[int, int, int], None],
) -> Iterator[tuple[int, ShardResult | Failure]]:
    """Build shards in parallel and yield each with its result. `progress` is called with running totals.

    Each process builds a shard at a time. A shard that would keep one process busy longer than all others, such as a
    large .gz, is read by this process and encoded by all of them.
    """
    whole, divided = _divided(plan, list(numbers), processes)
    if not divided:
        processes = min(processes, len(whole))
    if processes <= 1:
        yield from _one_by_one(plan, whole, engine, skip, progress)
        return
    context = multiprocessing.get_context("spawn")
    counts = context.RawArray(ctypes.c_longlong, COUNTERS * processes)
    slots = context.Value(ctypes.c_int, 0)
    arguments = (str(plan.folder), engine, skip, counts, slots, os.getpid())
    waiting = iter(whole)
    running: dict[Future[ShardResult | Failure], int] = {}
    pool = ProcessPoolExecutor(processes, context, _start, arguments)
    try:
        while True:
            while len(running) < 2 * processes and (number := next(waiting, None)) is not None:
                running[pool.submit(_build, number)] = number
            if not running:
                break
            done, _ = wait(running, POLL_SECONDS, FIRST_COMPLETED)
            progress(*_totals(counts))
            for future in done:
                yield running.pop(future), future.result()
        encode_all = functools.partial(_by_all, pool, processes)
        count = _adding(_totals(counts), progress)
        for number in divided:
            yield number, _build_with(plan, number, encode_all, skip, count)
    except BrokenProcessPool:
        raise WorkersEnded from None
    finally:
        _end(pool)


def _totals(counts: Any) -> list[int]:
    """Return the documents, tokens and bytes of all processes."""
    return [sum(counts[at::COUNTERS]) for at in range(COUNTERS)]


def _one_by_one(
    plan: BuildPlan, numbers: Iterable[int], engine: str, skip: bool, progress: Callable[[int, int, int], None]
) -> Iterator[tuple[int, ShardResult | Failure]]:
    """Build shards in this process, without starting others."""
    worker = _Worker(plan, encoder_of(plan.tokenizer, engine), resident_bytes())
    count = _adding([0] * COUNTERS, progress)
    for number in numbers:
        yield number, _build_with(plan, number, worker.encode_all, skip, count)


def _adding(totals: list[int], progress: Callable[[int, int, int], None]) -> Progress:
    def count(*more: int) -> None:
        for at, value in enumerate(more):
            totals[at] += value
        progress(*totals)

    return count


def _divided(plan: BuildPlan, numbers: Sequence[int], processes: int) -> tuple[list[int], list[int]]:
    """Divide shards into shards that one process builds and shards that all processes encode."""
    if processes == 1:
        return list(numbers), []
    most = max(bytes_of(map(plan.shards.__getitem__, numbers)) / processes, SMALLEST_SHARD)
    small, large = [], []
    for number in numbers:
        if plan.shards[number].bytes > most:
            large.append(number)
        else:
            small.append(number)
    return small, sorted(large)


def _by_all(pool: Executor, processes: int, batches: Iterator[Batch | BadInput]) -> Iterator[Encoded | BadInput]:
    """Encode batches in the processes of a pool, a few ahead of the yielded one."""
    ahead: deque[tuple[Future[Encoded] | BadInput, int]] = deque()
    size = 0
    for batch in batches:
        own = 0
        if not isinstance(batch, BadInput):
            own = sum(document.size for document in batch)
        while ahead and (len(ahead) >= AHEAD * processes or size + own > AHEAD_BYTES):
            first, less = ahead.popleft()
            size -= less
            yield _result(first)
        if isinstance(batch, BadInput):
            ahead.append((batch, own))
        else:
            ahead.append((pool.submit(_encode, batch), own))
        size += own
    for first, _ in ahead:
        yield _result(first)


def _result(batch: Future[Encoded] | BadInput) -> Encoded | BadInput:
    if isinstance(batch, BadInput):
        return batch
    return batch.result()


def _end(pool: ProcessPoolExecutor) -> None:
    """Kill the processes. Unfinished shards are built again later."""
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

    _worker = _Worker(plan, encoder_of(plan.tokenizer, engine), resident_bytes()), skip, count


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _build(number: int) -> ShardResult | Failure:
    assert _worker is not None
    worker, skip, count = _worker
    return _build_with(worker.plan, number, worker.encode_all, skip, count)


def _encode(batch: Batch) -> Encoded:
    assert _worker is not None
    return _worker[0].encode(batch)


def _build_with(
    plan: BuildPlan, number: int, encode_all: EncodeAll, skip: bool, count: Progress
) -> ShardResult | Failure:
    try:
        return build_shard(plan, number, encode_all, skip, count)
    except StopOnBadInput as exc:
        return Failure(bad=exc.bad)
    except EngineDiffers as exc:
        return Failure(differs=str(exc))
    except UserError as exc:
        return Failure(user_error=exc.problems)
    except OSError as exc:
        return disk_failure(plan, exc)


def disk_failure(plan: BuildPlan, exc: OSError) -> Failure:
    """Return the text of an OSError, with the build's folder if it names no file."""
    return Failure(os_error=(exc.errno or 0, exc.strerror or str(exc), str(exc.filename or plan.folder)))


def resident_bytes() -> int:
    """Return the memory that this process uses."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
