"""A job over its --mem, which Slurm ends in two ways: by control groups, or by watching what its processes use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Settings, why_not
from cluster.processes import until
from launching import Site, sets

WATCHED = ("JobAcctGatherFrequency=task=1", "JobAcctGatherParams=OverMemoryKill")
GROUPS = ("TaskPlugin=task/cgroup",)
# One group for the memory of processes, in the first version of control groups; the second has all in one tree.
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def limited(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    settings = Settings(nodes=1, conf=("SelectTypeParameters=CR_CPU_Memory", "DefMemPerNode=8000", *request.param))
    if reason := why_not(settings):
        pytest.skip(reason)
    if request.param == GROUPS and not _may_make_groups():
        pytest.skip("needs control groups (version 1) for memory, in which this user may make groups")
    with Cluster.up(settings) as cluster:
        yield Site(cluster, tmp_path)
    _remove_groups(MEMORY_GROUPS / "slurm_node1")


def _remove_groups(top: Path) -> None:
    """Remove what slurmd made and leaves: deepest first, and only what the last processes have left within 10 s."""

    def gone() -> bool:
        for group in sorted(top.rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()
        with contextlib.suppress(OSError):
            top.rmdir()
        return not top.exists()

    until(gone, 10, 0.5)  # a group left over is no fault of the job's: the next slurmd takes it up again


def _may_make_groups() -> bool:
    probe = MEMORY_GROUPS / "fp8launch-test"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


# Takes memory of its own until it is killed. Under a limit that torch's files alone exceed, nothing may be killed: the
# kernel can drop their pages and read them again, at the disk's speed.
GROW = """
import time

taken = []
while len(taken) < 40:
    taken.append(bytearray(100_000_000))
    time.sleep(0.05)
time.sleep(600)
"""


@pytest.mark.train
@pytest.mark.parametrize(
    ("limited", "mode"),
    [(GROUPS, "srun"), (GROUPS, "torchrun"), (WATCHED, "srun")],
    indirect=["limited"],
    ids=["control groups-srun", "control groups-torchrun", "watched"],
)
def test_a_job_over_its_memory_is_out_of_memory_and_continues_as_the_policy_says(
    limited: Site, mode: str, tmp_path: Path
) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text("memory: 1500M\n")
    script = tmp_path / "grow.py"
    script.write_text(GROW)
    save = sets("checkpoint.dir=ckpt", "checkpoint.interval=20", "survive.attempts=2", f"launch.mode={mode}")
    run = limited.submit("--backend", "sbatch", "--cluster", str(profile), *save, *sets(f"launch.script={script}"))
    log = limited.runs / run / "attempts.json"

    def attempts() -> list[dict[str, Any]]:
        if not log.is_file():
            return []
        found: list[dict[str, Any]] = json.loads(log.read_text())["attempts"]
        return [one for one in found if "cause" in one]

    assert until(lambda: len(attempts()) == 2, 240, 0.5), (attempts(), limited.state(run))
    assert [one["cause"] for one in attempts()] == ["host-out-of-memory"] * 2
    assert [one["counts"] for one in attempts()] == [True, True]
    assert until(lambda: limited.state(run)["state"] in ("failed", "out_of_memory"), 60, 0.5), limited.state(run)
    assert "host-out-of-memory" in limited.state(run)["survival"]["stopped"]
    assert limited.json("parse", run)["failure"]["code"] == "host-out-of-memory"
