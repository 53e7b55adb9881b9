"""Run many rehearsals after a single import: `python -m fp8launch.plugins.rehearse.forked`, with requests on stdin.

The first line is a request in the worker's format, of which only the software and the environment are used. It also
holds `parent` (the id of the requesting process), `limit_gib` (the memory limit of each process) and `python_path` (the
folders to import from first). `worker` names the module that prepares and imports the software and answers requests
(default: this package's `worker`). The software is imported once.

Each further line is a rehearsal, which runs in a forked process. It has an `id`, `result` (the file for its result),
`messages` (the file for its output) and the rest of the request. On stdout, a line `{"id": 3, "pid": 4711}` reports its
start and `{"id": 3, "status": 0}` its end. A line `{"kill": 3}` on stdin ends it. The end of stdin ends all rehearsals.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from fp8launch.plugins.rehearse import containment

WORKER = "fp8launch.plugins.rehearse.worker"


def main() -> None:
    """Import the software, then fork for each request until stdin ends."""
    setup = json.loads(_first_line())
    containment.enter(setup["limit_gib"], setup["parent"])
    # Not set through PYTHONPATH, because Python would run a sitecustomize.py there before the limits apply.
    sys.path[1:1] = setup["python_path"]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep Megatron's output out of the answers
    worker = importlib.import_module(setup.get("worker", WORKER))
    gc.disable()  # garbage collection would take a third of the import time
    failure = worker.prepared(setup)
    if failure is None:
        # An import that fails here fails again in each rehearsal, which describes the failure.
        with suppress(Exception, SystemExit):
            worker.import_megatron(setup)
    gc.freeze()
    gc.enable()
    _serve(worker, setup, failure, answers)
    os._exit(0)  # Megatron's threads and exit handlers have nothing to finish


def _serve(worker: Any, setup: Mapping[str, Any], failure: dict[str, Any] | None, answers: IO[str]) -> None:
    containment.adopt_orphans()
    helpers = containment.children_of(os.getpid())
    running: dict[int, int] = {}
    text = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02 if running else None)
        if ready:
            chunk = os.read(0, 1 << 20)
            if not chunk:
                break
            *lines, text = (text + chunk).split(b"\n")
            for line in map(json.loads, lines):
                if "kill" in line:
                    _kill(pid for pid, number in running.items() if number == line["kill"])
                    continue
                pid = _fork(worker, {**setup, **line}, failure)
                running[pid] = line["id"]
                answers.write(json.dumps({"id": line["id"], "pid": pid}) + "\n")
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                # End the processes that the rehearsal left behind.
                containment.end_children(keep=[*helpers, *running])
                answers.write(json.dumps({"id": running.pop(pid), "status": status}) + "\n")
    _kill(running)


def _kill(processes: Any) -> None:
    for pid in list(processes):
        os.kill(pid, signal.SIGKILL)


def _first_line() -> bytes:
    """Read no further than the first line, so that the rest is left for select."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _fork(worker: Any, request: dict[str, Any], failure: dict[str, Any] | None) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        containment.end_with_parent(parent)
        containment.adopt_orphans()
        if "cpu_seconds" in request:
            resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"],) * 2)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        messages = os.open(request["messages"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(messages, 1)
        os.dup2(messages, 2)
        result = failure or worker.result_of(request)
        partial = Path(request["result"] + ".part")
        partial.write_text(json.dumps(result))
        partial.rename(request["result"])
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
