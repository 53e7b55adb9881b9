"""Stages on a real Slurm: held jobs, released one after the other by the end of the stage before."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.processes import until
from launching import Site

from fp8launch.injob.supervisor import checkpoints

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.needs_plugin("stages")]

# The first stage is two jobs, because `continue_by: dependency` starts the second phase as a job of its own.
RECIPE = """\
name: three
stages:
  - name: first
    recipe: tiny_cpu
    set:
      train.iterations: 20
      checkpoint: {dir: ckpt, interval: 10}
      phases: {one: {iterations: 10}, two: {}}
  - name: second
    recipe: tiny_cpu
    from: first
    set: {train.iterations: 300, megatron.finetune: true, checkpoint: {dir: ckpt, interval: 20}}
  - name: third
    recipe: tiny_cpu
    from: second
    set: {train.iterations: 5, megatron.finetune: true}
"""


def reaches(runs: Path, condition: Callable[[], object], seconds: float = 300) -> None:
    if not until(condition, seconds, 0.5):
        raise AssertionError("".join(file.read_text() for file in sorted(runs.glob("*/logs/slurm-*.out"))))


def test_a_stage_in_two_jobs_and_one_that_fails(site: Site) -> None:
    file, profile = site.folder / "three.yaml", site.folder / "site.yaml"
    file.write_text(RECIPE)
    profile.write_text("continue_by: dependency\n")
    study = site.submit("--backend", "sbatch", "--cluster", str(profile), "--yes", recipe=str(file))
    runs = site.runs / study
    first, second, third = (runs / point["run"] for point in json.loads((runs / "study.json").read_text())["points"])

    def jobs(run: Path) -> list[str]:
        return [job["id"] for job in json.loads((run / "manifest.json").read_text())["jobs"]]

    def state(run: Path) -> str:
        return str(site.state(str(run))["state"])

    assert len(jobs(first)) == len(jobs(second)) == len(jobs(third)) == 1
    assert "JobHeldUser" in site.slurm.run("squeue", "-h", "-j", jobs(third)[0], "-o", "%r").stdout
    assert f"waits for {second.name}" in site.run("runs", study).stdout
    # Repeating the command submits nothing.
    assert site.submit("--backend", "sbatch", "--cluster", str(profile), "--yes", recipe=str(file)) == study
    assert len(jobs(first)) == len(jobs(second)) == len(jobs(third)) == 1

    reaches(runs, lambda: checkpoints.latest(second / "ckpt") >= 20)
    attempts = json.loads((first / "attempts.json").read_text())["attempts"]
    assert len({attempt["job"] for attempt in attempts}) == 2
    assert "stage 2 of 3 (second)" in site.run("runs").stdout

    for process in (each for node in range(1, 5) for each in site.slurm.processes(f"node{node}")):
        with contextlib.suppress(OSError):
            if b"worker.py" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                os.kill(process.pid, signal.SIGKILL)
    reaches(runs, lambda: state(second) == "failed")
    assert state(third) == "pending"

    done = site.run("resume", study)
    assert done.returncode == 0, done.stderr
    assert "continues from iteration" in done.stderr
    reaches(runs, lambda: state(third) == "completed")
    assert [state(run) for run in (first, second, third)] == ["completed"] * 3
    assert len(jobs(second)) == 2 and len(jobs(third)) == 1
    done = site.run("resume", study)
    assert done.returncode == 1 and "all 3 stages" in done.stderr
    assert "stage 3 of 3 (third)" in site.run("runs").stdout
