"""Many rehearsals with the imports done once: `python -m fp8launch.rehearsal.forked`, requests on stdin.

The first line is a request as `worker.py` takes it, of which the software and the environment count. It is imported
once. Each further line is `{"id": 3, "result": PATH, "argv": [...], "rank": 0, "world": 8, "local_world": 8}`: a forked
process rehearses it and writes its result to PATH. A line `{"id": 3, "status": 0}` on stdout says that it has ended.
At the end of stdin all of them are ended.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
from pathlib import Path
from typing import Any

from fp8launch.rehearsal import worker


def main() -> None:
    """Import, then fork for each request until stdin ends."""
    setup = json.loads(_first_line())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker.prepare_software(setup)
    worker.import_megatron()
    gc.collect()
    gc.freeze()
    running: dict[int, int] = {}
    text = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02 if running else None)
        if ready:
            chunk = os.read(0, 1 << 20)
            if not chunk:
                break
            *lines, text = (text + chunk).split(b"\n")
            for line in lines:
                request = {**setup, **json.loads(line)}
                running[_fork(request)] = request["id"]
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                answers.write(json.dumps({"id": running.pop(pid), "status": status}) + "\n")
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _first_line() -> bytes:
    """Read no further than the line: the rest is left for select."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (request.get("cpu_seconds", 300),) * 2)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        result = worker.result_of(request)
        partial = Path(request["result"] + ".part")
        partial.write_text(json.dumps(result))
        partial.rename(request["result"])
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
