"""Two users of one Slurm and one run root: each runs only what is his own, whatever the other does meanwhile."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, config
from cluster.processes import until

NAMES = ("fp8alice", "fp8bob")
TEAM = "fp8team"
STUDY = ("--over", "megatron.seed=1,2", "--study", "s", "--yes")


class User:
    """A user of the test cluster, with a home of his own and a run root that others have too."""

    def __init__(self, name: str, slurm: Cluster, folder: Path, runs: Path) -> None:
        self.name = name
        self.home = folder / name
        self.home.mkdir()
        os.chown(self.home, pwd.getpwnam(name).pw_uid, grp.getgrnam(TEAM).gr_gid)
        self.runs = runs
        self.env = {
            **slurm.env, "HOME": str(self.home), "USER": name, "FP8LAUNCH_RUNS": str(runs), "FP8LAUNCH_OFFLINE": "1",
            "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        self.python = sys.executable
        # Says who ran, and whose code.
        self.program = self.home / "program"
        self.program.write_text('#!/bin/sh\necho "ran as $(id -un) with $(stat -c %U "$1")"\n')
        self.program.chmod(0o755)
        self.profile = self.home / "site.yaml"
        self.profile.write_text("options: {begin: now+2days}\n")

    def do(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program as this user, whose new files are writable for the team as far as he can."""
        team = ["setpriv", f"--reuid={self.name}", f"--regid={TEAM}", "--clear-groups", "--"]
        words = [*team, "sh", "-c", 'umask 002; exec "$@"', "sh", *command]
        return subprocess.run(
            words, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=600, check=False
        )

    def __call__(self, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.do(self.python, "-m", "fp8launch", *arguments)
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    def submit(self, *more: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        recipe = ("submit", "tiny_cpu", "--set", f"launch.python={self.program}", "--backend", "sbatch")
        return self(*recipe, "--cluster", str(self.profile), *more, expect=expect)

    def state(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("runs", run, "--json").stdout)[0]
        return found

    def start(self, run: str) -> None:
        """Let a job that waits begin."""
        record = json.loads((self.runs / run / "manifest.json").read_text())
        job = record["jobs"][-1]["id"]
        done = self.do("scontrol", "update", f"JobId={job}", "StartTime=now")
        assert done.returncode == 0, done.stderr

    def wait(self, run: str) -> dict[str, Any]:
        assert until(lambda: self.state(run)["state"] in ("completed", "failed"), 600), self.state(run)
        return self.state(run)


def why_not() -> str | None:
    """Why there cannot be two users here; None if there can."""
    if os.geteuid():
        return "only root can be two users"
    for tool in ("useradd", "userdel", "groupadd", "setpriv"):
        if shutil.which(tool) is None:
            return f"needs {tool}: apt-get install passwd util-linux"
    if any(name in {entry.pw_name for entry in pwd.getpwall()} for name in NAMES):
        return f"this machine has a user {NAMES[0]} or {NAMES[1]} already"
    return None


def can_run(user: User) -> bool:
    """Give the user a Python that has fp8launch; this one, or the system's where this one is in a private home."""
    minor = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = [path for path in sys.path if path.endswith(("launchers", "site-packages"))]
    for python in (sys.executable, shutil.which(minor, path="/usr/bin:/usr/local/bin")):
        if python is not None:
            user.python = python
            user.env["PYTHONPATH"] = ":".join(packages)
            if user.do(python, "-c", "import fp8launch.cli, pydantic, yaml").returncode == 0:
                return True
    return False


@pytest.fixture(scope="module")
def people() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    subprocess.run(["groupadd", TEAM], check=True)
    try:
        for name in NAMES:
            subprocess.run(["useradd", "--no-create-home", "--gid", TEAM, "--shell", "/bin/sh", name], check=True)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["userdel", name], check=False, capture_output=True)
        subprocess.run(["groupdel", TEAM], check=False, capture_output=True)


@pytest.fixture
def users(slurm: Cluster, people: None) -> Iterator[tuple[User, User]]:
    """Alice and Bob, and a run root that their team may write to, with the sticky bit."""
    folder = Path(tempfile.mkdtemp(prefix="fp8users-"))
    folder.chmod(0o755)
    runs = folder / "runs"
    runs.mkdir()
    os.chown(runs, 0, grp.getgrnam(TEAM).gr_gid)
    runs.chmod(0o3775)
    alice, bob = (User(name, slurm, folder, runs) for name in NAMES)
    for name in NAMES:
        slurm.run("sacctmgr", "-i", "add", "user", name, f"account={config.ACCOUNT}", check=False)
    try:
        if not all(map(can_run, (alice, bob))):
            pytest.skip(f"other users cannot run {sys.executable} with this checkout")
        yield alice, bob
    finally:
        for name in NAMES:
            with suppress(Exception):
                slurm.run("scancel", "-u", name, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_root_in_which_the_team_may_rename_is_refused(users: tuple[User, User]) -> None:
    alice = users[0]
    alice.runs.chmod(0o2775)
    for user in users:
        refused = user.submit(expect=3)
        assert "[run-root-shared]" in refused.stderr and f"the group {TEAM}" in refused.stderr
    assert list(alice.runs.iterdir()) == []
    # Those who trust their team say so.
    alice.profile.write_text("options: {begin: now+2days}\ntrust_run_root: true\n")
    assert alice.submit().returncode == 0
    # Never everybody.
    alice.runs.chmod(0o2777)
    assert "[run-root-shared]" in alice.submit("--set", "train.iterations=9", expect=3).stderr


def test_a_waiting_job_runs_what_its_owner_submitted(users: tuple[User, User]) -> None:
    """Bob knows where Alice's job waits, and swaps, writes, links and plants what he can."""
    alice, bob = users
    run = alice.submit().stdout.split()[-1]
    folder = alice.runs / run
    worker = folder / "code/fp8launch/injob/rank/worker.py"
    evil = bob.home / "evil"
    bob.do("sh", "-c", f"echo 'raise SystemExit(9)' > {evil}")
    attacks = [
        f"mv {folder} {folder}.old", f"rm -rf {folder}", f"cp {evil} {worker}", f"mv {worker} {worker}.old",
        f"mkdir {worker.parent}/__pycache__", f"cp {evil} {folder}/job.sbatch", f"ln -s {evil} {folder}/code/json.py",
        f"chmod -R 777 {folder}", f"mkdir {folder}/x", f"touch {folder}/logs/x", f"ln -sfn {bob.home} {folder}",
        f"rm -f {folder}/manifest.json", f"cp {evil} {folder}/manifest.json", f"mkfifo {folder}/logs/1-0.log",
    ]  # fmt: skip
    for attack in attacks:
        bob.do("sh", "-c", attack)
    assert not [path for path in (folder / "x", folder / "logs/x") if path.exists()]
    planted = worker.parent / "__pycache__"  # Alice's own processes may make one
    assert not planted.exists() or planted.stat().st_uid == pwd.getpwnam(alice.name).pw_uid
    alice.start(run)
    assert alice.wait(run)["state"] == "completed"
    logs = "".join(log.read_text() for log in (folder / "logs").glob("*.log"))
    assert f"ran as {alice.name} with {alice.name}" in logs


def test_nobody_acts_on_the_run_of_another(users: tuple[User, User]) -> None:
    alice, bob = users
    run = alice.submit().stdout.split()[-1]
    assert run in bob("runs").stdout
    for verb in ("cancel", "resume"):
        assert "[not-yours]" in bob(verb, run, expect=1).stderr
    assert alice.state(run)["state"] == "pending"
    # A run of Bob's that lists Alice's job as its own: neither of them ends it by that.
    mine = bob.submit().stdout.split()[-1]
    manifest = bob.runs / mine / "manifest.json"
    record = json.loads(manifest.read_text())
    record["jobs"] = json.loads((alice.runs / run / "manifest.json").read_text())["jobs"]
    written = bob.do("sh", "-c", f"cat > {manifest} <<'END'\n{json.dumps(record)}\nEND")
    assert written.returncode == 0, written.stderr
    bob.do(bob.python, "-m", "fp8launch", "cancel", mine)
    assert "[not-yours]" in alice("cancel", mine, expect=1).stderr
    assert alice.state(run)["state"] == "pending"
    assert alice("cancel", "latest").returncode == 0
    assert alice.state(run)["state"] == "cancelled"


def test_a_study_that_another_user_planted_is_left_alone(users: tuple[User, User]) -> None:
    """The identifiers of a study can be computed by anybody, so Bob is there first with a script of his own."""
    alice, bob = users
    assert bob.submit(*STUDY).returncode == 0
    folder = next(path for path in bob.runs.iterdir() if (path / "study.json").exists())
    canary = bob.home / "canary"
    for script in folder.rglob("*.sbatch"):
        bob.do("sh", "-c", f"printf '#!/bin/sh\\nid -un > {canary}\\n' > {script}")
    for more in ((), ("--retry-failed",)):
        assert "[not-yours]" in alice.submit(*STUDY, *more, expect=3).stderr
    assert alice.do("squeue", "-h", "-u", alice.name).stdout == ""
    assert "[not-yours]" in alice("cancel", folder.name, expect=1).stderr
    assert not canary.exists()
    # The same study in a folder of her own.
    assert alice.submit(*STUDY[:3], "alices", "--yes").returncode == 0


def test_an_empty_folder_that_waits_for_a_study_is_left_alone(users: tuple[User, User]) -> None:
    alice, bob = users
    made = bob.do("sh", "-c", f"mkdir -m 777 -p {bob.runs}/s/arrays {bob.runs}/s/logs; chmod -R 777 {bob.runs}/s")
    assert made.returncode == 0
    assert "[not-yours]" in alice.submit(*STUDY, expect=3).stderr
    assert alice.do("squeue", "-h", "-u", alice.name).stdout == ""
    assert list((bob.runs / "s/arrays").iterdir()) == []


def test_both_submit_to_one_root(users: tuple[User, User]) -> None:
    alice, bob = users
    runs = {user: user.submit().stdout.split()[-1] for user in users}
    for user, run in runs.items():
        user.start(run)
    for user, run in runs.items():
        assert user.wait(run)["state"] == "completed"
        logs = "".join(log.read_text() for log in (user.runs / run / "logs").glob("*.log"))
        assert f"ran as {user.name} with {user.name}" in logs
    # Each reads the other's.
    assert alice("logs", runs[bob]).returncode == 0
    assert {row["run"] for row in json.loads(bob("runs", "--json").stdout)} >= set(runs.values())
