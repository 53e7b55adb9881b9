"""A launcher that is killed on a machine without Slurm: the same command completes the run, which starts once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import wait_for

from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.submit.submission import describe_without_job, new_submission, under_way

ROOT = Path(__file__).parents[2]
KILLED = [sys.executable, str(ROOT / "tests/killed_launcher.py")]
FP8LAUNCH = [sys.executable, "-m", "fp8launch"]


@pytest.fixture
def launch(home: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`submit` of a run whose "training" leaves a line for each time that it is started."""
    python = tmp_path / "python"
    # It runs until `go` is there, so that a command that is given again always meets a training that goes on.
    python.write_text(
        f"#!/bin/sh\necho started >> {tmp_path}/starts\n"
        f"for n in $(seq 600); do [ ! -e {tmp_path}/go ] || exit 0; sleep 0.1; done\n"
    )
    python.chmod(0o755)
    submit = ["submit", "tiny_cpu", "--backend", "local", "--set", f"launch.python={python}"]

    def run(program: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        own = {"HOME": str(home), "FP8LAUNCH_RUNS": str(home / "runs"), "KILL_BELOW": f"{home}/", **env}
        return subprocess.run(
            [*program, *submit], cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize(
    ("step", "offset"),
    [
        ("os.rename runs/RUN", 0),
        ("os.rename runs/RUN", 1),
        ("command bash", 0),
        ("command bash", 1),
        # Everything is recorded but that the user was told.
        ("last os.rename runs/RUN/manifest.json", 0),
    ],
)
def test_the_same_command_completes_a_run(
    launch: Callable[..., subprocess.CompletedProcess[str]], home: Path, tmp_path: Path, step: str, offset: int
) -> None:
    log = tmp_path / "steps"
    assert launch(KILLED, KILL_LOG=str(log)).returncode == 0
    steps = log.read_text().splitlines()
    at = steps.index(step.removeprefix("last ")) + 1 + offset
    if step.startswith("last "):
        at = len(steps) - steps[::-1].index(step.removeprefix("last "))
    before = {path.name for path in (home / "runs").iterdir()}
    # The folders that are there by now are not made again.
    at -= sum(one == "os.mkdir runs" or ".local" in one or ".cache" in one for one in steps[:at])
    assert launch(KILLED, KILL_AT=str(at)).returncode == -9
    done = launch(FP8LAUNCH)
    assert done.returncode == 0, done.stderr
    new = [path for path in (home / "runs").iterdir() if path.name not in before and not path.name.startswith(".")]
    assert len(new) == 1
    manifest = json.loads((new[0] / "manifest.json").read_text())
    assert len(manifest["jobs"]) == 1
    (tmp_path / "go").touch()
    wait_for(lambda: list(new[0].glob("logs/*.exit")))
    assert (tmp_path / "starts").read_text().count("started") == 2, "once for each run"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunFolder]:
    def make(**submission: Any) -> RunFolder:
        manifest = {"jobs": [], "submission": {**new_submission("k"), **submission}}
        return create_run_folder(tmp_path, "r-1", {}, manifest, replace=True)

    return make


def test_whether_a_launcher_is_still_at_it(run: Callable[..., RunFolder]) -> None:
    parent = {"pid": os.getppid(), "started": "1"}
    assert not under_way(run(**parent)), "another process has the number by now"
    assert not under_way(run(pid=2**22 + 1))
    assert under_way(run(host="elsewhere"))
    assert not under_way(run(host="elsewhere", begun="2026-01-01T00:00:00+00:00"))
    assert under_way(run(host="elsewhere", begun="9999-01-01T00:00:00+00:00")), "a clock that is ahead"
    assert not under_way(run(host="elsewhere", begun="nonsense"))


def test_how_a_run_without_a_job_stands(run: Callable[..., RunFolder]) -> None:
    assert "interrupted" in describe_without_job(run())
    assert describe_without_job(run(host="elsewhere")) == "is being submitted"
    assert describe_without_job(run(answered=True, refused="no such partition")) == "refused: no such partition"


def test_one_launcher_at_a_time_holds_a_folder(tmp_path: Path) -> None:
    with held(tmp_path) as locked:
        assert locked
        began = time.monotonic()
        with pytest.raises(Busy), held(tmp_path, wait=0.3):
            pass
        assert time.monotonic() - began >= 0.3
    with held(tmp_path):
        pass


def test_ctrl_c_while_a_trial_is_submitted_ends_its_job(in_memory: Any) -> None:
    """The job began, and nothing of it was recorded."""
    in_memory.memory.interrupted = True
    in_memory("tune", "tiny_cpu", "--backend", in_memory.backend, "--trials", "1", "--knobs", "micro-batch", expect=130)
    assert [job.status for job in in_memory.memory.jobs.values()] == ["cancelled"]
