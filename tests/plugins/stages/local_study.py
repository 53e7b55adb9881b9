"""Run stages on this machine with the commands that a user would type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import train_jobs
from support import wait_for

from fp8launch.injob.local_job import LOCAL_RUN, processes_with, send


class LocalStudy:
    """A recipe with stages, submitted; `runs` has the run folder of each stage."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder = folder
        self.environment = {
            **train_jobs.job_environment(PYTHONPATH=f"{train_jobs.LAUNCHERS}:{os.environ.get('PYTHONPATH', '')}"),
            "HOME": str(folder),
            "FP8LAUNCH_RUNS": str(folder / "runs"),
        }
        del self.environment["FP8LAUNCH_DEVICE"]
        (folder / "stages.yaml").write_text(recipe)
        self.name = self.call("submit", "./stages.yaml", "--backend", "local", "--yes").stdout.strip()
        study = folder / "runs" / self.name
        points = json.loads((study / "study.json").read_text())["points"]
        self.runs = [study / point["run"] for point in points]

    def call(self, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fp8launch", *words]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    def state(self, run: Path) -> str:
        found = json.loads(self.call("runs", self.name, "--json").stdout)
        return next(str(each["state"]) for each in found if each["run"] == run.name)

    def completes(self, run: Path) -> None:
        """Wait until a run is complete, and fail with its logs if it ends otherwise."""
        wait_for(lambda: self.state(run) not in ("pending", "running"), 300)
        assert self.state(run) == "completed", "".join(log.read_text() for log in sorted(run.glob("logs/*")))[-6000:]

    def kill(self, run: Path) -> None:
        """Kill all processes of a run at once, so that none can react to the death of another."""
        while alive := set(processes_with(LOCAL_RUN, str(run))):
            send(signal.SIGSTOP, alive)
            send(signal.SIGKILL, alive)
