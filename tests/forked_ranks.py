"""Ranks of jobs, forked from one process that has imported their software: `python forked_ranks.py worker|bridge`.

For tests that look at what a job does and not at its start, most of which is imports: of Megatron-LM for `worker`, also
of Megatron-Bridge for `bridge`. From the fork on, a rank is what it is in a job: the program runs from its first line
on. Each line of stdin is a job: `program` (a module), `argv`, `folder`, `output` (a file) and `ranks`, the variables of
each. The answer is a line with their exit codes. As under torchrun, all end once one failed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

WITHIN = 300  # seconds for a job


def serve(answers: IO[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fork for each job; return in a rank, with its job and its variables."""
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for variables in job["ranks"]:
            pids.append(os.fork())
            if not pids[-1]:
                return job, variables
        print(json.dumps(codes(pids)), file=answers, flush=True)
    sys.exit()


def codes(pids: list[int]) -> list[int]:
    """The exit codes of these processes, once all have ended."""
    found: dict[int, int] = {}
    end = time.monotonic() + WITHIN
    while len(found) < len(pids):
        for pid in set(pids) - set(found):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[pid] = os.waitstatus_to_exitcode(status)
                end = end if not found[pid] else min(end, time.monotonic() + 5)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [found[pid] for pid in pids]


def become(job: dict[str, Any], variables: dict[str, str]) -> None:
    """Turn this process into the requested rank."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(job["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    os.chdir(job["folder"])
    program: Any = importlib.import_module(job["program"])
    sys.argv = [str(Path(program.__file__)), "--", *job["argv"]]
    worker.STARTED = time.time()
    program.main()


# What conversions and recipes of every kind import of Megatron-Bridge, most of it for the first of these modules.
OF_BRIDGE = (
    "megatron.bridge.training.pretrain",
    "megatron.bridge.training.finetune",
    "megatron.bridge.models.conversion.auto_bridge",
    "megatron.bridge.training.utils.omegaconf_utils",
    "megatron.bridge.recipes",
    "megatron.bridge.perf_recipes",
    "megatron.bridge.training.gpt_step",
)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Bridge prints while it is imported
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "launchers")
    from fp8launch.injob.rank import worker
    from fp8launch.injob.rank.compat import cpu, python311

    python311.install()
    cpu.install()
    if sys.argv[1] == "bridge":
        from fp8launch.plugins.bridge.injob import absent_packages

        worker.prepare_megatron("cpu")  # Bridge takes functions out of the modules that this replaces
        absent_packages.install()
        absent_packages.load_together(OF_BRIDGE)
    else:
        from fp8launch.injob.rank import pretrain  # noqa: F401

    become(*serve(answers))
