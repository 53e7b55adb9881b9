"""`fp8launch tune` on a real Slurm: trials are jobs, which a killed command leaves alone and Ctrl-C ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from cluster.processes import until
from launching import ROOT, Site, sets

pytestmark = pytest.mark.needs_plugin("tune")

MACHINE = ROOT / "tests" / "plugins" / "tune" / "machine.py"
SECOND = "*/small-4-*/logs/*-0.log"


def end_it(site: Site, number: int, words: list[str], said: Path, when: Callable[[str], bool]) -> int:
    """Start fp8launch, and end it by a signal when its messages, in the file `said`, are such; the exit status."""
    with said.open("w") as messages:
        command = subprocess.Popen(
            [sys.executable, "-m", "fp8launch", *words],
            env=site.env,
            cwd=ROOT,
            stderr=messages,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert until(lambda: when(said.read_text()), 240), said.read_text()
        finally:
            os.killpg(command.pid, number)
            status = command.wait()
    return status


@pytest.mark.train
def test_trials_are_jobs_and_survive_the_command(slurm: Cluster, tmp_path: Path) -> None:
    site = Site(slurm, tmp_path)
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        f"extends: [tiny_cpu]\nname: small\nengine: script\nlaunch: {{script: {MACHINE}, probe: false}}\n"
    )
    gate = tmp_path / "gate"
    held = sets(f"env.GATE={gate}", "env.GATE_FOR=4 1")
    words = ["tune", str(recipe), "--backend", "sbatch", "--knobs", "micro-batch", "--trials", "3", "--json", *held]
    # The second trial runs on a node, and waits; the same command goes on with its job.
    end_it(site, signal.SIGKILL, words, tmp_path / "killed", lambda _: bool(list(site.runs.glob(SECOND))))
    status = end_it(site, signal.SIGINT, words, tmp_path / "interrupted", lambda said: "trial 2" in said)
    assert status == 130
    assert slurm.run("squeue", "-h", "-t", "PENDING,RUNNING").stdout == "", "nothing runs on"
    gate.touch()
    done = site.run(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["changes"] == ["micro batch 4"] and found["trials"] == 3
    large = next(row for row in found["rows"] if row["change"] == "micro batch 8")
    assert large["why"].startswith("out of memory"), large

    def jobs() -> int:
        names = slurm.run("sacct", "-X", "-n", "-P", "-a", "-o", "JobName").stdout.split()
        return sum(name.startswith("small") for name in names)

    # The accounting hears of a job after its end.
    assert until(lambda: jobs() >= 4, 60, every=0.2)
    assert jobs() == 4, "nothing runs twice but what Ctrl-C ended"
