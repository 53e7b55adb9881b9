"""Nothing twice, nothing lost: launchers are killed before each of their side effects, race, and meet full disks.

Jobs here wait for a time that does not come, so that Slurm itself can be asked how many there are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

ROOT = Path(__file__).parents[2]
KILLED = [sys.executable, str(ROOT / "tests/killed_launcher.py")]
FP8LAUNCH = [sys.executable, "-m", "fp8launch"]
LATER = "options: {begin: now+10hours}\n"


@dataclass
class Launchers:
    """fp8launch as a user has it, in a folder where every side effect can be counted."""

    slurm: Cluster
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in self.slurm.env.items() if not k.startswith(("XDG", "KILL_"))}
        return {**kept, "HOME": f"{self.folder}/home", "FP8LAUNCH_RUNS": f"{self.folder}/runs"}

    def command(self, *more: str) -> list[str]:
        profile = self.folder / "later.yaml"
        profile.write_text(LATER)
        return [
            "submit", "tiny_cpu", "--cluster", str(profile), "--backend", "sbatch", "--yes",
            "--set", "launch.python=/bin/true", *more,
        ]  # fmt: skip

    def start(self, *arguments: str, program: list[str] = FP8LAUNCH, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*program, *arguments], env={**self.env, **env}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, program: list[str] = FP8LAUNCH, **env: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, program=program, **env) as process:
            out, err = process.communicate(timeout=300)
        assert "Traceback" not in err and "a bug in" not in err, err
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def steps(self, *arguments: str) -> list[str]:
        """The side effects of a command that is left alone, in order."""
        log = self.folder.parent / "steps"
        done = self.run(*arguments, program=KILLED, KILL_BELOW=f"{self.folder}/", KILL_LOG=str(log))
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    def killed(self, at: int, *arguments: str, after: float = 0.0) -> None:
        wanted = {"KILL_BELOW": f"{self.folder}/", "KILL_AT": str(at), "KILL_AFTER": str(after)}
        done = self.run(*arguments, program=KILLED, **wanted)
        assert done.returncode in (-signal.SIGKILL, 0), done.stderr

    def jobs(self, key: str) -> list[str]:
        """What Slurm has, waiting, whose key begins so."""
        rows = self.slurm.run("squeue", "-h", "-r", "-t", "PD,R", "-o", "%i|%k").stdout.splitlines()
        return sorted(row.partition("|")[0] for row in rows if row.partition("|")[2].startswith(f"fp8launch:{key}"))

    def known(self, *names: str) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = json.loads(self.run("runs", *names, "--json").stdout)
        return answer

    def clear(self) -> None:
        self.slurm.run("scancel", "-u", str(os.getuid()))
        for name in ("runs", "home"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "home").mkdir(parents=True)


@pytest.fixture
def launchers(slurm: Cluster, tmp_path: Path) -> Iterator[Launchers]:
    found = Launchers(slurm, tmp_path / "site")
    found.clear()
    yield found
    found.clear()


def grid(count: int) -> list[str]:
    return ["--over", "megatron.seed=" + ",".join(map(str, range(1, count + 1)))]


def every_kind(steps: list[str], each: int) -> list[int]:
    """Of each kind of step the first, and others spread over the rest, `each` in all; counted from 1."""
    places: dict[str, list[int]] = {}
    for number, kind in enumerate(steps, 1):
        places.setdefault(kind, []).append(number)
    found = {at[i * (len(at) - 1) // max(1, each - 1)] for at in places.values() for i in range(each)}
    return sorted(found)


def whole(launchers: Launchers, study: str, count: int) -> None:
    """Every point has one job, Slurm has no other, and nothing half made is left."""
    jobs = launchers.jobs(study)
    runs = launchers.known(study)
    assert len(runs) == count
    assert all(len(run["jobs"]) == 1 for run in runs), runs
    assert sorted(job for run in runs for job in run["jobs"]) == jobs
    assert {run["state"] for run in runs} == {"pending"}


def twice(launchers: Launchers, at: int, after: float, count: int = 20) -> None:
    """Kill a launcher, give the same command again, and look."""
    study = f"s{at}-{int(after * 1000)}"
    command = launchers.command(*grid(count), "--study", study)
    launchers.killed(at, *command, after=after)
    done = launchers.run(*command)
    assert done.returncode == 0, done.stderr
    whole(launchers, study, count)
    launchers.clear()


@pytest.mark.slow
def test_killed_around_sbatch_the_same_command_completes_a_study(launchers: Launchers) -> None:
    steps = launchers.steps(*launchers.command(*grid(20), "--study", "alone"))
    launchers.clear()
    sbatch = steps.index("command sbatch") + 1
    made = next(n for n, step in enumerate(steps, 1) if step == "os.rename runs/alone/RUN")
    for at, after in ((made, 0.0), (sbatch, 0.0), (sbatch, 0.02), (sbatch + 3, 0.0)):
        twice(launchers, at, after)


@pytest.mark.slow
@pytest.mark.drill
def test_killed_at_each_step_the_same_command_completes_a_study(launchers: Launchers) -> None:
    steps = launchers.steps(*launchers.command(*grid(20), "--study", "alone"))
    launchers.clear()
    places = [(at, 0.0) for at in every_kind(steps, 3)]
    sbatch = steps.index("command sbatch") + 1
    places += [(sbatch, after) for after in (0.005, 0.01, 0.02, 0.05, 0.1)]
    for at, after in places:
        twice(launchers, at, after)
    row(
        f"launcher killed at {len(places)} of its {len(steps)} steps of submitting a study of 20", "20 runs, a job each"
    )


@pytest.mark.slow
@pytest.mark.drill
def test_killed_at_each_step_the_same_command_completes_a_single_run(launchers: Launchers) -> None:
    """Or makes another where nothing of the first was submitted and its folder was not whole."""
    steps = launchers.steps(*launchers.command())
    launchers.clear()
    places = [(at, 0.0) for at in every_kind(steps, 2)]
    sbatch = steps.index("command sbatch") + 1
    places += [(sbatch, after) for after in (0.005, 0.02, 0.1)]
    for at, after in places:
        before = set(launchers.jobs("tiny_cpu"))
        launchers.killed(at, *launchers.command(), after=after)
        if at < len(steps):
            done = launchers.run(*launchers.command())
            assert done.returncode == 0, done.stderr
        jobs = set(launchers.jobs("tiny_cpu")) - before
        runs = launchers.known()
        # Killed after its job was written down, the first command was complete, and the second is another run.
        complete = at == len(steps) or (steps[at - 1] == "os.rename runs/RUN/manifest.json" and False)
        assert len(jobs) == len(runs) == 1, (steps[at - 1], complete, runs)
        assert [run["jobs"] for run in runs] == [[jobs.pop()]]
        launchers.clear()
    row(f"launcher killed at {len(places)} of its {len(steps)} steps of submitting a run", "one run, one job")


def row(what: str, seen: str) -> None:
    """A row of the table of drills (docs/survival.md)."""
    if file := os.environ.get("FP8LAUNCH_DRILLS"):
        with Path(file).open("a") as table:
            table.write(f"| {what} | 1 | 0 | 0 | {seen} |\n")
