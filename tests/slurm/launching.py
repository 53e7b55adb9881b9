"""fp8launch as a user runs it, on the test cluster and on this machine alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from support import wait_for

from fp8launch.logs import scan_file

ROOT = Path(__file__).parents[2]
TWO_BY_TWO = ["--nodes", "2", "--set", "resources.gpus_per_node=2"]


@dataclass(frozen=True)
class PyxisImage:
    """A .sqsh file, and the host paths without which it has neither a shell nor Python."""

    file: Path
    mounts: tuple[Path, ...]

    def profile(self, folder: Path, *lines: str) -> Path:
        """A cluster profile in `folder` whose image `tiny` is this one; `lines` are further lines of it."""
        mounts = ", ".join(f"{path}:{path}" for path in self.mounts)
        text = ["runtime: pyxis", f"images: {{tiny: {self.file}}}", f"mounts: [{mounts}]", *lines]
        path = folder / "pyxis.yaml"
        path.write_text("\n".join(text) + "\n")
        return path


class Site:
    """fp8launch as a user of the test cluster has it: a home, a run root, a Slurm."""

    def __init__(self, slurm: Cluster, folder: Path, python: Path | str = sys.executable) -> None:
        self.python = str(python)
        self.slurm = slurm
        self.folder = folder
        self.runs = folder / "runs"
        (folder / "home").mkdir()
        self.env = {**slurm.env, "HOME": str(folder / "home"), "FP8LAUNCH_RUNS": str(self.runs), "COLUMNS": "120"}
        for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            self.env.pop(name, None)

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.python, "-m", "fp8launch", *arguments],
                env={**self.env, **env},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            queries = (("scontrol", "show", "jobs"), ("sinfo", "--Node", "--long"), ("sinfo", "--list-reasons"))
            asked = "\n".join(self.slurm.run(*query).stdout for query in queries)
            pytest.fail(f"{late}\n{late.stdout!r}\n{late.stderr!r}\n{asked}")

    def submit(self, *arguments: str, recipe: str = "recipes/tiny_cpu.yaml", expect: int = 0) -> str:
        done = self.run("submit", recipe, *arguments)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout.split()[-1]

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def state(self, run: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.json("runs", run)[0]
        return answer

    def requeue(self, run: str) -> None:
        """Requeue a run's job, and see its training start again, without the two minutes that Slurm waits each time."""
        job = self.state(run)["jobs"][-1]
        logs = self.runs / run / "logs"
        before = len(list(logs.glob("*.log")))

        def started_again() -> bool:
            # Slurm sets the two minutes when the job has been cleaned up, and again if a node was not ready for it.
            self.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            return len(list(logs.glob("*.log"))) > before

        self.slurm.run("scontrol", "requeue", job)
        wait_for(lambda: "PENDING" in self.slurm.run("squeue", "-h", "-j", job, "-o", "%T").stdout, 60)
        # Slurm waits because the node still removes the old job, and would remove the new one's script with it.
        time.sleep(5)
        try:
            wait_for(started_again, 300)
        except AssertionError as late:
            seen = [
                self.slurm.run(*words, check=False) for words in (("scontrol", "show", "job", job), ("sinfo", "-R"))
            ]
            raise AssertionError("\n".join([str(late), *(str(one) for one in seen)])) from None

    def log(self, run: str) -> Path:
        return sorted((self.runs / run / "logs").glob("*-*.log"))[-1]


def train_here(folder: Path, *choices: str, timeout: float = 120) -> Path:
    """Train the tiny recipe in one process on this machine; the log."""
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "FP8LAUNCH_RUNS": str(folder / "runs"), "HOME": str(folder)}
    submit = ["submit", "recipes/tiny_cpu.yaml", "--backend", "local", "--wait", *choices]
    subprocess.run([sys.executable, "-m", "fp8launch", *submit], env=env, cwd=ROOT, check=True, timeout=timeout)
    return next((folder / "runs").glob("*/logs/*-*.log"))


def losses(log: Path) -> dict[int, float]:
    table = scan_file(log).table
    found = {table[i].number: table[i].loss for i in range(len(table))}
    return {number: loss for number, loss in found.items() if loss is not None}


def sets(*overrides: str) -> list[str]:
    return [word for one in overrides for word in ("--set", one)]


def from_weights(weights: Path) -> list[str]:
    """For comparing losses over layouts: at tiny_cpu's own learning rate bf16's rounding, which depends on the order of
    sums and on the processor, grows to percents in fifteen steps."""
    fresh = ("megatron.finetune=true", "megatron.no_load_optim=true", "megatron.no_load_rng=true")
    return sets(f"checkpoint.load={weights}", "train.lr=1.0e-3", "train.min_lr=1.0e-4", *fresh)
