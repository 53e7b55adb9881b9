"""A run folder: made whole or refused, its manifest never half written, its attempts in order."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.rundir import atomic_io
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import RunFolder, create_run_folder, natural_order, write_atomically

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "runs", "r-1", {"job.sbatch": "#!/bin/bash\n"}, {"name": "r", "jobs": []})


def test_it_holds_what_the_job_needs(run: RunFolder) -> None:
    programs = [f"code/fp8launch/injob/{name}.py" for name in ("rank/worker", "rank/node", "supervisor/supervisor")]
    for name in ("manifest.json", "job.sbatch", *programs, "logs"):
        assert (run.path / name).exists()
    assert not list(run.path.rglob("*.pyc"))
    assert not list(run.path.rglob(".*"))
    assert run.script == run.path / "job.sbatch"


def test_the_code_in_it_runs_without_fp8launch(run: RunFolder, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", run.path / "code/fp8launch/injob/rank/node.py", "--help"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0])
def test_nothing_is_writable_for_everyone(tmp_path: Path, umask: Callable[[int], int], mask: int) -> None:
    umask(mask)
    run = create_run_folder(tmp_path / "runs", "r-1", {"job.sh": "x"}, {})
    run.update(jobs=[1])
    for path in (run.path, *run.path.rglob("*")):
        assert not path.stat().st_mode & stat.S_IWOTH, path


def test_bytecode_of_the_job_is_writable_for_nobody_else(tmp_path: Path, umask: Callable[[int], int]) -> None:
    """The job's Python keeps bytecode beside the code under the user's umask; the next attempt runs what is there."""
    umask(0o002)
    run = create_run_folder(tmp_path / "runs", "r-1", {"job.sh": "x"}, {})
    command = [sys.executable, "-S", run.path / "code/fp8launch/injob/supervisor/supervisor.py", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert list(run.path.rglob("*.pyc"))
    for path in (run.path / "code").rglob("*"):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path


def test_two_runs_cannot_share_a_folder(run: RunFolder) -> None:
    refused(create_run_folder, run.path.parent, "r-1", {}, {}, exit_code=3)
    assert run.manifest()["name"] == "r"


@pytest.mark.parametrize("root", ["/proc/fp8launch", "/dev/null/runs", "a file/runs", "x" * 300])
def test_a_root_that_cannot_be_written(root: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    problem = only(refused(create_run_folder, tmp_path / root, "r-1", {}, {}, exit_code=3))
    assert problem.code == "run-root"
    assert "--run-root" in str(problem.fix)


def test_a_root_that_is_read_only_for_this_user(tmp_path: Path) -> None:
    """As another user when this is root, whom no mode stops."""
    root = tmp_path / "runs"
    root.mkdir(mode=0o555)
    for above in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        above.chmod(0o755)
    child = os.fork()
    if child == 0:
        status = 9
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            problem = only(refused(create_run_folder, root, "r-1", {}, {}, exit_code=3))
            status = 0 if (problem.code, "Permission denied" in problem.message) == ("run-root", True) else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- manifest ---------------------------------------------------------------------------------------------------------


def test_update_keeps_what_it_does_not_set(run: RunFolder) -> None:
    run.update(jobs=[{"id": "1"}], extra="ü")
    assert run.manifest() == {"name": "r", "jobs": [{"id": "1"}], "extra": "ü"}


def test_a_crash_before_the_rename_leaves_the_old_manifest(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic_io.Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            run.update(name="new")
    assert run.manifest()["name"] == "r"
    assert not list(run.path.glob(".*"))


def test_a_full_disk_leaves_the_old_manifest(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_io.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            run.update(name="new")
    assert run.manifest()["name"] == "r"


def test_a_reader_and_a_kill_never_see_half_a_manifest(run: RunFolder) -> None:
    program = (
        "import sys, itertools; from pathlib import Path; from fp8launch.rundir.run_dir import RunFolder\n"
        "run = RunFolder(Path(sys.argv[1]))\n"
        "for n in itertools.count(): run.update(text=str(n) * 20_000, n=n)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program, run.path], env={**os.environ, "PYTHONPATH": str(LAUNCHERS)}
    )
    seen = set()
    end = time.monotonic() + 20
    while len(seen) < 20 and time.monotonic() < end:
        found = json.loads((run.path / "manifest.json").read_text())
        assert found.get("text", "") == str(found.get("n", "")) * 20_000
        seen.add(found.get("n"))
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert len(seen) >= 20
    assert run.manifest()["text"] == str(run.manifest()["n"]) * 20_000


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"a": 1'])
def test_a_damaged_manifest_is_reported(run: RunFolder, text: str) -> None:
    (run.path / "manifest.json").write_text(text)
    assert only(refused(run.manifest)).code == "bad-manifest"


def test_a_folder_without_a_manifest_is_no_run(tmp_path: Path) -> None:
    assert only(refused(RunFolder(tmp_path).manifest)).code == "no-manifest"


def test_an_atomic_write_follows_no_link_to_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "old"
    assert (tmp_path / "link").read_text() == "new"


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_attempts_come_in_the_order_in_which_they_started(run: RunFolder) -> None:
    for name in ("12-10", "12-2", "9-0", "100-0", "12-0"):
        (run.path / "logs" / f"{name}.log").touch()
    (run.path / "logs/12-0.exit").write_text("1\n")
    (run.path / "logs/12-2.exit").write_text("")
    for other in ("slurm-12.out", "notes.log", "12-x.log", "12-0.log.gz"):
        (run.path / "logs" / other).touch()
    found = [(a.job_id, a.restart, a.exit_status) for a in run.attempts()]
    assert found == [("9", 0, None), ("12", 0, 1), ("12", 2, None), ("12", 10, None), ("100", 0, None)]


def test_a_run_that_never_started_has_no_attempts(run: RunFolder) -> None:
    assert run.attempts() == []
    assert run.batch_output() == []


@pytest.mark.parametrize("job", ["123", "123_4", "123.pbs01", "123[4].pbs01.site.edu", "4711:99", "job-7f3a"])
def test_every_scheduler_has_its_own_job_ids(tmp_path: Path, job: str) -> None:
    run = create_run_folder(tmp_path, "r-1", {}, {"name": "r", "jobs": [{"id": job}]})
    for restart, status in ((0, 1), (1, 0)):
        (run.path / "logs" / f"{job}-{restart}.log").write_text("iteration\n")
        (run.path / "logs" / f"{job}-{restart}.exit").write_text(f"{status}\n")
    assert job_ids(run) == [job]
    assert [(one.job_id, one.restart, one.exit_status) for one in run.attempts()] == [(job, 0, 1), (job, 1, 0)]


def test_job_ids_are_in_the_order_of_their_numbers() -> None:
    assert sorted(["10.pbs01", "9.pbs01", "9_10", "9_2"], key=natural_order) == ["9.pbs01", "9_2", "9_10", "10.pbs01"]
