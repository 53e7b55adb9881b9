"""Studies on a real Slurm: arrays, nothing twice, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster
from cluster.processes import until

ROOT = Path(__file__).parents[2]
# A run that needs no training: the step starts `true` with the arguments that Python would get.
INSTANT = ["--set", "launch.python=/bin/true", "--backend", "sbatch", "--yes"]


@pytest.fixture
def env(slurm: Cluster, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    own = {"HOME": str(tmp_path / "home"), "FP8LAUNCH_RUNS": str(tmp_path / "runs"), "FP8LAUNCH_OFFLINE": "1"}
    return {**{k: v for k, v in slurm.env.items() if not k.startswith("XDG")}, **own}


def fp8launch(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "fp8launch", *arguments],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def grid(count: int, *more: str) -> list[str]:
    seeds = ",".join(map(str, range(1, count + 1)))
    return ["submit", "tiny_cpu", "--sweep", f"megatron.seed={seeds}", *INSTANT, *more]


def submitted(slurm: Cluster) -> list[str]:
    """Every array task that Slurm ever got, by squeue and sacct."""
    rows = slurm.run("sacct", "-X", "-n", "-P", "-a", "-o", "JobID,JobName").stdout.splitlines()
    rows += slurm.run("squeue", "-a", "-r", "-h", "-t", "all", "-o", "%i|%j").stdout.splitlines()
    return sorted({row.partition("|")[0] for row in rows if row.endswith("|tiny_cpu")})


def states(env: dict[str, str], study: str) -> dict[str, str]:
    return {run["run"]: run["state"] for run in json.loads(fp8launch(env, "runs", study, "--json").stdout)}


def wait_done(env: dict[str, str], study: str, count: int, seconds: float = 300) -> dict[str, str]:
    # squeue costs a tenth of what `fp8launch runs` does.
    waiting = ["squeue", "-h", "-t", "PD,R,CG", "-o", "%j"]
    until(lambda: "tiny_cpu" not in subprocess.run(waiting, env=env, capture_output=True, text=True).stdout, seconds)
    found: dict[str, str] = {}

    def done() -> bool:
        nonlocal found
        found = states(env, study)
        return len(found) == count and all(state in ("completed", "failed", "cancelled") for state in found.values())

    assert until(done, seconds), f"not done: {found}"
    return found


def test_points_go_as_one_array_and_the_same_command_submits_nothing_more(slurm: Cluster, env: dict[str, str]) -> None:
    before = set(submitted(slurm))
    first = fp8launch(env, *grid(6))
    assert first.returncode == 0, first.stderr
    assert "6 submitted in 1 call" in first.stderr
    study = first.stdout.split()[-1]
    assert set(wait_done(env, study, 6).values()) == {"completed"}
    again = fp8launch(env, *grid(6))
    assert again.stdout == first.stdout
    assert "0 submitted" in again.stderr
    assert len(set(submitted(slurm)) - before) == 6


@pytest.mark.parametrize("backend", ["sbatch", pytest.param("submitit", marks=pytest.mark.needs_plugin("submitit"))])
def test_a_study_above_the_limit_of_jobs_is_submitted_in_parts(
    slurm: Cluster, env: dict[str, str], backend: str
) -> None:
    """An array counts as many jobs as it has tasks, and Slurm refuses it as a whole."""
    command = grid(8, "--slurm", "begin=now+600", "--backend", backend)
    slurm.run("sacctmgr", "-i", "modify", "user", slurm.site.user, "set", "MaxSubmitJobs=5")
    try:
        first = fp8launch(env, *command)
        assert first.returncode == 3
        assert "[submit-limit]" in first.stderr and "(5 of 8 runs submitted)" in first.stderr, first.stderr
        assert len(slurm.run("squeue", "-h", "-r", "-t", "PD").stdout.splitlines()) == 5
    finally:
        slurm.run("sacctmgr", "-i", "modify", "user", slurm.site.user, "set", "MaxSubmitJobs=-1")
    again = fp8launch(env, *command)
    assert "3 submitted" in again.stderr and "5 already existed" in again.stderr, again.stderr
    assert len(slurm.run("squeue", "-h", "-r", "-t", "PD").stdout.splitlines()) == 8


def test_tasks_that_are_cancelled_while_they_wait_are_cancelled(slurm: Cluster, env: dict[str, str]) -> None:
    """Slurm removes such a task from its array, and keeps no record of it. Every second task of a long list."""
    study = fp8launch(env, *grid(60, "--slurm", "begin=now+600")).stdout.split()[-1]
    jobs = {run["run"]: run["jobs"][0] for run in json.loads(fp8launch(env, "runs", study, "--json").stdout)}
    gone = [job for job in jobs.values() if int(job.partition("_")[2]) % 2]
    slurm.run("scancel", *gone)
    expected = {run: "cancelled" if job in gone else "pending" for run, job in jobs.items()}
    assert until(lambda: states(env, study) == expected, 30, 0.5), states(env, study)
    slurm.run("scancel", gone[0].partition("_")[0])
    assert until(lambda: set(states(env, study).values()) == {"cancelled"}, 30, 0.5), states(env, study)
    again = fp8launch(env, *grid(60, "--slurm", "begin=now+600", "--retry-failed"))
    assert "60 submitted" in again.stderr, again.stderr
    fp8launch(env, "cancel", study)


def test_a_study_asks_before_it_submits(slurm: Cluster, env: dict[str, str]) -> None:
    done = fp8launch(env, *[word for word in grid(3) if word != "--yes"])
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert not Path(env["FP8LAUNCH_RUNS"]).exists()


def test_bad_points_stop_the_study_unless_they_are_to_be_skipped(slurm: Cluster, env: dict[str, str]) -> None:
    command = ["submit", "tiny_cpu", "--sweep", "batch.micro=2,3", *INSTANT]
    refused = fp8launch(env, *command)
    assert refused.returncode == 1
    assert "micro batch 3" in refused.stderr
    done = fp8launch(env, *command, "--skip-bad")
    assert done.returncode == 0
    assert "skipped: micro=3" in done.stderr
    assert "1 submitted" in done.stderr


def test_failed_points_are_submitted_again_alone(slurm: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "sometimes.sh"
    script.write_text('#!/bin/sh\ncase "$*" in *"--seed 2 "*|*"--seed 2") [ -e "$FLAG" ] || exit 9;; esac\n')
    script.chmod(0o755)
    command = [w if w != "launch.python=/bin/true" else f"launch.python={script}" for w in grid(3)]
    command += ["--set", f"env.FLAG={tmp_path / 'flag'}"]
    study = fp8launch(env, *command).stdout.split()[-1]
    ended = wait_done(env, study, 3)
    assert sorted(ended.values()) == ["completed", "completed", "failed"]
    (tmp_path / "flag").touch()
    assert "0 submitted" in fp8launch(env, *command).stderr
    retried = fp8launch(env, *command, "--retry-failed")
    assert "1 submitted" in retried.stderr
    assert set(wait_done(env, study, 3).values()) == {"completed"}
    jobs = {run["run"]: run["jobs"] for run in json.loads(fp8launch(env, "runs", study, "--json").stdout)}
    assert sorted(map(len, jobs.values())) == [1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.5, 1.1, 1.8])
def test_killed_in_the_middle_the_same_command_completes_it(slurm: Cluster, env: dict[str, str], delay: float) -> None:
    """kill -9 at different moments; afterwards every point ran once."""
    before = set(submitted(slurm))
    command = [sys.executable, "-m", "fp8launch", *grid(20)]
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = fp8launch(env, *grid(20))
    assert done.returncode == 0, done.stderr
    study = done.stdout.split()[-1]
    assert set(wait_done(env, study, 20).values()) == {"completed"}
    assert len(set(submitted(slurm)) - before) == 20


def test_an_answer_that_was_lost_is_found_again(slurm: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    """An sbatch that submits and then never answers, as a busy controller's does."""
    before = set(submitted(slurm))
    real = slurm.run("which", "sbatch").stdout.strip()
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "sbatch"
    timed_out = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$1" in --parsable) {real} "$@" >/dev/null; echo "{timed_out}" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    broken = {**env, "PATH": f"{tmp_path / 'bin'}:{env['PATH']}"}
    done = fp8launch(broken, *grid(4))
    assert done.returncode == 0, done.stderr
    assert set(wait_done(env, done.stdout.split()[-1], 4).values()) == {"completed"}
    assert len(set(submitted(slurm)) - before) == 4


@pytest.mark.slow
def test_two_submissions_at_once_submit_each_point_once(slurm: Cluster, env: dict[str, str]) -> None:
    before = set(submitted(slurm))
    command = [sys.executable, "-m", "fp8launch", *grid(10)]
    racing = [
        subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [process.communicate()[1] for process in racing]
    assert all("Traceback" not in text for text in ended)
    study = fp8launch(env, *grid(10)).stdout.split()[-1]
    assert set(wait_done(env, study, 10).values()) == {"completed"}
    assert len(set(submitted(slurm)) - before) == 10


def test_cancel_ends_the_whole_study(slurm: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "long.sh"
    script.write_text("#!/bin/sh\nsleep 300\n")
    script.chmod(0o755)
    command = [w if w != "launch.python=/bin/true" else f"launch.python={script}" for w in grid(5)]
    study = fp8launch(env, *command).stdout.split()[-1]
    assert fp8launch(env, "cancel", study).returncode == 0
    assert set(wait_done(env, study, 5).values()) == {"cancelled"}
    assert slurm.run("squeue", "-h").stdout == ""


def test_a_controller_that_is_silent_leaves_a_study_that_can_be_completed(slurm: Cluster, env: dict[str, str]) -> None:
    before = set(submitted(slurm))
    slurm.settle()
    slurm.stop_controller()
    cut = fp8launch(env, *grid(3))
    assert cut.returncode == 3, cut.stderr
    slurm.start_controller()
    done = fp8launch(env, *grid(3))
    assert done.returncode == 0, done.stderr
    assert set(wait_done(env, done.stdout.split()[-1], 3).values()) == {"completed"}
    assert len(set(submitted(slurm)) - before) == 3


@pytest.mark.slow
def test_two_hundred_array_tasks(slurm: Cluster, env: dict[str, str]) -> None:
    started = time.monotonic()
    done = fp8launch(env, *grid(200), "--max-running", "32")
    took = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    assert "200 submitted in 1 call" in done.stderr
    assert took < 60
    assert set(wait_done(env, done.stdout.split()[-1], 200, 240).values()) == {"completed"}


@pytest.mark.needs_plugin("submitit")
def test_submitit_submits_a_grid_as_one_array(slurm: Cluster, env: dict[str, str]) -> None:
    command = [word if word != "sbatch" else "submitit" for word in grid(4)]
    first = fp8launch(env, *command)
    assert first.returncode == 0, first.stderr
    assert "4 submitted in 1 call" in first.stderr
    study = first.stdout.split()[-1]
    assert set(wait_done(env, study, 4).values()) == {"completed"}
    jobs = [run["jobs"][0] for run in json.loads(fp8launch(env, "runs", study, "--json").stdout)]
    assert sorted(job.partition("_")[2] for job in jobs) == ["0", "1", "2", "3"]
    assert "0 submitted" in fp8launch(env, *command).stderr


@pytest.mark.parametrize("by", ["fp8launch", "scancel"])
def test_tasks_that_were_cancelled_while_they_waited_are_submitted_again(
    slurm: Cluster, env: dict[str, str], tmp_path: Path, by: str
) -> None:
    """squeue forgets them after some minutes, and the accounting has one row in brackets for all of them."""
    command = [*grid(4), "--set", "resources.gpus_per_node=1"]
    held = ["scontrol", "update", "PartitionName=main", "State=DOWN"]
    slurm.run(*held)
    try:
        study = fp8launch(env, *command).stdout.split()[-1]
        array = json.loads(fp8launch(env, "runs", study, "--json").stdout)[0]["jobs"][0].partition("_")[0]
        if by == "fp8launch":
            assert fp8launch(env, "cancel", study).returncode == 0
        else:
            slurm.run("scancel", array)
    finally:
        slurm.run(*held[:-1], "State=UP")
    forgetful = tmp_path / "forgetful"
    forgetful.mkdir()
    (forgetful / "squeue").write_text("#!/bin/sh\nexit 0\n")
    (forgetful / "squeue").chmod(0o755)
    later = {**env, "PATH": f"{forgetful}:{env['PATH']}"}
    assert until(lambda: set(states(later, study).values()) == {"cancelled"}, 60), states(later, study)
    done = fp8launch(env, *command, "--retry-failed")
    assert "4 submitted" in done.stderr, done.stderr
    assert set(wait_done(env, study, 4).values()) == {"completed"}


def test_a_dead_controller_is_no_reason_to_train_on_the_login_node(
    slurm: Cluster, env: dict[str, str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $SLURM_JOB_ID >> {tmp_path}/trained\n")
    python.chmod(0o755)
    profile = tmp_path / "c.yaml"
    profile.write_text("partition: main\n")
    command = ["submit", "tiny_cpu", "--set", f"launch.python={python}", "--cluster", str(profile)]
    slurm.settle()
    slurm.stop_controller()
    refused = fp8launch(env, *command, "--wait")
    assert refused.returncode == 3, refused.stderr
    assert not (tmp_path / "trained").exists()
    slurm.start_controller()
    done = fp8launch(env, *command, "--wait")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trained").read_text().strip(), "it ran in a job"
    assert len(list(Path(env["FP8LAUNCH_RUNS"]).glob("tiny_cpu-*"))) == 1
