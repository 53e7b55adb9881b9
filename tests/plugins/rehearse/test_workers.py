"""Processes that share one import, with a worker that only uses processor time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from fp8launch.plugins.rehearse.failure import described
from fp8launch.plugins.rehearse.server import Server
from fp8launch.plugins.rehearse.workers import Limits, Request, Result, Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's means")

BUSY = """
import time

def prepared(setup):
    return None

def import_megatron(setup):
    pass

def result_of(request):
    ends = time.process_time() + request["task"]
    while time.process_time() < ends:
        pass
    time.sleep(0.3)
    return {"ok": True}
"""


def test_the_limit_of_imports_does_not_count_earlier_workers(tmp_path: Path) -> None:
    """The operating system adds the time of ended workers to their server's time."""
    (tmp_path / "busy.py").write_text(BUSY)
    limits = Limits(processor_seconds=10, import_seconds=2.0)
    server = Server({"worker": "busy"}, [str(tmp_path)], limits.memory_gib)

    def train(seconds: float) -> Result:
        worker = Worker(Request({"task": seconds}, []), limits, server)
        # The first look is before the server has reported the worker's process.
        while not worker.has_ended():
            time.sleep(0.02)
            server.listen()
        return worker.result()

    try:
        for seconds in (2.5, 0.1):
            assert train(seconds).failure == ""
    finally:
        server.close()


def test_imports_that_take_too_long_are_ended(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY + "\nwhile True:\n    pass\n")
    limits = Limits(import_seconds=0.5)
    server = Server({"worker": "busy"}, [str(tmp_path)], limits.memory_gib)
    try:
        worker = Worker(Request({"task": 0.0}, []), limits, server)
        while not worker.has_ended():
            time.sleep(0.02)
            server.listen()
        assert "0.5 s of processor time" in worker.result().failure
    finally:
        server.close()


def test_the_tracebacks_of_other_ranks_are_no_message() -> None:
    """When a distributed checkpoint fails, torch's message has the tracebacks of all ranks."""
    message = (
        "CheckpointException ranks:dict_keys([0])\nTraceback (most recent call last): (RANK 0)\n"
        '  File "utils.py", line 193, in reduce_scatter\n    local_data = map_fun()\n'
        "CheckpointingException: Global shape mismatch\n"
    )
    assert described(RuntimeError(message))["message"] == "CheckpointingException: Global shape mismatch"
