"""Looking before training on a real Slurm: healthy and sick nodes, the bandwidth check, arrays by plain sbatch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from launching import ROOT, Site, sets

PLACES = {"FP8LAUNCH_HOME": str(ROOT), "FP8LAUNCH_PYTHON": sys.executable}
# The tests' nodes share one machine's memory.
EASY = ("--memory=0", "--tmp=0", "--shm=1")


def batch(slurm: Cluster, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output of a script, submitted from a folder that is not the checkout."""
    output = folder / "%x-%a.out" if any(a.startswith("--array") for a in arguments) else folder / "%x.out"
    done = slurm.run(
        "sbatch", "--wait", f"--output={output}", *arguments, check=False, timeout=300, env={**PLACES, **(env or {})}
    )
    return done.returncode, "".join(file.read_text() for file in sorted(folder.glob("*.out")))


@pytest.fixture
def sick_node(slurm: Cluster) -> Iterator[str]:
    """A node of four whose /dev/shm is too small."""
    resize = ["srun", "-w", "node2", "mount", "-o"]
    if not slurm.site.namespaces or os.geteuid() != 0:
        pytest.skip("the nodes share this machine's /dev/shm")
    slurm.run(*resize, "remount,size=64m", "/dev/shm")
    yield "node2"
    slurm.run(*resize, "remount,size=50%", "/dev/shm")


def test_healthy_nodes_are_one_line(slurm: Cluster, tmp_path: Path) -> None:
    status, said = batch(slurm, tmp_path, "--nodes=4", str(ROOT / "slurm/health.sbatch"), *EASY)
    assert (status, said) == (0, "fp8launch: all 4 nodes are healthy, skipped: GPUs (no nvidia-smi)\n")


def test_a_sick_node_is_named(slurm: Cluster, tmp_path: Path, sick_node: str) -> None:
    status, said = batch(slurm, tmp_path, "--nodes=4", str(ROOT / "slurm/health.sbatch"), *EASY)
    assert status == 75
    assert said == f"{sick_node}: bad: /dev/shm: 0.1 GiB, wants 1\nfp8launch: 1 of 4 nodes are not healthy\n"


def run_with_check(site: Site, expect: int) -> str:
    script = site.folder / "trained.py"
    script.write_text("print('training began', flush=True)\n")
    choices = sets(
        "launch.health_check=true", f"launch.script={script}", "resources.gpus_per_node=2", "batch.global=16"
    )
    return site.submit("--backend", "sbatch", "--wait", "--nodes", "4", *choices, expect=expect)


def test_a_run_looks_first_and_then_trains(site: Site) -> None:
    log = site.log(run_with_check(site, 0)).read_text()
    assert log.index("all 4 nodes are healthy") < log.index("training began")


def test_a_run_stops_before_training_on_a_sick_node(site: Site, sick_node: str) -> None:
    run = run_with_check(site, 1)
    state = site.state(run)
    assert state["state"] == "failed"
    sacct = site.slurm.run("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", state["jobs"][0])
    assert sacct.stdout.strip() == "FAILED|75:0"
    failure = site.json("parse", run)["failure"]
    assert failure["code"] == "unhealthy-node"
    assert failure["message"] == f"{sick_node}: bad: /dev/shm: 0.1 GiB, wants 1"
    assert "training began" not in site.log(run).read_text()


@pytest.mark.slow
def test_bandwidths_are_compared_between_nodes(slurm: Cluster, tmp_path: Path) -> None:
    layout = ("--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=0", str(ROOT / "slurm/nccl_check.sbatch"))
    # Of different figures one is below their median, so with --least=1 some pair must be told.
    status, said = batch(slurm, tmp_path, *layout, "--repeat=2", "--sizes", "1", "--least=1")
    assert "3 ranks on 3 nodes, gloo" in said
    assert "between each node and the next" in said
    figures = {line.split(":")[0].strip(): line for line in said.splitlines() if line.startswith("  node")}
    assert set(figures) == {"node1 - node2", "node2 - node3", "node3 - node1"}
    assert sum("SLOW" in line for line in figures.values()) >= 1
    assert status == 1


@pytest.mark.slow
def test_bandwidth_within_one_machine() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    check = [str(ROOT / "slurm/nccl_check.py"), "--repeat=2", "--sizes", "1"]
    done = subprocess.run([*torchrun, *check], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 nodes, gloo" in done.stdout
    assert "within each node, 1 MiB:" in done.stdout


@pytest.mark.train
@pytest.mark.slow
def test_one_array_over_recipes_and_values(slurm: Cluster, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.txt"
    tasks.write_text("# two variants\ntiny_cpu --train-iters 3\n\ntiny_cpu --train-iters 5 --seed 7\n")
    asks = ("--array=0-2", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0")
    script = str(ROOT / "slurm/array.sbatch")
    status, said = batch(slurm, tmp_path, *asks, script, str(tasks), env={"FP8LAUNCH_RUNS": str(tmp_path / "runs")})
    assert status != 0  # task 2 is not there
    assert "there are 2 tasks and no number 2" in said
    logs = [log.read_text() for log in sorted(tmp_path.glob("runs/*/logs/*_[01]-0.log"))]
    assert [len(re.findall(r"iteration +\d+/", log)) for log in logs] == [3, 5]
    assert "seed ............................................ 7" in logs[1]
