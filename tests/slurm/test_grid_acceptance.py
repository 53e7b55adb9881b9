"""A grid of real training by the backends that submit one job at a time: killed in the middle, completed, compared."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cluster import Cluster
from cluster.processes import until
from launching import ROOT, Site, sets
from test_nemo_run import PYTHON, NemoSite, missing

NODES, RATES = (1, 2), ("0.01", "0.02", "0.03")


@pytest.fixture(
    params=[
        pytest.param("submitit", marks=pytest.mark.needs_plugin("submitit")),
        pytest.param("nemo-run", marks=pytest.mark.needs_plugin("nemo_run")),
    ]
)
def backend(request: pytest.FixtureRequest, slurm: Cluster, tmp_path: Path) -> tuple[Site, list[str], int]:
    """The site, what chooses the backend on it, and how often each point runs."""
    if request.param == "submitit":
        return Site(slurm, tmp_path), ["--backend", "submitit"], 2
    if reason := missing():
        pytest.skip(reason)
    site = NemoSite(slurm, tmp_path, PYTHON)
    return site, ["--backend", "nemo-run", *site.profile()], 1


@pytest.mark.slow
@pytest.mark.train
def test_two_by_three_with_repeats(backend: tuple[Site, list[str], int]) -> None:
    site, chosen, repeats = backend
    points = len(NODES) * len(RATES) * repeats
    sizes, rates = ",".join(map(str, NODES)), ",".join(RATES)
    command = [
        "submit", "recipes/tiny_cpu.yaml", "--nodes", sizes, "--sweep", f"train.lr={rates}", "--repeat", str(repeats),
        "--study", "grid", "--yes", *chosen,
        *sets("name=grid_of_cpus", "train.iterations=8", "resources.gpus_per_node=1"),
    ]  # fmt: skip

    def known() -> set[str]:
        """All jobs that Slurm has seen of this recipe. Other tests share this Slurm, hence the unique name."""
        rows = site.slurm.run("sacct", "-X", "-n", "-P", "-a", "-o", "JobID,JobName").stdout.splitlines()
        rows += site.slurm.run("squeue", "-a", "-h", "-t", "all", "-o", "%i|%j").stdout.splitlines()
        return {row.partition("|")[0] for row in rows if "grid_of_cpus" in row}

    before = known()
    log = site.folder / "killed.log"
    with log.open("w") as out:
        first = subprocess.Popen(
            [site.python, "-m", "fp8launch", *command], env=site.env, cwd=ROOT, stdout=out, stderr=out
        )
        assert until(lambda: len(known() - before) >= 3, 240, every=0.2), "the first jobs never came"
        first.kill()
        first.wait()
    # On a quick machine the launcher may have been done: then the second finds all that there is to submit.
    assert len(known() - before) <= points, log.read_text()

    # Half of a study can be looked at.
    site.run("compare", "grid")
    done = site.run(*command)
    assert done.returncode == 0, done.stderr
    ended = until(lambda: all(run["state"] == "completed" for run in site.json("runs", "grid")), 600, every=0.5)
    assert ended, site.json("runs", "grid")
    assert len(known() - before) == points
    runs = site.json("runs", "grid")
    assert [(len(run["jobs"]), run["attempts"]) for run in runs] == [(1, 1)] * points

    done = site.run("compare", "grid", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = site.json("compare", "grid")
    assert found["comparable"]
    rows = {(row["variant"], row["nodes"]): row for row in found["rows"]}
    assert len(rows) == len(NODES) * len(RATES)
    for (variant, nodes), row in rows.items():
        assert (row["status"], len(row["runs"])) == ("ok", repeats), (variant, nodes, row["status_text"])
        assert row["tokens_per_s_per_gpu"]["median"] > 0
        # The recipe keeps its batch, and more nodes are all that differs.
        assert (row["scaling_efficiency"]["scaling"], row["scaling_efficiency"]["noted"]) == ("strong", [])
        assert row["speedup"]["comparable"]
    assert {d["name"] for d in found["differences"]} <= {"lr", "world_size", "global_batch_size", "node set"}
