"""Which nodes the next attempt at a run may use, by what a real Slurm says of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from cluster.processes import until

from fp8launch.injob.slurm.job import is_impossible
from fp8launch.injob.supervisor import continuation
from fp8launch.injob.supervisor.attempt_log import ATTEMPTS, PLAN, Run

SCRIPT = "#!/bin/sh\n#SBATCH --nodes=2 --partition=main --exclusive --output=/dev/null\nexec sleep 300\n"
At = Callable[[str], Run]


@pytest.fixture
def at(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> At:
    """A run of two nodes as its job sees it, one of whose nodes is bad."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.env[name])
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    (tmp_path / PLAN).write_text(json.dumps({"checkpoint": "ckpt", "scheduler": "fp8launch.injob.slurm.job:SlurmJob"}))

    def begin(bad: str) -> Run:
        job = slurm.run("sbatch", "--parsable", str(tmp_path / "job.sbatch")).stdout.strip()
        slurm.wait_state(job, "RUNNING")
        (tmp_path / ATTEMPTS).write_text(json.dumps({"attempts": [{"node": bad}], "excluded": [bad]}))
        env = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "main"}
        return Run(tmp_path, tmp_path / "logs" / f"{job}-0", env)

    return begin


@pytest.mark.parametrize(("state", "excluded"), [("DRAIN", ["node1"]), ("DOWN", [])])
def test_a_bad_node_is_not_used_again_because_others_are_drained(
    slurm: Cluster, at: At, state: str, excluded: list[str]
) -> None:
    run = at("node1")

    def impossible() -> bool:
        # A node that is only marked as down is up again as soon as its slurmd registers, which may be at once.
        slurm.run("scontrol", "update", "NodeName=node[3-4]", f"State={state}", "Reason=test")
        words = ("sbatch", "--test-only", "--exclude=node1", str(run.folder / "job.sbatch"))
        return is_impossible(slurm.run(*words, check=False).stderr)

    assert until(impossible, 60, every=0.5)
    continuation.drop_impossible_exclusions(run)
    assert run.state["excluded"] == excluded
    # Slurm accepts the job that waits for the drained nodes.
    words = [f"--exclude={','.join(excluded)}"] if excluded else []
    waits = slurm.run("sbatch", "--parsable", *words, str(run.folder / "job.sbatch")).stdout.strip()
    slurm.wait_state(waits, "PENDING")
    slurm.run("scancel", run.job)
    slurm.run("scontrol", "update", "NodeName=node[3-4]", "State=RESUME")
    slurm.wait_state(waits, "RUNNING")
    nodes = slurm.run("squeue", "-h", "-j", waits, "-o", "%N").stdout.strip()
    assert not excluded or "node1" not in slurm.run("scontrol", "show", "hostnames", nodes).stdout.split()


def test_a_bad_node_that_the_cluster_cannot_replace_is_used_again(slurm: Cluster, at: At) -> None:
    run = at("node1")
    (run.folder / "job.sbatch").write_text(SCRIPT.replace("nodes=2", "nodes=4"))
    run.scheduler.env = {**run.env, "SLURM_JOB_NUM_NODES": "4"}
    slurm.run("scontrol", "update", "NodeName=node4", "State=DRAIN", "Reason=test")
    continuation.drop_impossible_exclusions(run)
    assert run.state["excluded"] == []
    slurm.run("scontrol", "update", "NodeName=node4", "State=RESUME")
