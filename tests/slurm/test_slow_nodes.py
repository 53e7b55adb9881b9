"""A node that slows a real training on a real Slurm: its ranks are stopped for part of the time."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from cluster.processes import Process
from drilling import Chain
from launching import sets

from fp8launch.logs import read_log
from fp8launch.report.outcome import node_times_of

pytestmark = [pytest.mark.train, pytest.mark.slow]

PATIENCE = 900  # seconds; other work may load the machine
MEASURED = 12  # before the slowdown
# The ranks of a slow node run for this part of the time.
AWAKE, ASLEEP = 0.020, 0.060
SETS = sets(
    "train.iterations=20000",
    # Short steps: 30 measurements show a slow node, each of a step at least. A measurement averages over many naps.
    "model.hidden_size=128",
    "batch.micro=4",
    "batch.global=48",
    "checkpoint.interval=5000",
    "megatron.log_interval=1",
    "env.FP8LAUNCH_NODE_TIMES=1",
    "resources.time=40",
)


@contextmanager
def slowed(processes: Sequence[Process]) -> Iterator[None]:
    """Stop each process for part of the time, independently of the others."""
    over = threading.Event()

    def slow_down(pid: int) -> None:
        try:
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(ASLEEP * random.uniform(0.5, 1.5))
                os.kill(pid, signal.SIGCONT)
                time.sleep(AWAKE * random.uniform(0.5, 1.5))
        except ProcessLookupError:
            pass

    threads = [threading.Thread(target=slow_down, args=(one.pid,)) for one in processes]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def measurements(one: Chain) -> int:
    return sum(len(node_times_of(log.evidence)) for log in map(read_log, one.logs()[:1]))


def health(one: Chain) -> dict[str, dict[str, Any]]:
    return {problem["code"]: problem for problem in one.site.json("parse", one.run)["health"]}


def test_a_slow_node_is_named_and_excluded(chain: Callable[..., Chain]) -> None:
    """Only another job can leave out a node, so a run that continues by requeue is submitted again."""
    actions = sets("health.actions={slow-node: exclude}")
    one = chain("--attempts", "1", "--nodes", "3", *SETS, *actions, profile="continue_by: requeue\n")
    one.reaches(lambda: measurements(one) >= MEASURED, PATIENCE)
    with slowed(one.ranks(2)):
        one.reaches(lambda: "cause" in one.record["attempts"][0], PATIENCE)
    one.reaches(lambda: len(one.record["attempts"]) > 1 and len(one.logs()) > 1 and measurements(one))
    first, second = one.record["attempts"]
    print(json.dumps(one.record, indent=1))
    assert (first["cause"], first["counts"], first["node"]) == ("slow-node", False, "node2")
    assert first["slow_node"]["node"] == "node2" and first["slow_node"]["factor"] > 1.25
    assert "without node2, and this one does not count" in first["then"]
    assert second["before"] == first["after"] > 0
    hosts = one.site.slurm.run("scontrol", "show", "hostnames", second["nodes"]).stdout.split()
    assert sorted(hosts) == ["node1", "node3", "node4"]
    found = health(one)["slow-node"]
    assert (found["node"], found["severity"]) == ("node2", "warning")
    listed = one.site.state(one.run)["survival"]
    assert [slow["node"] for slow in listed["slow_nodes"]] == ["node2"] and listed["excluded"] == ["node2"]
    assert "slow: node2" in one.site.run("runs", one.run).stdout
    one.site.run("cancel", one.run)


def test_nobody_is_named_when_all_nodes_are_slowed_alike(chain: Callable[..., Chain]) -> None:
    one = chain("--attempts", "1", "--nodes", "3", *SETS, *sets("health.actions={slow-node: exclude}"))
    one.reaches(lambda: measurements(one) >= MEASURED, PATIENCE)
    with slowed([rank for node in (1, 2, 3) for rank in one.ranks(node)]):
        one.reaches(lambda: "slowdown" in health(one) and measurements(one) >= MEASURED + 40, PATIENCE)
        assert "slow-node" not in health(one)
    assert "cause" not in one.record["attempts"][0]
    one.site.run("cancel", one.run)
