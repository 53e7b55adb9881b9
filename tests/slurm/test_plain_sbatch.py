"""Scripts of slurm/ that plain sbatch runs: their folders are runs, and their output names the folder and the cause."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tarfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.processes import until
from launching import ROOT, Site

SCRIPT = ROOT / "slurm/tiny_cpu.sbatch"


@pytest.fixture
def started(site: Site, tmp_path: Path) -> Callable[..., tuple[str, Path]]:
    """Submit the script from another folder than the checkout, as the docs allow; the job and its run folder."""

    def start(*words: str, options: tuple[str, ...] = (), runs: Path = tmp_path / "runs") -> tuple[str, Path]:
        env = {"FP8LAUNCH_HOME": str(ROOT), "FP8LAUNCH_PYTHON": sys.executable, "FP8LAUNCH_RUNS": str(runs)}
        env["HOME"] = site.env["HOME"]
        job = site.slurm.run(
            "sbatch", "--parsable", *options, str(SCRIPT), *words, cwd=tmp_path, env=env
        ).stdout.strip()
        return job, runs / f"tiny_cpu-{job}"

    return start


def batch_output(folder: Path, job: str) -> str:
    return (folder / f"tiny_cpu-{job}.out").read_text()


def watched(site: Site, name: str, until: str) -> str:
    """What `fp8launch watch` has drawn on a terminal when these words are on it."""
    terminal, side = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [site.python, "-m", "fp8launch", "watch", name]
    env = {**site.env, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=env, cwd=ROOT) as process:
        os.close(side)
        seen = ""
        end = time.monotonic() + 60
        while until not in seen and time.monotonic() < end:
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 1 << 16).decode(errors="replace")
        os.write(terminal, b"q")
        process.wait(60)
    os.close(terminal)
    return seen


@pytest.mark.needs_plugin("archive")
@pytest.mark.needs_plugin("watch")
@pytest.mark.slow
def test_the_folder_is_a_run_like_any_other(
    site: Site, tmp_path: Path, started: Callable[..., tuple[str, Path]]
) -> None:
    other_root = tmp_path / "elsewhere"
    job, folder = started("--train-iters", "8", options=("--nodes=2", "--comment=of mine"), runs=other_root)
    site.slurm.wait_state(job, "COMPLETED")
    assert batch_output(tmp_path, job) == f"fp8launch: run folder {folder}\n"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["layout"]["world"] == 2
    assert manifest["megatron"]["argv"][-2:] == ["--train-iters", "8"]
    assert manifest["command"] == ["sbatch", str(SCRIPT), "--train-iters", "8"]

    report = site.json("parse", str(folder))
    assert (report["status"], report["iteration_last"], report["world_size"]) == ("ok", 8, 2)
    assert site.json("verify", str(folder))["verdict"] == "not FP8"
    done = site.run("compare", str(folder), str(folder))
    assert done.returncode == 0, done.stderr

    # The job recorded its root: no path is needed, and no FP8LAUNCH_RUNS.
    row = site.state(f"tiny_cpu-{job}")
    assert (row["state"], row["source"], row["jobs"]) == ("completed", "sacct", [job])
    assert f"tiny_cpu-{job}" in site.run("runs").stdout
    assert "2 x 1 cpu" in site.run("runs", job).stdout
    assert site.run("logs", job, "--batch").stdout == batch_output(tmp_path, job)
    assert "completed" in watched(site, str(folder), until="8/8")
    archive = tmp_path / "a.tar.gz"
    assert site.run("archive", job, "--out", str(archive)).returncode == 0
    with tarfile.open(archive) as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert names == {"manifest.json", f"{job}-0.log", f"{job}-0.exit", f"slurm-{job}.out"}

    refused = site.run("resume", job)
    assert refused.returncode == 1
    assert "was started by a portable script" in refused.stderr
    # Slurm has the run's name, next to the user's own comment.
    comment = site.slurm.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%k").stdout.strip()
    assert comment == f"fp8launch:tiny_cpu-{job} of mine"


@pytest.mark.slow
def test_a_running_job_is_seen_and_cancelled(site: Site, started: Callable[..., tuple[str, Path]]) -> None:
    job, folder = started("--train-iters", "1000000")
    assert until(lambda: (folder / "manifest.json").is_file() and site.state(job)["progress"]["iteration"], 120, 0.5)
    assert site.state(job)["state"] == "running"
    assert site.state(job)["source"] == "squeue"
    done = site.run("cancel", job)
    assert f"cancelled tiny_cpu-{job}" in done.stderr
    site.slurm.wait_state(job, "CANCELLED")
    assert until(lambda: site.state(job)["state"] == "cancelled", 60, 0.5), site.state(job)


@pytest.mark.slow
def test_a_failed_job_names_the_cause_in_its_own_output(
    site: Site, tmp_path: Path, started: Callable[..., tuple[str, Path]]
) -> None:
    job, folder = started("--tensor-model-parallel-size", "2")
    site.slurm.wait_state(job, "FAILED")
    lines = batch_output(tmp_path, job).splitlines()
    assert lines[0] == f"fp8launch: run folder {folder}"
    own = [line for line in lines if line.startswith("fp8launch: ")][1:]
    assert own[0] == "fp8launch: the training failed with exit status 1: bad-arguments"
    assert "world size (1) is not divisible by" in own[1]
    assert own[-1] == f"fp8launch: log: {folder}/logs/{job}-0.log"
    assert site.json("parse", str(folder))["failure"]["code"] == "bad-arguments"
    assert "bad-arguments" in site.run("runs", job).stdout


@pytest.mark.slow
def test_srun_s_words_explain_a_process_that_was_killed(
    site: Site, tmp_path: Path, started: Callable[..., tuple[str, Path]]
) -> None:
    """They are in the batch script's own output, which lies outside the run folder."""
    killed = tmp_path / "python"
    killed.write_text(f'#!/bin/sh\ncase "$*" in *worker.py*) kill -9 $$;; esac\nexec {sys.executable} "$@"\n')
    killed.chmod(0o755)
    env = {"FP8LAUNCH_HOME": str(ROOT), "FP8LAUNCH_PYTHON": str(killed), "HOME": site.env["HOME"]}
    job = site.slurm.run("sbatch", "--parsable", str(SCRIPT), cwd=tmp_path, env=env).stdout.strip()
    site.slurm.wait_state(job, "FAILED")
    assert "137: killed" in batch_output(tmp_path, job)
    assert site.state(job)["failure"]["code"] == "killed"


@pytest.mark.slow
def test_a_requeued_job_goes_on_in_its_folder(site: Site, started: Callable[..., tuple[str, Path]]) -> None:
    job, folder = started("--train-iters", "1000000", options=("--requeue",))
    assert until(lambda: list(folder.glob("logs/*-0.log")), 120, 0.5)
    before = (folder / "manifest.json").read_text()
    site.slurm.run("scontrol", "requeue", job)
    assert until(lambda: list(folder.glob("logs/*-1.log")), 180, 0.5)
    assert (folder / "manifest.json").read_text() == before
    assert site.state(job)["state"] == "running"
    site.slurm.run("scancel", job)


@pytest.mark.slow
def test_each_task_of_an_array_is_a_run(site: Site, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.txt"
    tasks.write_text("tiny_cpu --train-iters 3\ntiny_cpu --train-iters 4\n")
    env = {"FP8LAUNCH_HOME": str(ROOT), "FP8LAUNCH_PYTHON": sys.executable, "HOME": site.env["HOME"]}
    options = ("--array=0-1", "--ntasks-per-node=1", "--gpus-per-node=0")
    script = str(ROOT / "slurm/array.sbatch")
    job = site.slurm.run("sbatch", "--parsable", *options, script, str(tasks), cwd=tmp_path, env=env).stdout.strip()
    assert until(lambda: len(site.json("runs")) == 2, 120, 0.5)
    assert until(lambda: {run["state"] for run in site.json("runs")} == {"completed"}, 120, 0.5), site.json("runs")
    runs = {run["jobs"][0]: run["progress"]["iteration"] for run in site.json("runs")}
    assert runs == {f"{job}_0": 3, f"{job}_1": 4}
