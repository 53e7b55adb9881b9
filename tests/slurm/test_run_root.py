"""A run root that the nodes do not see is found before a job is submitted, where anything shows it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from cluster.processes import until
from launching import Site, sets


def warnings(site: Site, root: Path, profile: str = "") -> list[dict[str, Any]]:
    """What `check` says of this run root."""
    file = site.folder / "site.yaml"
    file.write_text(f"run_root: {root}\n{profile}")
    done = site.run("check", "recipes/tiny_cpu.yaml", "--cluster", str(file), "--json")
    problems: list[dict[str, Any]] = json.loads(done.stdout)["problems"]
    return [one for one in problems if one["where"] == "run root"]


def codes(problems: list[dict[str, Any]]) -> list[str]:
    return [one["code"] for one in problems]


@pytest.fixture
def in_memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_a_file_system_of_this_machine_alone(site: Site, in_memory: Path) -> None:
    if not site.slurm.site.namespaces:
        pytest.skip("this machine lets nobody make namespaces: the nodes share its name")
    [found] = warnings(site, in_memory)
    assert (found["code"], found["severity"]) == ("run-root-local", "warning")
    assert "tmpfs" in found["message"] and "shared_folders" in found["fix"]
    assert warnings(site, in_memory, f"shared_folders: [{in_memory}]\n") == []
    assert codes(warnings(site, in_memory, "shared_folders: [/home, /project]\n")) == ["run-root-not-shared"]


def test_a_run_that_began_shows_that_nodes_see_the_run_root(site: Site, tmp_path: Path) -> None:
    """The nodes of the tests have this machine's /tmp, which nodes of other clusters have not."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    assert codes(warnings(site, root)) == ["run-root-local"]
    choices = ["--run-root", str(root), "--backend", "sbatch", *sets("launch.python=/usr/bin/true")]
    run = site.submit(*choices)
    assert until(lambda: site.state(run)["state"] in ("completed", "failed"), 120, 0.5), site.state(run)
    assert warnings(site, root) == []
    shutil.rmtree(root)


def test_a_node_that_did_not_see_the_run_root(slurm: Cluster, site: Site) -> None:
    if not slurm.site.namespaces:
        pytest.skip("this machine lets nobody make namespaces: the nodes have no disks of their own")
    root = slurm.site.local / "runs"  # every node has another disk here
    done = site.run("submit", "recipes/tiny_cpu.yaml", "--backend", "sbatch", "--run-root", str(root))
    assert done.returncode == 0, done.stderr
    run = done.stdout.split()[-1]
    assert until(lambda: site.state(run)["state"] == "failed", 120, 0.5), site.state(run)
    assert "every node sees" in site.state(run)["detail"]
    # The accounting hears of the end a little later than the queue.
    assert until(lambda: "0:53" in site.state(run)["detail"], 120, 0.5), site.state(run)
    [found] = warnings(site, root)
    assert (found["code"], found["severity"]) == ("run-root-unseen", "warning")
    assert run in found["message"]
    again = site.run("submit", "recipes/tiny_cpu.yaml", "--backend", "sbatch", "--run-root", str(root), "--dry-run")
    assert "run-root-unseen" in again.stderr
