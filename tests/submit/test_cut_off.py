"""A launcher that is killed on a machine without Slurm: the same command completes the run, which starts once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from support import wait_for

from fp8launch.injob.supervisor.run_records import new_submission
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.submit import submission
from fp8launch.submit.submission import describe_without_job, under_way

ROOT = Path(__file__).parents[2]
KILLED = [sys.executable, str(ROOT / "tests/killed_launcher.py")]
FP8LAUNCH = [sys.executable, "-m", "fp8launch"]


@pytest.fixture
def launch(home: Path, tmp_path: Path) -> Callable[..., Any]:
    """`submit` of a run whose "training" leaves a line for each time that it is started."""
    python = tmp_path / "python"
    # It runs until `go` is there, so that a command that is given again always meets a training that goes on.
    python.write_text(
        f"#!/bin/sh\necho started >> {tmp_path}/starts\n"
        f"for n in $(seq 600); do [ ! -e {tmp_path}/go ] || exit 0; sleep 0.1; done\n"
    )
    python.chmod(0o755)
    submit = ["submit", "tiny_cpu", "--backend", "local", "--set", f"launch.python={python}"]

    def run(program: list[str], *more: str, stdout: int | None = None, **env: str) -> Any:
        """The finished launcher, or with `stdout` the one that runs and writes there."""
        own = {"HOME": str(home), "FP8LAUNCH_RUNS": str(home / "runs"), "KILL_BELOW": f"{home}/", **env}
        if stdout is not None:
            command, env = [*program, *submit, *more], {**os.environ, **own}
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)
        return subprocess.run(
            [*program, *submit, *more], cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize(
    ("step", "offset"),
    [
        ("os.rename runs/RUN", 0),
        ("os.rename runs/RUN", 1),
        ("command bash", 0),
        ("command bash", 1),
        # Everything is recorded, but the user was not notified.
        ("last os.rename runs/RUN/manifest.json", 0),
    ],
)
def test_the_same_command_completes_a_run(
    launch: Callable[..., Any], home: Path, tmp_path: Path, step: str, offset: int
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


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--wait"]], ids=["submit", "wait"])
def test_killed_at_any_step_the_same_command_begins_no_second_run(
    launch: Callable[..., Any], home: Path, tmp_path: Path, more: list[str]
) -> None:
    """From the moment at which its folder is whole to the last sign of it, output included."""
    go, log = tmp_path / "go", tmp_path / "steps"
    if more:
        go.touch()
    assert launch(FP8LAUNCH, *more).returncode == 0  # it makes folders that the others find
    assert launch(KILLED, *more, KILL_LOG=str(log)).returncode == 0
    steps = log.read_text().splitlines()
    assert "print 1" in steps and "print 2" in steps
    known = set((home / "runs").glob("tiny_cpu-*"))
    first = steps.index("print 2") if more else steps.index("os.rename runs/RUN") + 1
    for at in range(first + 1, len(steps) + 1):
        assert launch(KILLED, *more, KILL_AT=str(at)).returncode == -9, at
        done = launch(FP8LAUNCH, *more)
        assert done.returncode == 0, done.stderr
        new = set((home / "runs").glob("tiny_cpu-*")) - known
        assert [run.name for run in new] == [done.stdout.split()[-1]], f"killed before {steps[at - 1]}"
        known |= new
    go.touch()
    wait_for(lambda: all(list(run.glob("logs/*.exit")) for run in known))
    assert (tmp_path / "starts").read_text().count("started") == len(known)


def test_the_same_command_completes_a_run_whose_launcher_was_killed_in_its_output(
    launch: Callable[..., Any], home: Path, tmp_path: Path
) -> None:
    """The name of the run, the last line, waits in front of a full pipe when the launcher is killed."""
    _, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, b"x" * 4096)
    os.set_blocking(full, True)
    launcher = launch(FP8LAUNCH, stdout=full)
    assert launcher.stderr is not None
    assert "submitted" in launcher.stderr.readline()
    wait_for(lambda: all(_sleeps(launcher.pid) for _ in range(20)))
    launcher.kill()
    launcher.wait()
    assert launch(FP8LAUNCH).returncode == 0
    [run] = (home / "runs").glob("tiny_cpu-*")
    (tmp_path / "go").touch()
    wait_for(lambda: list(run.glob("logs/*.exit")))
    assert (tmp_path / "starts").read_text().count("started") == 1
    # From here on the user knows.
    assert launch(FP8LAUNCH).returncode == 0
    assert len(list((home / "runs").glob("tiny_cpu-*"))) == 2


def _sleeps(pid: int) -> bool:
    time.sleep(0.05)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


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


def test_a_launcher_on_another_host_is_waited_for(in_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one name are several login nodes: nobody can see from the second whether the first was cut off."""
    first = RunFolder(Path(in_memory.json("submit", "tiny_cpu", "--backend", in_memory.backend)[0]["folder"]))

    def cut_off(**entries: Any) -> None:
        entry = {**first.manifest()["submission"], "host": "login2", "reported": False, **entries}
        first.update(submission=entry)

    monkeypatch.setattr(submission, "HELD_SECONDS", 0.3)
    cut_off()
    busy = in_memory.submit(expect=3)
    assert "login2" in busy.err and "repeat the command in" in busy.err
    monkeypatch.setattr(submission, "HELD_SECONDS", 30.0)
    alive = threading.Timer(0.3, lambda: cut_off(reported=True))
    alive.start()
    second = in_memory.submit().name
    alive.join()
    assert second != first.run_id
    cut_off(begun=datetime.fromtimestamp(time.time() - 600, timezone.utc).isoformat())
    assert in_memory.submit().name == first.run_id
    # It waits for the end of its run, however long that takes.
    cut_off(begun=datetime.fromtimestamp(time.time() - 600, timezone.utc).isoformat(), waiting=True)
    assert in_memory.submit().name not in (first.run_id, second)
    assert len(in_memory.memory.jobs) == 3
