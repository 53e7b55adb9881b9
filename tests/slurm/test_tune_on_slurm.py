"""`fp8launch tune` on a real Slurm: trials are jobs, and a killed command goes on with the job that it was at."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from cluster.processes import until
from launching import ROOT, Site, sets

MACHINE = ROOT / "tests" / "tuning" / "machine.py"


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
    command = subprocess.Popen([sys.executable, "-m", "fp8launch", *words], env=site.env, cwd=ROOT)
    try:
        # The second trial runs on a node, and waits.
        assert until(lambda: bool(list(site.runs.glob("*/small-4-*/logs/*-0.log"))), 240)
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    gate.touch()
    done = site.run(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["changes"] == ["micro batch 4"] and found["trials"] == 3
    large = next(row for row in found["rows"] if row["change"] == "micro batch 8")
    assert large["why"].startswith("out of memory"), large
    jobs = slurm.run("sacct", "-X", "-n", "-P", "-a", "-o", "JobName").stdout.split()
    assert sum(name.startswith("small") for name in jobs) == 3, "nothing runs twice"
