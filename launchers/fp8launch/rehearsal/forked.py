"""Many rehearsals with the imports done once: `python -m fp8launch.rehearsal.forked`, requests on stdin.

The first line is a request as `worker.py` takes it, of which the software and the environment count, with `parent`, the
id of the process that asks, `limit_gib` for its memory, and `python_path`, the folders to import from first. The
software is imported once. Each further line is a rehearsal: `id`, `result` (the file
for its result), `messages` (the file for what it prints) and the rest of the request. A forked process rehearses it.
The lines `{"id": 3, "pid": 4711}` and `{"id": 3, "status": 0}` on stdout say that it has begun and ended. A line
`{"kill": 3}` ends it. At the end of stdin all of them are ended.
"""

from __future__ import annotations

import gc
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

from fp8launch.rehearsal import containment, worker


def main() -> None:
    """Import, then fork for each request until stdin ends."""
    setup = json.loads(_first_line())
    containment.enter(setup["limit_gib"], setup["parent"])
    # Not in PYTHONPATH: Python would run a sitecustomize.py there before anything is limited.
    sys.path[1:1] = setup["python_path"]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Megatron prints is no answer
    gc.disable()  # searching all that is imported for garbage takes a third of the time of the imports
    failure = worker.prepared(setup)
    if failure is None:
        # What cannot be imported fails again in each rehearsal, which describes it.
        with suppress(Exception, SystemExit):
            worker.import_megatron(setup)
    gc.freeze()
    gc.enable()
    _serve(setup, failure, answers)
    os._exit(0)  # Megatron's threads and exit handlers have nothing to finish


def _serve(setup: Mapping[str, Any], failure: dict[str, Any] | None, answers: IO[str]) -> None:
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
                pid = _fork({**setup, **line}, failure)
                running[pid] = line["id"]
                answers.write(json.dumps({"id": line["id"], "pid": pid}) + "\n")
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                # What the rehearsal started and left behind.
                containment.end_children(keep=[*helpers, *running])
                answers.write(json.dumps({"id": running.pop(pid), "status": status}) + "\n")
    _kill(running)


def _kill(processes: Any) -> None:
    for pid in list(processes):
        os.kill(pid, signal.SIGKILL)


def _first_line() -> bytes:
    """Read no further than the line: the rest is left for select."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _fork(request: dict[str, Any], failure: dict[str, Any] | None) -> int:
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
