"""A hang in a real training on a machine without Slurm: it is noticed, named, ended, and the run continues."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support import wait_for

from fp8launch.injob.local_job import LOCAL_RUN, LocalProcesses, processes_with
from fp8launch.injob.supervisor import checkpoints
from fp8launch.rundir.registry import find_run

pytestmark = [pytest.mark.train, pytest.mark.slow]

Site = Any
SETS = (
    "resources.gpus_per_node=2", "train.iterations=120", "model.hidden_size=128", "batch.sequence=64",
    "megatron.num_workers=1", "checkpoint.dir=ckpt", "checkpoint.interval=20", "survive.hang_after=30",
)  # fmt: skip


def rank(run: Path, number: int) -> int:
    """The process of a rank: a child of torchrun's."""
    [launcher] = LocalProcesses(str(run)).launchers
    for pid in processes_with(LOCAL_RUN, str(run)):
        if f"RANK={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            if parent == launcher:
                return pid
    raise AssertionError(f"no rank {number}")


def test_a_rank_that_hangs(in_memory: Site) -> None:
    in_memory.backend = "local"
    options = [word for one in SETS for word in ("--set", one)]
    run = in_memory.submit(*options, "--attempts", "3").name
    folder = find_run(run).path
    wait_for(lambda: checkpoints.latest(folder / "ckpt") >= 20, 400)
    os.kill(rank(folder, 1), signal.SIGSTOP)
    in_memory.wait(run, "completed", seconds=400)
    first, *later = json.loads((folder / "attempts.json").read_text())["attempts"]
    assert (first["cause"], first["node"]) == ("hang", None)
    told = r"has not grown for \d+ s since iteration \d+; rank 0 in \w+ \(.*; no stack from rank 1$"
    assert re.search(told, first["line"]), first
    assert first["then"] == "hang: another attempt follows, 1 of 3 used"
    assert later[-1]["cause"] == "finished" and later[0]["before"] >= 20
    assert in_memory.json("parse", run)["iterations"] == 120
    goodput = in_memory.json("parse", run)["goodput"]
    attempts = [first, *later]
    assert goodput["allocated_s"] == pytest.approx(sum(one["ended"] - one["began"] for one in attempts), abs=1)
    assert goodput["seconds"]["after_iterations"] > 30, "the hang"
    logged = re.findall(r"iteration +(\d+)/", find_run(run).logs()[0].read_text())
    assert goodput["lost_iterations"] == int(logged[-1]) - later[0]["before"]
    assert 0 < goodput["share"] < 1 and goodput["seconds"]["checkpoints"] > 0
    assert not list(processes_with(LOCAL_RUN, str(folder)))
