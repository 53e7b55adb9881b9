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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from cluster.processes import until

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
    return ["--sweep", "megatron.seed=" + ",".join(map(str, range(1, count + 1)))]


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
        f"launcher killed at {len(places)} of the {len(steps)} steps of submitting a study of 20",
        "20 runs, one job each",
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
        done = launchers.run(*launchers.command())
        assert done.returncode == 0, done.stderr
        jobs = sorted(set(launchers.jobs("tiny_cpu")) - before)
        runs = launchers.known()
        assert [run["jobs"] for run in runs] == [jobs], steps[at - 1]
        assert len(jobs) == 1, steps[at - 1]
        launchers.clear()
    row(f"launcher killed at {len(places)} of the {len(steps)} steps of submitting a run", "one run, one job")


def slow_sbatch(launchers: Launchers, before: str, after: str = ":") -> dict[str, str]:
    """The real sbatch between two commands, in front of PATH; `began` below the folder is its process id."""
    real = launchers.slurm.run("which", "sbatch").stdout.strip()
    wrapper = launchers.folder.parent / "bin" / "sbatch"
    wrapper.parent.mkdir(exist_ok=True)
    wrapper.write_text(
        f'#!/bin/bash\n[ "$1" = --parsable ] || exec {real} "$@"\necho $$ > {launchers.folder}/began\n'
        f'{before}\n{real} "$@"\nstatus=$?\n{after}\nexit $status\n'
    )
    wrapper.chmod(0o755)
    return {"PATH": f"{wrapper.parent}:{launchers.env['PATH']}"}


def wait_until_sbatch_began(launchers: Launchers) -> None:
    began = launchers.folder / "began"
    assert until(lambda: began.exists() and began.read_text() != "", 60)


def test_ctrl_c_waits_for_the_answer_of_sbatch(launchers: Launchers) -> None:
    env = slow_sbatch(launchers, "sleep 1")
    process = launchers.start(*launchers.command(*grid(3), "--study", "s"), **env)
    wait_until_sbatch_began(launchers)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=180)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    assert "interrupted" in err
    whole(launchers, "s", 3)


def test_an_sbatch_that_outlives_its_launcher_is_waited_for(launchers: Launchers) -> None:
    env = slow_sbatch(launchers, "sleep 2")
    command = launchers.command(*grid(3), "--study", "s")
    process = launchers.start(*command, **env)
    wait_until_sbatch_began(launchers)
    process.kill()
    process.communicate()
    done = launchers.run(*command)
    assert done.returncode == 0, done.stderr
    whole(launchers, "s", 3)


def test_an_sbatch_that_outlives_the_launcher_of_a_single_run(launchers: Launchers) -> None:
    env = slow_sbatch(launchers, "sleep 2")
    process = launchers.start(*launchers.command(), **env)
    wait_until_sbatch_began(launchers)
    process.kill()
    process.communicate()
    cut = launchers.known()
    assert len(cut) == 1 and cut[0]["jobs"] == []
    done = launchers.run(*launchers.command())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == cut[0]["run"]
    assert launchers.jobs("tiny_cpu") == launchers.known()[0]["jobs"]


def test_runs_finds_the_job_of_a_run_that_was_cut_off(launchers: Launchers) -> None:
    go = launchers.folder / "go"
    env = slow_sbatch(launchers, ":", f"for n in $(seq 600); do [ ! -e {go} ] || break; sleep 0.1; done")
    process = launchers.start(*launchers.command(), **env)
    wait_until_sbatch_began(launchers)
    assert until(lambda: bool(launchers.jobs("tiny_cpu")), 60, every=0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    run = launchers.known()[0]
    if not run["jobs"]:  # its sbatch, which holds the run, is in a session of its own
        assert "being submitted" in run["detail"] or "interrupted" in run["detail"]
        go.touch()
        assert until(lambda: launchers.known()[0]["jobs"], 60, every=0.1)
        run = launchers.known()[0]
    assert run["jobs"] == launchers.jobs("tiny_cpu")
    # Whoever was cut off repeats the command, and means this run.
    again = launchers.run(*launchers.command())
    assert again.returncode == 0 and again.stdout.split()[-1] == run["run"], again.stderr
    assert run["jobs"] == launchers.jobs("tiny_cpu")
    assert launchers.run("cancel", run["run"]).returncode == 0
    assert launchers.jobs("tiny_cpu") == []


@pytest.mark.slow
@pytest.mark.drill
def test_two_launchers_racing(launchers: Launchers) -> None:
    for count in range(3):
        command = launchers.command(*grid(20), "--study", f"race{count}")
        racing = [launchers.start(*command) for _ in range(2)]
        said = [process.communicate(timeout=300)[1] for process in racing]
        assert [process.returncode for process in racing] == [0, 0], said
        assert sorted(text.count("20 submitted") for text in said) == [0, 1], said
        whole(launchers, f"race{count}", 20)
    racing = [launchers.start(*launchers.command()) for _ in range(4)]
    names = {process.communicate(timeout=300)[0].split()[-1] for process in racing}
    assert [process.returncode for process in racing] == [0] * 4
    assert len(names) == 4, "each of these commands asked for a run of its own"
    assert sorted(run["jobs"][0] for run in launchers.known(*names)) == launchers.jobs("tiny_cpu")
    row("two launchers submit the same study of 20 at once", "one submits 20 runs, the other finds that all 20 exist")


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(launchers: Launchers) -> Iterator[Path]:
    """A separate file system as the run root."""
    root = launchers.folder / "runs"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=1000,mode=755", "tmpfs", root], check=True)
    yield root
    subprocess.run(["umount", "-l", root], check=True)


def remount(root: Path, options: str) -> None:
    """Mount again with other options, once killed processes have closed their files: a kill returns at once."""

    def mounted() -> bool:
        return subprocess.run(["mount", "-o", f"remount,{options}", root], check=False).returncode == 0

    assert until(mounted, 60)


def test_a_disk_that_fills_while_run_folders_are_made(launchers: Launchers, small_disk: Path) -> None:
    command = launchers.command(*grid(20), "--study", "s")
    done = launchers.run(*command)
    assert done.returncode == 3
    assert "No space left on device" in done.stderr
    assert launchers.jobs("s") == []
    remount(small_disk, "nr_inodes=4000")
    assert launchers.run(*command).returncode == 0
    whole(launchers, "s", 20)
    assert not list(small_disk.glob("s/.making-*"))
    row("disk full while the folders of a study are made", "No space left on device; the same command completes it")


def test_a_disk_that_is_full_right_after_sbatch(launchers: Launchers, small_disk: Path) -> None:
    fill = f"dd if=/dev/zero of={small_disk}/fill bs=64k status=none 2>/dev/null"
    command = launchers.command(*grid(3), "--study", "s")
    cut = launchers.run(*command, **slow_sbatch(launchers, ":", fill))
    assert cut.returncode == 3, cut.stderr
    assert "was submitted, but cannot be recorded" in cut.stderr
    assert len(launchers.jobs("s")) == 3
    (small_disk / "fill").unlink()
    assert launchers.run(*command).returncode == 0
    whole(launchers, "s", 3)
    row("disk full at the manifest, after sbatch", "job N was submitted, but cannot be recorded: same command")


def test_a_run_root_that_turned_read_only(launchers: Launchers, small_disk: Path) -> None:
    command = launchers.command(*grid(3), "--study", "s")
    process = launchers.start(*command, **slow_sbatch(launchers, "sleep 60"))
    wait_until_sbatch_began(launchers)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    os.killpg(int((launchers.folder / "began").read_text()), signal.SIGKILL)  # the sbatch, in a session of its own
    remount(small_disk, "ro")
    cut = launchers.run(*command)
    assert cut.returncode == 1, cut.stderr
    assert "you cannot" in cut.stderr
    remount(small_disk, "rw")
    assert launchers.run(*command).returncode == 0
    whole(launchers, "s", 3)
    row("run root read-only in the middle", "you cannot write to it; the same command completes it")


# --- who may write, and whose job it is -------------------------------------------------------------------------------


def test_nothing_is_writable_for_others_under_any_umask(launchers: Launchers) -> None:
    """Neither what the launcher makes nor what the job writes."""
    submit = ["submit", "tiny_cpu", "--backend", "sbatch", "--set", "launch.python=/bin/true", "--wait"]
    line = " ".join([*FP8LAUNCH, *submit, "--sweep", "megatron.seed=1,2", "--yes"])
    done = launchers.run("-c", f"umask 000; exec {line}", program=["bash"])
    assert done.returncode == 0, done.stderr
    found = [launchers.folder / "runs", *(launchers.folder / "runs").rglob("*")]
    assert len(list((launchers.folder / "runs").glob("*/*/logs/*.exit"))) == 2
    assert [path for path in found if path.stat().st_mode & 0o022 and not path.is_symlink()] == []


def test_another_job_with_the_number_of_ours_is_left_alone(launchers: Launchers) -> None:
    """As after a loss of Slurm's state, when job ids restart."""
    run = launchers.run(*launchers.command()).stdout.split()[-1]
    later = ["--begin=now+10hours", "-o", "/dev/null", "--wrap", "true"]
    other = launchers.slurm.run("sbatch", "--parsable", "-J", "mine", "--comment=fp8launch:x.s0-1", *later)
    manifest = launchers.folder / "runs" / run / "manifest.json"
    content = json.loads(manifest.read_text())
    content["jobs"] = [{"id": other.stdout.strip()}]
    manifest.write_text(json.dumps(content))
    assert launchers.known(run)[0]["state"] == "unknown"
    assert launchers.run("cancel", run).returncode == 0
    assert launchers.slurm.run("squeue", "-h", "-j", other.stdout.strip(), "-o", "%T").stdout == "PENDING\n"


def row(what: str, seen: str) -> None:
    """Write a row of the table of drills (benchmarks/resume/drills.md)."""
    if file := os.environ.get("FP8LAUNCH_DRILLS"):
        with Path(file).open("a") as table:
            table.write(f"| {what} | 1 | 0 | 0 | {seen} |\n")


@pytest.mark.parametrize("backend", ["sbatch", pytest.param("submitit", marks=pytest.mark.needs_plugin("submitit"))])
@pytest.mark.parametrize("points", [1, 3])
def test_a_site_that_replaces_comments_has_no_second_job(launchers: Launchers, backend: str, points: int) -> None:
    """The launcher dies after sbatch, and the comment that held the key of its submission is gone."""
    wrapper = launchers.folder / "bin" / "sbatch"
    wrapper.parent.mkdir(exist_ok=True)
    real = shutil.which("sbatch", path=launchers.env["PATH"])
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--test-only*) exec {real} "$@";; esac\n'
        f'job=$({real} "$@" | grep -o "[0-9]*" | head -n 1)\n'
        'scontrol update JobId="$job" Comment=site || exit\nkill -9 $PPID\n'
    )
    wrapper.chmod(0o755)
    command = launchers.command("--backend", backend, *(grid(points) if points > 1 else []))
    killed = launchers.run(*command, PATH=f"{wrapper.parent}:{launchers.env['PATH']}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = launchers.run(*command)
    assert again.returncode == 0, again.stderr
    listed = launchers.slurm.run("squeue", "-h", "-r", "-t", "PD,R", "-o", "%i|%k").stdout.split()
    assert len(listed) == points
    assert {row.partition("|")[2] for row in listed} == {"site"}
    assert sorted(job for run in launchers.known() for job in run["jobs"]) == sorted(
        row.partition("|")[0] for row in listed
    )
