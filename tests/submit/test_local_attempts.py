"""A laptop, or one node without Slurm: attempts, resuming and checkpoint retention as on a cluster, by real processes.

The supervisor is the real one. The training is a few lines of Python that save checkpoints as Megatron does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import wait_for

from fp8launch.injob.local_job import LocalProcesses
from fp8launch.injob.supervisor.failures import ALL_WRITTEN
from fp8launch.rundir.registry import find_run

Site = Any
# Trains from the tracker's iteration to 20, or to the end of its phase, saving every 5; breaks off where the file
# `breaks` names an iteration.
TRAINING = """
import os, sys, time, zipfile
from pathlib import Path
saved = Path(sys.argv[sys.argv.index("--save") + 1])
tracker = saved / "latest_checkpointed_iteration.txt"
start = int(tracker.read_text()) if tracker.exists() else 0
assert ("--load" in sys.argv) == (start > 0), sys.argv
print(" loaded", start)
breaks = Path({folder!r}) / "breaks"
end = int(sys.argv[sys.argv.index("--exit-interval") + 1]) if "--exit-interval" in sys.argv else 20
for iteration in range(start + 1, end + 1):
    values = "elapsed time per iteration (ms): 1.0 | lm loss: 1.0"
    print(f" [2026-01-01 00:00:00] iteration {{iteration:8d}}/      20 | {{values}} |", flush=True)
    if iteration % 5 == 0:
        part = saved / f"iter_{{iteration:07d}}/mp_rank_00/model_optim_rng.pt"
        part.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(part, "w") as archive:
            archive.writestr("data.pkl", b"weights")
        tracker.write_text(str(iteration))
    if breaks.exists() and breaks.read_text().split()[:1] == [str(iteration)]:
        breaks.write_text(" ".join(breaks.read_text().split()[1:]))
        print("Segmentation fault", file=sys.stderr)
        sys.exit(139)
    if (Path({folder!r}) / f"stop-{{iteration}}").exists():
        time.sleep(300)
"""


@pytest.fixture
def laptop(in_memory: Site, tmp_path: Path) -> Site:
    """fp8launch with the local scheduler; `breaks` in the test's folder says where the training breaks off."""
    training = tmp_path / "training.py"
    training.write_text(TRAINING.format(folder=str(tmp_path)))
    python = tmp_path / "python"
    here = sys.executable
    python.write_text(
        f'#!/bin/sh\ncase "$1" in\n*supervisor.py) exec {here} "$@";;\n*) exec {here} {training} "$@";;\nesac\n'
    )
    python.chmod(0o755)
    in_memory.backend = "local"
    sets = (f"launch.python={python}", f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.interval=5")
    in_memory.options = tuple(word for one in sets for word in ("--set", one))
    return in_memory


def log_of(run: str) -> list[dict[str, Any]]:
    attempts: list[dict[str, Any]] = json.loads((find_run(run).path / "attempts.json").read_text())["attempts"]
    return attempts


def test_an_interrupted_run_continues_automatically(laptop: Site, tmp_path: Path) -> None:
    (tmp_path / "breaks").write_text("7 13")
    run = laptop.submit("--attempts", "4", "--wait").name
    found = find_run(run)
    assert laptop.state(run)["state"] == "completed"
    assert [(one["before"], one["after"], one["cause"]) for one in log_of(run)] == [
        (0, 5, "segfault"), (5, 10, "segfault"), (10, 20, "finished"),
    ]  # fmt: skip
    assert [attempt.exit_status for attempt in found.attempts()] == [139, 139, 0]
    assert "3 attempts" in laptop("runs", run).out
    assert len(laptop.state(run)["jobs"]) == 1, "one process from the first attempt to the last"


def test_all_attempts_are_used_and_resume_gives_more(laptop: Site, tmp_path: Path) -> None:
    (tmp_path / "breaks").write_text("7 13")
    run = laptop.submit("--wait", expect=1).name
    state = laptop.state(run)
    assert (state["state"], state["exit_code"], state["resumes_from"]) == ("failed", 139, 5)
    assert "`fp8launch resume` continues from iteration 5" in laptop("runs", run).out
    assert "continues from iteration 5" in laptop("resume", run, "--attempts", "2", "--wait").err
    assert laptop.state(run)["state"] == "completed"
    assert [one["after"] for one in log_of(run)] == [5, 10, 20]
    assert "[run-done]" in laptop("resume", run, expect=1).err


def has_reached(log: Path, iteration: int) -> bool:
    return log.exists() and f"iteration {iteration:8d}/" in log.read_text()


def test_a_killed_launcher_is_the_cause(laptop: Site, tmp_path: Path) -> None:
    """SIGKILL leaves no line in the log: the cause was `unknown`, and the run stopped."""
    (tmp_path / "stop-7").touch()
    (tmp_path / "stop-13").touch()
    run = laptop.submit("--attempts", "2").name
    folder = find_run(run).path
    for attempt, iteration in enumerate((7, 13)):
        log = folder / f"logs/local-{attempt}.log"
        wait_for(partial(has_reached, log, iteration))
        (tmp_path / f"stop-{iteration}").unlink()
        [launcher] = LocalProcesses(str(folder)).launchers
        os.kill(launcher, signal.SIGKILL)
    laptop.wait(run, "failed")
    first, second = log_of(run)
    assert [(one["after"], one["cause"]) for one in (first, second)] == [(5, "killed"), (10, "killed")]
    assert first["then"].startswith("killed (most often by the kernel, for the node's memory): another attempt follows")
    assert "all attempts are used" in second["then"]
    report = json.loads(laptop("parse", run, "--json", expect=1).out)
    assert (report["status"], report["failure"]["code"]) == ("failed", "killed")


def test_without_attempts_a_run_may_be_resumed(laptop: Site, tmp_path: Path) -> None:
    (tmp_path / "breaks").write_text("12")
    run = laptop.submit("--wait", expect=1).name
    laptop("resume", run, "--wait")
    logs = [attempt.log.read_text() for attempt in find_run(run).attempts()]
    assert [" loaded 0" in logs[0], " loaded 10" in logs[1]] == [True, True]


def test_only_the_newest_checkpoints_stay(laptop: Site, tmp_path: Path) -> None:
    laptop.submit("--set", "checkpoint.keep=2", "--wait")
    assert sorted(folder.name for folder in (tmp_path / "saved").glob("iter_*")) == ["iter_0000015", "iter_0000020"]


def test_a_cancelled_run_ends_and_may_be_resumed(laptop: Site, tmp_path: Path) -> None:
    (tmp_path / "stop-11").touch()
    run = laptop.submit("--attempts", "5").name
    tracker = tmp_path / "saved/latest_checkpointed_iteration.txt"
    while not (tracker.exists() and tracker.read_text() == "10"):
        laptop.wait(run, "running")
    assert "is running" in laptop("resume", run, expect=1).err
    laptop("cancel", run)
    laptop.wait(run, "cancelled")
    (tmp_path / "stop-11").unlink()
    laptop("resume", run, "--wait")
    assert laptop.state(run)["state"] == "completed"


def test_there_is_no_time_limit_and_no_other_node(laptop: Site) -> None:
    run = laptop.submit("--set", "resources.time=00:01:00", "--set", "survive.hang_after=30", "--wait").name
    plan = json.loads((find_run(run).path / "survive.json").read_text())
    assert (plan["continue_by"], plan["hang"]["after"], "limit" in plan) == ("rerun", 30, False)
    assert set(plan["rules"].values()) == {"go-on", "free", "stop"}
    assert log_of(run)[0]["until"] - log_of(run)[0]["began"] > 86400


def test_phases_follow_each_other_over_failures(laptop: Site, tmp_path: Path, write: Any) -> None:
    phases = write("p.yaml", "extends: tiny_cpu\nname: p\nphases: {a: {iterations: 10}, b: {}}\n")
    (tmp_path / "breaks").write_text("7 13")
    run = laptop.submit("--attempts", "3", "--wait", recipe=phases).name
    assert laptop.state(run)["state"] == "completed"
    assert [(one["phase"], one["before"], one["after"], one["cause"], one["counts"]) for one in log_of(run)] == [
        ("a", 0, 5, "segfault", True), ("a", 5, 10, "phase-end", False),
        ("b", 10, 10, "segfault", True), ("b", 10, 20, "finished", True),
    ]  # fmt: skip


def test_a_phase_that_stops_is_continued_by_resume(laptop: Site, tmp_path: Path, write: Any) -> None:
    phases = write("p.yaml", "extends: tiny_cpu\nname: p\nphases: {a: {iterations: 10}, b: {}}\n")
    (tmp_path / "breaks").write_text("13")
    run = laptop.submit("--wait", recipe=phases, expect=1).name
    laptop("resume", run, "--wait")
    assert [(one["phase"], one["cause"]) for one in log_of(run)] == [
        ("a", "phase-end"), ("b", "segfault"), ("b", "finished"),
    ]  # fmt: skip


def test_an_abort_after_the_end_does_not_make_a_run_fail(laptop: Site, tmp_path: Path) -> None:
    """Once rank 0 has said that everything is written, the exit status of the processes says nothing."""
    training = tmp_path / "training.py"
    training.write_text(f"import os\nprint({ALL_WRITTEN!r}, flush=True)\nos.abort()\n")
    unsaved = ("--set", "checkpoint.dir=null", "--set", "checkpoint.interval=null")
    run = laptop.submit(*unsaved, "--wait").name
    assert laptop.state(run)["state"] == "completed"
    training.write_text("import os\nprint('trained', flush=True)\nos.abort()\n")
    run = laptop.submit(*unsaved, "--wait", expect=1).name
    assert laptop.state(run)["state"] == "failed"
