"""Drills on Slurm itself: its controller or its accounting gone while a run is submitted, looked at, and trained."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from cluster.processes import until
from drilling import ITERATIONS, MODEL, SAVE, Chain, row
from launching import ROOT, Site

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.drill]
OUTAGE = 60


def test_controller_killed_during_submit(site: Site) -> None:
    """Whatever that submit says, the same one again completes it, and one job comes of it."""
    site.slurm.settle()
    site.slurm.stop_controller()
    choices = ["--backend", "sbatch", *MODEL, *SAVE]
    command = [sys.executable, "-m", "fp8launch", "submit", "recipes/tiny_cpu.yaml", *choices]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    first = subprocess.Popen(command, env=site.env, cwd=ROOT, **out)  # type: ignore[call-overload]
    began = time.monotonic()
    time.sleep(OUTAGE)
    site.slurm.start_controller()
    said = first.communicate(timeout=200)[0]
    assert first.returncode in (0, 3), said
    assert "Traceback" not in said
    words = " ".join(said.split())
    if first.returncode:
        assert re.search(r"controller|did not answer", words), words
        idle = lambda: site.slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.split()[:1] == ["4"]  # noqa: E731
        assert until(idle, 60)  # until its nodes have come back to it, Slurm refuses every job
        site.submit(*choices)
    assert time.monotonic() - began < 300
    [folder] = site.runs.glob("tiny_cpu-*")
    one = Chain(site, folder.name)
    assert site.slurm.run("squeue", "-h", "-t", "all", "-o", "%k").stdout.count(one.run) == 1
    one.over(240)
    assert site.json("parse", one.run)["iterations"] == ITERATIONS
    seen = re.search(r"error: .*", words)
    row("slurmctld dead for 60 s during `submit`", one, seen.group(0)[:160] if seen else "submitted, a minute later")


def test_controller_killed_while_training_ends_badly(chain: Callable[..., Chain]) -> None:
    """The attempt ends while nobody can be asked for another: the supervisor waits for the controller."""
    one = chain("--attempts", "3", profile="nodelist: node1\n")
    one.trained(40)
    one.site.slurm.settle()
    one.site.slurm.stop_controller()
    [rank] = one.ranks(1)
    os.kill(rank.pid, signal.SIGKILL)
    time.sleep(OUTAGE)
    one.site.slurm.start_controller()
    state = one.over(240)
    assert state["state"] == "completed"
    assert [a["cause"] for a in one.record["attempts"]] == ["killed", "finished"]
    assert one.site.json("parse", one.run)["iterations"] == ITERATIONS
    row("slurmctld dead for 60 s while a rank is killed", one, one.record["attempts"][0]["then"])


def test_controller_killed_during_a_run_and_during_runs(chain: Callable[..., Chain]) -> None:
    one = chain("--attempts", "2")
    one.trained(20)
    one.site.slurm.settle()
    one.site.slurm.stop_controller()
    looked = one.site.run("runs", one.run)
    assert looked.returncode in (0, 3) and "Traceback" not in looked.stderr
    shown = " ".join((looked.stdout + looked.stderr).split())
    assert "running" in shown or "unknown" in shown, shown  # by the accounting, where there is one
    resumed = one.site.run("resume", one.run)
    assert resumed.returncode in (1, 3), resumed.stderr  # it is running, or nobody can say
    time.sleep(OUTAGE)
    one.site.slurm.start_controller()
    state = one.over(240)
    assert (state["state"], len(one.record["attempts"])) == ("completed", 1)
    assert one.site.json("parse", one.run)["iterations"] == ITERATIONS
    told = next(line for line in resumed.stderr.splitlines() if "error" in line)
    row("slurmctld dead for 60 s during the run, `runs` and `resume`", one, told.strip()[:160])


def test_accounting_dead(site: Site, chain: Callable[..., Chain]) -> None:
    """slurmdbd is gone from before the submission to after the end."""
    site.slurm.stop_dbd()
    one = chain("--attempts", "2")
    one.trained(20)
    looked = one.site.run("runs", one.run)
    assert looked.returncode == 0 and "running" in looked.stdout, looked.stderr
    state = one.over(240)
    assert state["state"] == "completed", state
    assert site.json("parse", one.run)["iterations"] == ITERATIONS
    site.slurm.start_dbd()
    row("slurmdbd dead from before `submit` until after the run", one, "nothing: squeue and the run folder are enough")
