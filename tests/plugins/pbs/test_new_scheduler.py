"""A scheduler that a site adds by a plugin alone: submitted, listed, cancelled, resumed, parsed, its health watched.

The plugin is installed like any package of a site, and fp8launch runs as a command. Its queue (`local_queue.py`) starts
real processes; only the training is a few lines of Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import wait_for

HERE = Path(__file__).parent
# Trains to iteration 20 and saves every 5, as Megatron does. The file `breaks` names an iteration where it fails, and
# `nan` one from which on its loss is NaN.
TRAINING = """
import os, sys, time, zipfile
from pathlib import Path
here = Path({folder!r})
saved = Path(sys.argv[sys.argv.index("--save") + 1])
tracker = saved / "latest_checkpointed_iteration.txt"
start = int(tracker.read_text()) if tracker.exists() else 0
nan = int((here / "nan").read_text()) if (here / "nan").exists() else 99
for iteration in range(start + 1, 21):
    values = f"elapsed time per iteration (ms): 10.0 | lm loss: {{'nan' if iteration >= nan else 1.0}}"
    print(f" [2026-01-01 00:00:00] iteration {{iteration:8d}}/      20 | {{values}} |", flush=True)
    if iteration % 5 == 0:
        part = saved / f"iter_{{iteration:07d}}/mp_rank_00/model_optim_rng.pt"
        part.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(part, "w") as archive:
            archive.writestr("data.pkl", b"weights")
        tracker.write_text(str(iteration))
    if (here / "breaks").exists() and (here / "breaks").read_text() == str(iteration):
        (here / "breaks").unlink()
        sys.exit("Segmentation fault")
    if (here / f"stop-{{iteration}}").exists():
        time.sleep(300)
"""


class Site:
    """fp8launch on a machine with this queue and the plugin."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        packages, commands = folder / "packages", folder / "bin"
        shutil.copytree(HERE / "toy_pbs", packages / "toy_pbs", ignore=shutil.ignore_patterns("__pycache__"))
        metadata = packages / "toy_pbs-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_pbs\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[fp8launch.plugins]\ntoy_pbs = toy_pbs.plugin:PLUGIN\n")
        commands.mkdir()
        for name in ("qsub", "qstat", "qdel"):
            self.program(commands / name, f'exec {sys.executable} {HERE / "local_queue.py"} {name} "$@"')
        training = folder / "training.py"
        training.write_text(TRAINING.format(folder=str(folder)))
        here = sys.executable
        self.program(
            folder / "python",
            f'case "$1" in\n*supervisor.py) exec {here} "$@";;\n*) exec {here} {training} "$@";;\nesac',
        )
        (folder / "queue").mkdir()
        path = f"{commands}:{os.environ['PATH']}"
        self.env = {**os.environ, "HOME": str(home), "PATH": path, "TOY_PBS": str(folder / "queue")}
        self.env["PYTHONPATH"] = str(packages)
        self.env.pop("FP8LAUNCH_PLUGINS", None)

    @staticmethod
    def program(file: Path, body: str) -> None:
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def __call__(self, *words: str, expect: int = 0) -> str:
        command = [sys.executable, "-m", "fp8launch", *words]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout

    def submit(self, *words: str, expect: int = 0) -> str:
        stated = (f"launch.python={self.folder / 'python'}", f"checkpoint.dir={self.folder / 'saved'}")
        sets = [word for one in (*stated, "checkpoint.interval=5") for word in ("--set", one)]
        shown = self("submit", "tiny_cpu", "--backend", "pbs", *sets, *words, expect=expect)
        return Path(next(word for word in shown.split() if "tiny_cpu-" in word)).name

    def state(self, run: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self("runs", run, "--json"))[0]
        return answer

    def queue(self) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = json.loads(
            subprocess.run(["qstat"], env=self.env, capture_output=True, text=True, check=True).stdout
        )
        return jobs


@pytest.fixture
def site(tmp_path: Path, home: Path) -> Iterator[Site]:
    site = Site(tmp_path / "site", home)
    yield site
    for job in site.queue():
        if job["state"] != "F":
            subprocess.run(["qdel", job["id"]], env=site.env, check=True)


def test_a_run_is_submitted_listed_and_parsed(site: Site) -> None:
    run = site.submit("--wait")
    state = site.state(run)
    assert (state["state"], state["backend"], state["jobs"]) == ("completed", "pbs", ["123.pbs01"])
    assert run in site("runs")
    assert run in site("runs", "123.pbs01"), "a run is found by its job's id"
    report = json.loads(site("parse", run, "--json"))
    assert (report["status"], report["iterations"], report["step_time_ms"]["median"]) == ("ok", 20, 10.0)


def test_a_run_that_fails_continues_in_the_job_that_waits(site: Site) -> None:
    (site.folder / "breaks").write_text("7")
    run = site.submit("--attempts", "3", "--wait")
    state = site.state(run)
    assert (state["state"], state["jobs"]) == ("completed", ["123.pbs01", "124.pbs01"])
    # The second job submitted a third one when it began, and cancelled it when the training was done.
    assert [(job["state"], job["deleted"]) for job in site.queue()] == [("F", False), ("F", False), ("F", True)]
    report = json.loads(site("parse", run, "--json"))
    assert (report["status"], report["iterations"]) == ("ok", 20)


def test_a_failed_run_is_resumed(site: Site) -> None:
    (site.folder / "breaks").write_text("12")
    run = site.submit("--wait", expect=1)
    assert site.state(run)["resumes_from"] == 10
    site("resume", run, "--wait")
    assert site.state(run)["jobs"] == ["123.pbs01", "124.pbs01"]
    assert site.state(run)["state"] == "completed"


def test_a_run_and_the_job_that_waits_for_it_are_cancelled(site: Site) -> None:
    (site.folder / "stop-11").touch()
    run = site.submit("--attempts", "3")
    wait_for(lambda: site.state(run)["state"] == "running" and len(site.queue()) == 2, 60)
    site("cancel", run)
    wait_for(lambda: all(job["state"] == "F" for job in site.queue()), 30)
    assert site.state(run)["state"] == "cancelled"


def test_the_job_ends_a_training_whose_loss_is_nan(site: Site) -> None:
    (site.folder / "nan").write_text("8")
    (site.folder / "stop-14").touch()
    run = site.submit("--set", "health.actions.nan=stop", "--wait", expect=1)
    report = json.loads(site("parse", run, "--json", expect=1))
    assert "nan" in [finding["code"] for finding in report["health"]]
    assert "nan" in site("runs", run)
