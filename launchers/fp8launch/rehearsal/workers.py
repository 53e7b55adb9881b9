"""Worker processes of rehearsals: several at once, each within its limits, none left behind.

One loop in one thread starts, watches and ends them, so Ctrl-C and every other exception end all of them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")
# A task asks for one worker after the other, gets the result of each, and returns its own.
Task = Generator["Request", "Result", T]

GIB = 2**30
POLL_SECONDS = 0.05
# A login node is shared: never more workers than this, however many cores there are.
MOST_WORKERS = 8


@dataclass(frozen=True)
class Limits:
    """What one worker may use. Processor time does not depend on what else the machine does; `seconds` is for a worker
    that waits for something that never comes."""

    processor_seconds: float = 60
    seconds: float = 900
    memory_gib: float = 4


LIMITS = Limits()


@dataclass(frozen=True)
class Request:
    """What a worker is asked, and the folders that its Python imports from first."""

    content: dict[str, Any]
    python_path: Sequence[str]


@dataclass(frozen=True)
class Result:
    """What a worker answered: `content` is None, and `failure` says why, where it ended without an answer."""

    content: dict[str, Any] | None
    failure: str = ""
    processor_seconds: float = 0.0
    memory_gib: float = 0.0


def workers_at_once(limits: Limits) -> int:
    """How many workers this machine has processors and free memory for."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    by_memory = int(psutil.virtual_memory().available / GIB / limits.memory_gib)
    return max(1, min(cores, by_memory, MOST_WORKERS))


def run_tasks(tasks: Sequence[Task[T]], limits: Limits = LIMITS, done: Callable[[], None] = lambda: None) -> list[T]:
    """Run every task; their results, in order. `done` is called at the end of each."""
    room = workers_at_once(limits)
    results: dict[int, T] = {}
    waiting: deque[tuple[int, Request]] = deque()
    running: list[tuple[int, _Worker]] = []

    def advance(number: int, answer: Result | None) -> None:
        try:
            request = next(tasks[number]) if answer is None else tasks[number].send(answer)
        except StopIteration as end:
            results[number] = end.value
            done()
        else:
            # What has begun is finished first.
            waiting.append((number, request)) if answer is None else waiting.appendleft((number, request))

    for number in range(len(tasks)):
        advance(number, None)
    try:
        while waiting or running:
            while waiting and len(running) < room:
                number, request = waiting.popleft()
                running.append((number, _Worker(request, limits)))
            ended = [(number, worker, worker.result()) for number, worker in running if worker.has_ended()]
            for number, worker, result in ended:
                running.remove((number, worker))
                advance(number, result)
            if not ended:
                time.sleep(POLL_SECONDS)
    finally:
        for _, worker in running:
            worker.kill()
    return [results[number] for number in range(len(tasks))]


# `python -m` would import what somebody left in the working folder under the name of a module.
_START = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import runpy; runpy.run_module('fp8launch.rehearsal.worker', run_name='__main__')"
)


@dataclass(eq=False)
class _Worker:
    """One process, its output in files that nobody has to read while it runs."""

    request: Request
    limits: Limits
    exceeded: str = ""
    processor_seconds: float = 0.0
    memory_gib: float = 0.0
    answer: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    messages: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def __post_init__(self) -> None:
        import psutil

        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "NVTE_", "NCCL_"))
        }
        launchers = Path(__file__).resolve().parents[2]
        environment["PYTHONPATH"] = os.pathsep.join([str(launchers), *self.request.python_path])
        with tempfile.TemporaryFile() as asked:
            asked.write(json.dumps({**self.request.content, "parent": os.getpid()}).encode())
            asked.seek(0)
            # A session of its own: Ctrl-C reaches this process, which ends its workers without their tracebacks.
            self.process = psutil.Popen(
                [sys.executable, "-c", _START],
                stdin=asked,
                stdout=self.answer,
                stderr=self.messages,
                env=environment,
                start_new_session=True,
                umask=0o022,  # what Python compiles into the cache is run later
            )
        self.began = time.monotonic()

    def has_ended(self) -> bool:
        """Whether the process is over; one that exceeds a limit is ended here."""
        import psutil

        if self.process.poll() is not None:
            return True
        try:
            times = self.process.cpu_times()
            self.processor_seconds = times.user + times.system
            self.memory_gib = max(self.memory_gib, self.process.memory_info().rss / GIB)
        except psutil.Error:
            return self.process.poll() is not None
        self.exceeded = self._exceeded()
        if self.exceeded:
            self.kill()
        return bool(self.exceeded)

    def _exceeded(self) -> str:
        if self.memory_gib > self.limits.memory_gib:
            return f"it needs more than {self.limits.memory_gib:g} GiB of memory, the limit of a rehearsal"
        if self.processor_seconds > self.limits.processor_seconds:
            return f"it needs more than {self.limits.processor_seconds:g} s of processor time, the limit of a rehearsal"
        if time.monotonic() - self.began > self.limits.seconds:
            return f"it took longer than {self.limits.seconds:g} s, the limit of a rehearsal"
        return ""

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()

    def result(self) -> Result:
        """The answer of a process that is over."""
        lines = _text(self.answer).splitlines()
        if lines and not self.exceeded:
            return Result(json.loads(lines[-1]), "", self.processor_seconds, self.memory_gib)
        return Result(None, self.exceeded or self._last_words(), self.processor_seconds, self.memory_gib)

    def _last_words(self) -> str:
        lines = _text(self.messages).strip().splitlines()
        last = lines[-1] if lines else f"exit code {self.process.returncode}"
        return f"its process ended without a result: {last}"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
