"""SIGKILL of the process that starts the ranks of a real training on a machine without Slurm."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from support import wait_for

from fp8launch.injob.local_job import LOCAL_RUN, LocalProcesses, processes_with
from fp8launch.injob.supervisor import checkpoints
from fp8launch.rundir.registry import find_run

pytestmark = [pytest.mark.train, pytest.mark.slow]

Site = Any
SETS = (
    "train.iterations=60", "batch.sequence=64", "checkpoint.dir=ckpt", "checkpoint.interval=20",
)  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_continues(in_memory: Site, ranks: int) -> None:
    in_memory.backend = "local"
    options = [word for one in (*SETS, f"resources.gpus_per_node={ranks}") for word in ("--set", one)]
    run = in_memory.submit(*options, "--attempts", "2").name
    folder = find_run(run).path
    wait_for(lambda: checkpoints.latest(folder / "ckpt") >= 20, 400)
    [launcher] = LocalProcesses(str(folder)).launchers
    os.kill(launcher, signal.SIGKILL)
    in_memory.wait(run, "completed", seconds=400)
    first, second = json.loads((folder / "attempts.json").read_text())["attempts"]
    assert (first["cause"], first["line"]) == ("killed", "fp8launch: killed: exit status 137 (SIGKILL)")
    assert (second["cause"], second["after"]) == ("finished", 60) and second["before"] >= 20
    assert not list(processes_with(LOCAL_RUN, str(folder)))
