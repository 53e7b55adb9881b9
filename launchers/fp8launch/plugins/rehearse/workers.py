"""Run rehearsals in worker processes, several at a time, each within its limits.

A single loop in one thread starts, watches and ends them, so Ctrl-C or any other exception ends all of them and leaves
none behind. Workers with the same software and environment are forked from one process that has imported it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fp8launch.plugins.rehearse.containment import GIB, usage_of
from fp8launch.plugins.rehearse.server import Server

T = TypeVar("T")
# A task yields the requests for one worker after another, receives each result, and returns its own result.
Task = Generator["Request", "Result", T]

POLL_SECONDS = 0.05
# The kernel adds up the memory of a process page by page, which takes 20 ms for each process. To spend little time on
# it, wait longer between two looks the longer a worker runs: this share of its time, and at most so many seconds.
LOOK_SHARE, LOOK_SECONDS = 0.1, 1.0
# Login nodes are shared, so never start more workers than this, however many cores there are.
MOST_WORKERS = 8


@dataclass(frozen=True)
class Limits:
    """The resources that one worker may use.

    Processor time does not depend on the other load of the machine. `seconds` limits the elapsed time, for a worker
    that waits for something that never comes. `import_seconds` limits the processor time of the imports that workers
    share.
    """

    processor_seconds: float = 60
    import_seconds: float = 240
    seconds: float = 900
    memory_gib: float = 4


LIMITS = Limits()

# Fields in which requests may differ and still share one import.
VARYING = ("argv", "rank", "world", "local_world", "record", "saves", "scale", "task")


@dataclass(frozen=True)
class Request:
    """A worker's request, and the folders from which its Python imports first."""

    content: dict[str, Any]
    python_path: Sequence[str]

    @property
    def setup(self) -> dict[str, Any]:
        """Return the fields that decide what is imported, and how."""
        return {name: value for name, value in self.content.items() if name not in VARYING}

    @property
    def key(self) -> str:
        """Identify requests that can share one import."""
        return json.dumps([self.setup, list(self.python_path)], sort_keys=True)


@dataclass(frozen=True)
class Result:
    """A worker's answer. If it ended without one, `content` is None, and `failure` says why."""

    content: dict[str, Any] | None
    failure: str = ""
    processor_seconds: float = 0.0
    memory_gib: float = 0.0


def workers_at_once(limits: Limits) -> int:
    """Return the number of workers for which this machine has processors and free memory."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    by_memory = int(psutil.virtual_memory().available / GIB / limits.memory_gib)
    return max(1, min(cores, by_memory, MOST_WORKERS))


def run_tasks(tasks: Sequence[Task[T]], limits: Limits = LIMITS, done: Callable[[], None] = lambda: None) -> list[T]:
    """Run all tasks and return their results in order. `done` is called at the end of each task."""
    room = workers_at_once(limits)
    results: dict[int, T] = {}
    waiting: deque[tuple[int, Request]] = deque()
    running: list[tuple[int, Worker]] = []
    servers: dict[str, Server] = {}

    def advance(number: int, answer: Result | None) -> None:
        try:
            request = next(tasks[number]) if answer is None else tasks[number].send(answer)
        except StopIteration as end:
            results[number] = end.value
            done()
        else:
            # Finish tasks that have begun before starting others.
            waiting.append((number, request)) if answer is None else waiting.appendleft((number, request))

    for number in range(len(tasks)):
        advance(number, None)
    try:
        while waiting or running:
            while waiting and len(running) < room:
                number, request = waiting.popleft()
                if request.key not in servers:
                    servers[request.key] = Server(request.setup, request.python_path, limits.memory_gib)
                running.append((number, Worker(request, limits, servers[request.key])))
            for server in servers.values():
                server.listen()
            ended = [(number, worker, worker.result()) for number, worker in running if worker.has_ended()]
            for number, worker, result in ended:
                running.remove((number, worker))
                advance(number, result)
            needed = {request.key for _, request in waiting} | {worker.request.key for _, worker in running}
            for key in servers.keys() - needed:
                servers.pop(key).close()
            if not ended:
                time.sleep(POLL_SECONDS)
    finally:
        for server in servers.values():
            server.close()
    return [results[number] for number in range(len(tasks))]


class Worker:
    """A rehearsal in a forked process."""

    def __init__(self, request: Request, limits: Limits, server: Server) -> None:
        self.request, self.limits, self.server = request, limits, server
        self.exceeded = ""
        self.processor_seconds = self.memory_gib = 0.0
        self.began = self._since = self._next_look = time.monotonic()
        self._pid: int | None = None
        self.number = server.submit({name: request.content[name] for name in VARYING if name in request.content})

    def has_ended(self) -> bool:
        """Return whether the process is over, and end it if it exceeds a limit."""
        import psutil

        if self.server.has_ended(self.number):
            return True
        now, pid = time.monotonic(), self.server.pids.get(self.number)
        if pid != self._pid:
            # The imports are over, and the worker itself has begun.
            self._pid, self._since, self._next_look = pid, now, now
        if now < self._next_look:
            return False
        self._next_look = now + min(LOOK_SHARE * (now - self._since), LOOK_SECONDS)
        # Until its first worker starts, the server spends its time on imports.
        importing = pid is None and not self.server.pids
        if pid or importing:
            # If the process is already gone, the server will report it.
            with suppress(psutil.Error):
                self.processor_seconds, memory_gib = usage_of(pid or self.server.process.pid)
                self.memory_gib = max(self.memory_gib, memory_gib)
        self.exceeded = self._exceeded(importing)
        if self.exceeded and pid is None:
            self.server.stop(self.exceeded)
        elif self.exceeded:
            self.server.kill(self.number)
        return bool(self.exceeded)

    def _exceeded(self, importing: bool) -> str:
        seconds = self.limits.import_seconds if importing else self.limits.processor_seconds
        if self.memory_gib > self.limits.memory_gib:
            return f"it needs more than {self.limits.memory_gib:g} GiB of memory, the limit of a rehearsal"
        if self.processor_seconds > seconds:
            return f"it needs more than {seconds:g} s of processor time, the limit of a rehearsal"
        if time.monotonic() - self.began > self.limits.seconds:
            return f"it took longer than {self.limits.seconds:g} s, the limit of a rehearsal"
        return ""

    def result(self) -> Result:
        """Return the result of a process that is over."""
        failure = self.exceeded or self.server.stopped
        answer = None if failure else self.server.answer(self.number)
        if answer is None and not failure:
            failure = f"its process ended without a result: {self.server.last_words(self.number)}"
        return Result(answer, failure, self.processor_seconds, self.memory_gib)
